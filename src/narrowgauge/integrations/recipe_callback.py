"""What a recipe did, for transformers' `Trainer` and its trackers: steps skipped, values saturated or flushed."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers import TrainerCallback

from narrowgauge.layers.statistics import Statistics, collect
from narrowgauge.observe.shares import shares_by_role
from narrowgauge.optim.replace import current
from narrowgauge.optim.scaler import LossScaler


class RecipeCallback(TrainerCallback):
    """For transformers' `Trainer` with a prepared model and optimizer; `RecipeCallback().add_to(trainer)`.

    - A step that was skipped for gradients that are not finite does not advance the scheduler.
    - Every `statistics_every` optimizer steps (0: never) it counts what the casts do, and adds to the next logged loss
      `saturated/ROLE` and `flushed/ROLE`, shares of the values cast in [0, 1].
    - With the loss it logs `skipped_steps`, all so far, once there are any, and `loss_scale` where there is one.

    Given to the trainer as one of `callbacks`, it does the same, but trackers that the arguments name come before it
    and miss what it adds; `trainer.state.log_history` has it either way.
    """

    def __init__(self, statistics_every: int = 100) -> None:
        self.statistics_every = statistics_every
        self.skipped_steps = 0
        self._counting: tuple[ExitStack, Statistics] | None = None
        self._next: dict[str, float] = {}
        self._scaler: LossScaler | None = None

    def add_to(self, trainer: Any) -> RecipeCallback:
        """Listen before the trackers do; returns this callback."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def note(self, values: dict[str, float]) -> None:
        """Log these with the next loss."""
        self._next |= values

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stop()  # of a run that an error ended
        self.skipped_steps, self._next = 0, {}

    def on_step_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        due = self.statistics_every > 0 and (state.global_step + 1) % self.statistics_every == 0
        if due and self._counting is None and model is not None:
            stack = ExitStack()
            self._counting = stack, stack.enter_context(collect(model))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        statistics = self._stop()
        if statistics is not None:
            shares = shares_by_role(statistics.read())
            self.note({f"{measure}/{role}": share for role, of in shares.items() for measure, share in of.items()})

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        scaler = getattr(optimizer, "scaler", None)
        self._scaler = scaler if isinstance(scaler, LossScaler) and scaler.is_enabled() else None
        if optimizer is not None and was_skipped(optimizer):
            self.skipped_steps += 1
            optimizer._is_overflow = True  # where accelerate notes it
        elif optimizer is not None:
            optimizer._is_overflow = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        more: dict[str, float] = dict(self._next)
        if self.skipped_steps:
            more["skipped_steps"] = self.skipped_steps
        if self._scaler is not None:
            more["loss_scale"] = self._scaler.get_scale()
        self._next = {}
        logs.update(more)
        if state.log_history:
            state.log_history[-1].update(more)

    def _stop(self) -> Statistics | None:
        if self._counting is None:
            return None
        (stack, statistics), self._counting = self._counting, None
        stack.close()
        return statistics


def was_skipped(optimizer: Optimizer) -> bool:
    """Whether the last step of an optimizer, or of the one that accelerate wraps, changed nothing."""
    inner = current(getattr(optimizer, "optimizer", optimizer))
    return bool(getattr(inner, "step_was_skipped", False))
