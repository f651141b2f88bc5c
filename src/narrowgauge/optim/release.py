"""Gradient release: each parameter is stepped inside backward, as soon as its gradient is there, which then goes.

Memory for gradients is that of the largest one instead of all (LOMO, Lv et al. 2023, arXiv:2306.09782).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.ops.reduce import GroupReducer, any_of
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.optim.clip import total_norm
from narrowgauge.optim.guard import StepGuard, all_finite
from narrowgauge.optim.replace import current
from narrowgauge.tensors.local import local_grad
from narrowgauge.tensors.shares import Share, parted, share_of

PREVIOUS_NORM = "narrowgauge_previous_norm"  # in the optimizer's state dict, where gradients are clipped by it
_ATTRIBUTE = "_narrowgauge_release"


def release_gradients(optimizer: Optimizer, max_norm: float | None = None) -> GradientRelease:
    """Step each parameter of `optimizer` inside backward, and drop its gradient; undo it with `.remove()`.

    The loop stays as it was: `loss.backward()`, `optimizer.step()`, which then finds nothing left to do but to end the
    step: it counts it and rolls scaling histories. Learning rates are read during backward, so change them before it.
    Without clipping the parameters are bitwise those of a step after backward, stochastic rounding included where
    backward itself draws no random numbers.

    optimizer: one of narrowgauge.optim, best after `prepare`, so that gradients are cast before they are read.
    max_norm: gradients are multiplied by min(1, max_norm / (norm + 1e-6)), where norm is that of all gradients of the
    step before, since this one's is not known yet; the first step is not clipped. The norm is a part of the optimizer's
    state dict. None: no clipping.

    A gradient that is not finite leaves its own parameter as it is, and `optimizer.step()` then counts the whole step
    as skipped (`optimizer.step_was_skipped`, scaling histories, DivergenceError after many in a row), as for any
    optimizer of `prepare`; but the other parameters have been stepped by then. Each gradient is waited for on its
    device.

    Of a parameter that is parted over processes either all parts are stepped or none: that takes one small collective
    for each such parameter, inside backward.

    No gradient can be added to: a second backward before `optimizer.step()` raises NarrowgaugeError. So do a loss
    scaler, which would have to look at all gradients before the step, and torch's own optimizers, which cannot step
    single parameters.
    """
    optimizer = current(optimizer)
    if not isinstance(optimizer, LowPrecisionOptimizer):
        kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        raise NarrowgaugeError(
            f"gradient release: expected an optimizer of narrowgauge.optim, found {kind}, which steps all of its "
            "parameters at once: build narrowgauge.optim's of that name, or take the one that "
            'narrowgauge.prepare(model, optimizer, "narrow8") returns'
        )
    if max_norm is not None and not max_norm > 0.0:
        raise NarrowgaugeError(f"expected max_norm above 0, or None, found {max_norm}")
    earlier = GradientRelease.on(optimizer)
    if earlier is not None:
        earlier.remove()
    return GradientRelease(optimizer, max_norm)


class GradientRelease:
    """What `release_gradients` put on an optimizer and its parameters.

    previous_norm: 2-norm of all gradients of the last step that was not skipped, before clipping; None before there is
    one, or without clipping.
    """

    def __init__(self, optimizer: LowPrecisionOptimizer, max_norm: float | None) -> None:
        self._optimizer = optimizer
        self._max_norm = max_norm
        self.previous_norm: Tensor | None = None
        self._arrived: set[Tensor] = set()
        self._norms: dict[Tensor, Tensor] = {}  # of what this process holds of each gradient
        self._parameters = {p for p in optimizer.parameters() if p.requires_grad}
        self._own_guard: StepGuard | None = None
        self._guard()
        self._handles: list[Any] = [p.register_post_accumulate_grad_hook(_Hook(self)) for p in self._parameters]
        self._handles += [
            optimizer.register_step_post_hook(self._end_step),
            optimizer.register_state_dict_post_hook(self._write_norm),
            optimizer.register_load_state_dict_pre_hook(self._read_norm),
        ]
        setattr(optimizer, _ATTRIBUTE, self)

    @staticmethod
    def on(optimizer: Optimizer) -> GradientRelease | None:
        """What is on `optimizer`, or None."""
        return getattr(optimizer, _ATTRIBUTE, None)

    def remove(self) -> None:
        """Undo `release_gradients`: gradients stay until the step again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._own_guard is not None:
            self._own_guard.detach()
        if GradientRelease.on(self._optimizer) is self:
            delattr(self._optimizer, _ATTRIBUTE)

    @torch.no_grad()
    def release(self, p: Tensor) -> None:
        """After the accumulation of `p.grad`: step, and drop it."""
        if p.grad is None:
            return
        self._check(p)
        self._arrived.add(p)
        grad = local_grad(p)
        assert grad is not None
        if self._is_bad(p, grad):
            self._guard().found_bad(p)
        else:
            if self._max_norm is not None:
                self._clip(p, grad)
            self._optimizer.step_parameters([p])
        p.grad = None

    def _check(self, p: Tensor) -> None:
        name = self._guard().name_of(p)
        if p not in self._parameters:
            p.grad = None
            raise NarrowgaugeError(
                f"gradient release: '{name}' has come in the place of a parameter that the optimizer held: call "
                ".remove() on what release_gradients returned before preparing again, and release_gradients after it"
            )
        if p in self._arrived:
            p.grad = None
            raise NarrowgaugeError(
                f"gradient release: a second gradient of '{name}' before optimizer.step(), and the first was used up: "
                "call optimizer.step() after every backward; to accumulate gradients over several, do without "
                "release_gradients"
            )

    def _is_bad(self, p: Tensor, grad: Tensor) -> bool:
        """True on all processes that hold a part of `p` where one of the parts has a gradient that is not finite."""
        is_bad = not all_finite([grad])
        reducer = self._guard().reducer
        for _, group in parted(p):
            over = reducer.over(group) if isinstance(reducer, GroupReducer) else GroupReducer(group)
            is_bad = any_of(is_bad, over, p.device)
        return is_bad

    def _clip(self, p: Tensor, grad: Tensor) -> None:
        if grad.numel():
            self._norms[p] = total_norm([(Share(), grad)], 2.0, grad.device)
        if self.previous_norm is not None:
            assert self._max_norm is not None
            # without a branch: multiplying by one leaves every value as it is
            factor = (self._max_norm / (self.previous_norm + 1e-6)).clamp(max=1.0)
            grad.mul_(factor.to(grad.device))

    def _guard(self) -> StepGuard:
        """The optimizer's guard; one of our own where it has none."""
        guard = StepGuard.on(self._optimizer)
        if guard is None:
            guard = self._own_guard = StepGuard(self._optimizer)
            guard.attach()
        return guard

    def _end_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        norms, self._norms = self._norms, {}
        self._arrived.clear()
        if self._max_norm is None or optimizer.step_was_skipped:  # type: ignore[attr-defined]
            return
        # of all parameters, so that processes which share some send as many numbers
        shares = [(share_of(p), norms.get(p)) for p in self._optimizer.parameters() if p in self._parameters]
        if norms or any(share.groups for share, _ in shares):
            device = next(iter(norms.values())).device if norms else next(iter(self._parameters)).device
            self.previous_norm = total_norm(shares, 2.0, device)

    def _write_norm(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        if self.previous_norm is not None:
            state[PREVIOUS_NORM] = float(self.previous_norm)

    def _read_norm(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        norm = state.get(PREVIOUS_NORM)
        self.previous_norm = None if norm is None or self._max_norm is None else torch.tensor(norm)


class _Hook:
    """`release`, held weakly: no garbage collector sees hooks, so they would keep the optimizer for ever.

    runs_on_means: where gradients leave their parameters for the mean over ranks, it is called again with that mean.
    """

    runs_on_means = True

    def __init__(self, release: GradientRelease) -> None:
        self._release = weakref.ref(release)

    def __call__(self, p: Tensor) -> None:
        release = self._release()
        if release is not None:
            release.release(p)
