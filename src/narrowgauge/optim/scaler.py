"""Loss scaling for float16: torch's GradScaler, bounded, and with an end to fruitless skipping."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.optim.guard import MAX_SKIPS, StepGuard, parameters_of
from narrowgauge.recipes import library
from narrowgauge.recipes.spec import Recipe
from narrowgauge.tensors.local import local_grad

INIT_SCALE = 2.0**16  # torch.amp.GradScaler's
MIN_SCALE = 1.0  # DeepSpeed's min_loss_scale
MAX_SCALE = 2.0**126  # the largest power of two whose reciprocal is a normal float32 number


class LossScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for a recipe: inert unless the recipe computes in float16.

    The scale stays within [min_scale, max_scale]. A step whose gradients are not finite is skipped: parameters and
    optimizer state stay as they were, the gradients are cleared, and the scale backs off once. max_skips such steps in
    a row raise DivergenceError, which names the step, the scale and the first bad parameter. For an optimizer from
    `prepare` the scaling history of the skipped step is forgotten, too.

    device: where the model is; left out, CUDA where there is one, else the CPU. The other arguments are GradScaler's.
    """

    def __init__(
        self,
        recipe: str | Recipe,
        device: torch.device | str | None = None,
        *,
        init_scale: float = INIT_SCALE,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = MIN_SCALE,
        max_scale: float = MAX_SCALE,
        max_skips: int = MAX_SKIPS,
        enabled: bool = True,
    ) -> None:
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        needed = library.recipe(recipe).resolve(device).needs_loss_scaling
        if not 0.0 < min_scale <= init_scale <= max_scale <= MAX_SCALE:
            raise NarrowgaugeError(
                f"loss scale: expected 0 < min_scale <= init_scale <= max_scale <= 2^126, found {min_scale:g}, "
                f"{init_scale:g}, {max_scale:g}"
            )
        if not growth_factor > 1.0 or not 0.0 < backoff_factor < 1.0 or growth_interval < 1 or max_skips < 1:
            raise NarrowgaugeError(
                "loss scale: expected growth_factor > 1, 0 < backoff_factor < 1, growth_interval and max_skips of at "
                f"least 1, found {growth_factor}, {backoff_factor}, {growth_interval}, {max_skips}"
            )
        super().__init__(
            device.type,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled and needed,
        )
        self.min_scale, self.max_scale, self.max_skips = min_scale, max_scale, max_skips
        self._guards: dict[int, StepGuard] = {}

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, once a step, e.g. before clipping.

        Raises NarrowgaugeError for float16 gradients: they lose what scaling saves.
        """
        if self.is_enabled():
            guard = self._guard(optimizer)
            for p in parameters_of(optimizer):
                if p.grad is not None and p.grad.dtype is torch.float16:
                    raise NarrowgaugeError(
                        f"parameter '{guard.name_of(p)}' has float16 gradients: expected float32 ones; call "
                        "narrowgauge.prepare(model, optimizer, recipe), which makes float32 masters, or model.float()"
                    )
        super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale where that was not done, and step unless a gradient is not finite. Fused optimizers the same way."""
        if not self.is_enabled():
            return optimizer.step(*args, **kwargs)
        from narrowgauge.optim.release import GradientRelease  # on first use: it loads the optimizers

        if GradientRelease.on(optimizer) is not None:
            raise NarrowgaugeError(
                "gradient release steps each parameter inside backward, by gradients of the scaled loss: train in "
                "bfloat16, which needs no loss scaling, or do without release_gradients"
            )
        if any(each is not None for each in (*args, kwargs.get("closure"))):  # accelerate passes closure=None
            raise NarrowgaugeError("LossScaler.step takes no closure: call backward yourself, then step(optimizer)")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if not self._guard(optimizer).any_of(any(p.grad is not None for p in parameters_of(optimizer))):
            return optimizer.step()
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        result = self._maybe_opt_step(optimizer, state)
        state["stage"] = OptState.STEPPED
        return result

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """As torch's, of what this process holds of each gradient; what one process finds, all of them know."""
        home, guard = inv_scale.device, self._guard(optimizer)
        found = {home: found_inf}
        with torch.no_grad():
            grads = [grad for p in parameters_of(optimizer) if (grad := local_grad(p)) is not None]
            for (device, _), group in _by_kind(grads).items():
                flag = found.setdefault(device, torch.zeros_like(found_inf, device=device))
                torch._amp_foreach_non_finite_check_and_unscale_(group, flag, inv_scale.to(device))
            is_bad = torch.stack([flag.to(home) for flag in found.values()]).amax(dim=0)
            found_inf.copy_(guard.reducer.max_(is_bad))
        return {home: found_inf}

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        found = optimizer_state["found_inf_per_device"].values()
        guard = self._guard(optimizer)
        if any(bool(each.item()) for each in found):
            # a guard on the optimizer would skip it as well, without knowing the scale
            guard.skip(loss_scale=self.get_scale(), max_skips=self.max_skips)
            return None
        guard.trust_gradients()
        result = optimizer.step(*args, **kwargs)
        if StepGuard.on(optimizer) is None:
            guard.stepped()
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt the scale after a step, within its bounds."""
        if not self.is_enabled():
            return
        states = self._per_optimizer_states.values()
        if new_scale is None and not any(state["found_inf_per_device"] for state in states):
            self._per_optimizer_states.clear()  # no optimizer had a gradient: nothing is known about the scale
            return
        super().update(new_scale)
        self._bound()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a saved state, of this class or of GradScaler; the scale is brought within the bounds."""
        super().load_state_dict(state_dict)
        if self.is_enabled():
            self._init_scale = min(max(self._init_scale, self.min_scale), self.max_scale)
            self._bound()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_guards": {}}  # a copy counts the skips of its own optimizers

    def _bound(self) -> None:
        if self._scale is not None:
            self._scale.clamp_(self.min_scale, self.max_scale)

    def _guard(self, optimizer: Optimizer) -> StepGuard:
        attached = StepGuard.on(optimizer)
        if attached is not None:
            return attached
        return self._guards.setdefault(id(optimizer), StepGuard(optimizer))


def _by_kind(grads: list[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """What unscaling multiplies of each gradient, by device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        values = grad._values() if grad.is_sparse else grad
        kinds.setdefault((values.device, values.dtype), []).append(values)
    return kinds
