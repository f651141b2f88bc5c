"""One optimizer step: micro-batches, loss scaling, clipping, and whether it was skipped."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from narrowgauge.layers.gradients import accumulate
from narrowgauge.optim.clip import clip_grad_norm_
from narrowgauge.optim.guard import StepGuard, all_finite
from narrowgauge.optim.release import GradientRelease
from narrowgauge.optim.scaler import LossScaler
from narrowgauge.train.ranks import ONE, Ranks, finite_name

Batch = tuple[Tensor, Tensor]  # ids, targets: int64 [batch_size, sequence_length]


class Stages(Protocol):
    """A model of several pipeline stages, as a step and a validation run it."""

    @property
    def model(self) -> nn.Module:
        """This process's part."""
        ...

    def step(self, batches: Sequence[Batch], *, scale: Callable[[Tensor], Tensor]) -> Tensor:
        """Forward and backward of all micro-batches; the mean of their losses, on every stage.

        The gradients are those of `scale` of that mean.
        """
        ...

    def loss(self, ids: Tensor, targets: Tensor, /) -> Tensor:
        """The mean loss of one batch, without gradients, on every stage."""
        ...


@dataclass(frozen=True)
class StepResult:
    """What a step did.

    loss: mean over the micro-batches, nats a token. grad_norm: 2-norm of the whole unscaled gradient before clipping.
    skipped: the gradient was not finite and nothing was changed. bad_parameter: the first with such a gradient, or "".
    """

    loss: float
    grad_norm: float
    skipped: bool
    bad_parameter: str


def optimizer_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler,
    batches: Sequence[Batch],
    clip: float,
    *,
    first_forward: AbstractContextManager | None = None,
    before_zero_grad: Callable[[], None] | None = None,
    ranks: Ranks = ONE,
    pipeline: Stages | None = None,
) -> StepResult:
    """Run forward and backward over `batches`, then one step of the optimizer.

    The gradient is the mean over the micro-batches, summed in float32 and cast once to what the recipe keeps; of a
    single micro-batch each gradient is cast as soon as it is there. The order is: sum, unscale once, clip by the real
    norm, step. Gradients are None afterwards.

    Where gradients are released (`optim.release_gradients`), each parameter is stepped within backward: then there is
    one micro-batch, `clip` has been given to `release_gradients`, and it goes by the norm of the step before.

    Args:
        model: `model(ids, targets)` returns (logits, loss); prepared, so that it runs under its recipe's autocast.
        optimizer: prepared: it skips by itself where a gradient is not finite.
        clip: largest norm; 0 measures only.
        first_forward: a context around the first micro-batch's forward pass, to measure in; None: none.
        before_zero_grad: called when the step was taken and the gradients that there are, are still there.
        ranks: the processes that take this step together, with batches of their own.
        pipeline: what runs the batches through the stages, of which `model` is one.

    Raises:
        DivergenceError: from the optimizer or the scaler, after too many skipped steps in a row.
    """
    if pipeline is not None:
        total, count = pipeline.step(batches, scale=scaler.scale), 1
    else:
        total, count = _forward_backward(model, scaler, batches, first_forward or nullcontext()), len(batches)
    release = GradientRelease.on(optimizer)
    if release is not None:
        grad_norm, bad_parameter = _end_released(optimizer, release)
    else:
        scaler.unscale_(optimizer)
        grad_norm = float(clip_grad_norm_(list(model.parameters()), clip or math.inf))
        bad_parameter = finite_name(grad_norm, lambda: first_bad_gradient(model), ranks)
        scaler.step(optimizer)
        scaler.update()
    skipped = bool(getattr(optimizer, "step_was_skipped", False))
    if before_zero_grad is not None and not skipped:
        before_zero_grad()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(ranks.mean(float(total) / count), grad_norm, skipped, bad_parameter)


def _forward_backward(
    model: nn.Module, scaler: LossScaler, batches: Sequence[Batch], first_forward: AbstractContextManager
) -> Tensor:
    """The sum of the micro-batches' losses; the gradient of their mean is left on the parameters."""
    total: Tensor | None = None
    with accumulate(model) if len(batches) > 1 else nullcontext():
        for index, (ids, targets) in enumerate(batches):
            with first_forward if index == 0 else nullcontext():
                _, loss = model(ids, targets)
            scaler.scale(loss / len(batches)).backward()
            total = loss.detach() if total is None else total + loss.detach()
    assert total is not None  # accumulation is at least 1
    return total


def _end_released(optimizer: torch.optim.Optimizer, release: GradientRelease) -> tuple[float, str]:
    """End a step whose parameters were stepped within backward: (norm, first bad parameter), as in StepResult."""
    guard = StepGuard.on(optimizer)
    assert guard is not None  # gradient release attaches one where there is none
    bad_parameter = guard.bad_parameter
    optimizer.step()
    norm = math.nan if bad_parameter or release.previous_norm is None else float(release.previous_norm)
    return norm, bad_parameter


def first_bad_gradient(model: nn.Module) -> str:
    """Name of the first parameter whose gradient holds NaN or infinity; "" where all are finite."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not all_finite([parameter.grad]):
            return name
    return ""
