"""Steps with non-finite gradients are skipped, whatever the optimizer.

The guard sits on a stock torch optimizer as its step hooks. A skipped step changes nothing: the gradients are cleared
(so that they do not add up into the next step), parameters, moments and step counters stay as they were. A run of
skipped steps ends with an error that names the first bad parameter. The count of steps is a part of the optimizer's
state dict, from which a precision schedule goes on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from narrowgauge.errors import DivergenceError, NarrowgaugeError
from narrowgauge.ops.reduce import SINGLE_PROCESS, Reducer, agreed_text, any_of
from narrowgauge.tensors.local import local, local_grad
from narrowgauge.tensors.quantized import QuantizedTensor

MAX_SKIPS = 50  # from a loss scale of 2^16, halving reaches 1 after 16 skips: what comes later is no search for a scale
STEPS = "narrowgauge_steps"  # in the optimizer's state dict: steps so far, taken and skipped
_ATTRIBUTE = "_narrowgauge_guard"


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """The optimizer's parameters, in order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def all_finite(tensors: list[Tensor]) -> bool:
    """True where no value is infinite or NaN, as no integer is; of quantized tensors their amax says so.

    Of distributed ones: none that this process holds. Waits for the device once.
    """
    tensors = [t._values() if t.is_sparse else local(t) for t in tensors]
    tensors = [t for t in tensors if t.numel() and (t.is_floating_point() or t.is_complex())]
    if not tensors:
        return True
    # the largest magnitude shows both, and cannot itself overflow as a sum could
    return all(bool(torch.stack(group).isfinite().all()) for group in by_device(_largest(tensors)).values())


def _largest(tensors: list[Tensor]) -> list[Tensor]:
    plain = [t for t in tensors if not isinstance(t, QuantizedTensor)]
    largest = [norm.float() for norm in torch._foreach_norm(plain, float("inf"))] if plain else []
    return largest + [t.amax for t in tensors if isinstance(t, QuantizedTensor)]


def by_device(tensors: list[Tensor]) -> dict[torch.device, list[Tensor]]:
    """The tensors of every device, in order."""
    groups: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device, []).append(tensor)
    return groups


class StepGuard:
    """Skips steps with non-finite gradients, counts them, and tells others.

    name_of: a parameter's name, for errors. on_step: called after a step that was taken. on_skip: after one that was
    not. on_count: called with the number of steps so far whenever that changed, after the others. max_skips: so many
    skipped steps in a row raise DivergenceError. The optimizer's `step_was_skipped` says what became of the last step.
    reducer: over all processes that step together: where the gradients of one of them are bad, all skip, in one small
    collective a step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        name_of: Callable[[Tensor], str] | None = None,
        on_step: Callable[[], None] | None = None,
        on_skip: Callable[[], None] | None = None,
        on_count: Callable[[int], None] | None = None,
        max_skips: int = MAX_SKIPS,
        reducer: Reducer = SINGLE_PROCESS,
    ) -> None:
        if max_skips < 1:
            raise NarrowgaugeError(f"expected max_skips of at least 1, found {max_skips}")
        self._optimizer = optimizer
        self.name_of = name_of or self._name_in_groups
        self._on_step = on_step
        self._on_skip = on_skip
        self._on_count = on_count
        self.max_skips = max_skips
        self.reducer = reducer
        self.steps = 0  # taken and skipped
        self.skips_in_a_row = 0
        self._handles: list[Any] = []
        self._skipping = False
        self._checked = False
        self.bad_parameter = ""  # the name of one whose gradient was not finite, and is gone
        self._loaded: int | None = None
        optimizer.step_was_skipped = False  # type: ignore[attr-defined]

    @staticmethod
    def on(optimizer: Optimizer) -> StepGuard | None:
        """The guard that is attached to `optimizer`, or None."""
        return getattr(optimizer, _ATTRIBUTE, None)

    def attach(self) -> None:
        """Guard every step from now on, in place of an earlier guard."""
        earlier = StepGuard.on(self._optimizer)
        if earlier is not None:
            earlier.detach()
        self._handles = [
            self._optimizer.register_step_pre_hook(self._before),
            self._optimizer.register_step_post_hook(self._after),
            self._optimizer.register_state_dict_post_hook(self._write_steps),
            self._optimizer.register_load_state_dict_pre_hook(self._read_steps),
            self._optimizer.register_load_state_dict_post_hook(lambda optimizer: self.go_on_from(self._loaded)),
        ]
        setattr(self._optimizer, _ATTRIBUTE, self)

    @property
    def is_skipping(self) -> bool:
        """True within a step that changes nothing."""
        return self._skipping

    def any_of(self, flag: bool) -> bool:
        """True on all processes where `flag` is on one of them."""
        return any_of(flag, self.reducer, self._device)

    def detach(self) -> None:
        """Undo `attach`."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if StepGuard.on(self._optimizer) is self:
            delattr(self._optimizer, _ATTRIBUTE)

    def skip(self, *, loss_scale: float | None = None, max_skips: int | None = None) -> None:
        """Record a skipped step and clear the gradients. Raises DivergenceError at the end of a run of them."""
        self.steps += 1
        self.skips_in_a_row += 1
        self._optimizer.step_was_skipped = True  # type: ignore[attr-defined]
        limit = self.max_skips if max_skips is None else max_skips
        culprit = self._first_bad_name() if self.skips_in_a_row >= limit else ""
        self.bad_parameter = ""
        for p in parameters_of(self._optimizer):
            p.grad = None
        if self._on_skip is not None:
            self._on_skip()
        self._counted()
        if culprit:
            scale = "" if loss_scale is None else f", at loss scale {loss_scale:g}"
            raise DivergenceError(
                f"step {self.steps}: the last {self.skips_in_a_row} steps were skipped for non-finite gradients{scale}"
                f"; the first parameter with one is {culprit}: lower the learning rate, clip gradients, or look for "
                "infinite values in its inputs"
            )

    def stepped(self) -> None:
        """Record a step that was taken."""
        self.steps += 1
        self.skips_in_a_row = 0
        self._optimizer.step_was_skipped = False  # type: ignore[attr-defined]
        if self._on_step is not None:
            self._on_step()
        self._counted()

    def go_on_from(self, steps: int | None) -> None:
        """Count on from `steps`, as read from an optimizer's state dict; None: it holds no count, and ours stays."""
        if steps is None:
            if self._on_count is not None:
                warnings.warn(
                    "the optimizer's state holds no count of steps, as it was saved by an optimizer that was not "
                    f"prepared: the precision schedule goes on from step {self.steps}",
                    stacklevel=2,
                )
            return
        self.steps = steps
        self._counted()

    def _counted(self) -> None:
        if self._on_count is not None:
            self._on_count(self.steps)

    def _write_steps(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        state[STEPS] = self.steps

    def _read_steps(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        self._loaded = state.get(STEPS)  # taken up when the rest was loaded

    def trust_gradients(self) -> None:
        """Let the next step go without a look at the gradients: the caller knows that they are finite."""
        self._checked = bool(self._handles)

    def found_bad(self, parameter: Tensor) -> None:
        """Skip the next step for a gradient that was not finite, and is gone by then."""
        self.bad_parameter = self.bad_parameter or self.name_of(parameter)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._skipping = False
        if self._checked:  # the loss scaler has just looked
            self._checked = False
            return None
        # torch passes the optimizer itself as the first of args
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._check()
            return None

        def guarded() -> Any:  # the gradients are those that the closure leaves
            loss = closure()
            self._check()
            return loss

        return (args[0], guarded), {}  # type: ignore[misc]

    def _check(self) -> None:
        grads = [grad for p in parameters_of(self._optimizer) if (grad := local_grad(p)) is not None]
        if self.any_of(bool(self.bad_parameter) or not all_finite(grads)):
            self._skipping = True
            self.skip()

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._skipping:
            self.stepped()
        self._skipping = False

    def _first_bad_name(self) -> str:
        """The name of a bad parameter, which another process may have."""
        name = self.bad_parameter
        for p in () if name else parameters_of(self._optimizer):
            if p.grad is not None and not all_finite([p.grad]):
                name = self.name_of(p)
                break
        name = agreed_text(name, self.reducer, self._device)
        return f"'{name}'" if name else "unknown"

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in parameters_of(self._optimizer)), torch.device("cpu"))

    def _name_in_groups(self, parameter: Tensor) -> str:
        for at, group in enumerate(self._optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                if p is parameter:
                    named = group.get("param_names")
                    return named[i] if named else f"parameter {i} of group {at}, shape {list(p.shape)}"
        return "a parameter of no group"
