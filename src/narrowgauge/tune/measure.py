"""Sensitivity of each layer to each choice: what the loss and the gradients of real batches lose by it alone.

What that is worth is `estimate`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor, nn

from narrowgauge.errors import ConfigError, NarrowgaugeError
from narrowgauge.observe.ledger import SavedActivations
from narrowgauge.tune.choices import Assignment, Choice, put

Batch = tuple[Tensor, Tensor]
LEAST_BATCHES = 2
_FP16_SCALE = 2.0**12  # of the loss where gradients pass through float16; errors are relative


@dataclass
class Effect:
    """What one change of precision does to the loss and the gradients, batch by batch.

    loss_changes: nats a token, against all layers wide on the same batch. errors: e^2, the mean over all values of the
    relative squared error of their parameter's gradient. own_errors: that of the layer's own weight.
    """

    loss_changes: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    own_errors: list[float] = field(default_factory=list)

    @property
    def loss_change(self) -> float:
        return fmean(self.loss_changes)

    @property
    def grad_error(self) -> float:
        """Relative error of all gradients: the root of the mean square."""
        return math.sqrt(fmean(self.errors))

    @property
    def own_grad_error(self) -> float:
        """Relative error of the gradient of the layer's own weight."""
        return math.sqrt(fmean(self.own_errors))


@dataclass(frozen=True)
class Measured:
    """effects: {(layer, choice): effect}, of narrow choices. together: {choice: effect of it in all layers}.

    losses: of the batches, all layers wide.
    """

    effects: Mapping[tuple[str, str], Effect]
    together: Mapping[str, Effect]
    losses: Sequence[float]


def measure(
    model: nn.Module,
    layers: Sequence[str],
    choices: Mapping[str, Choice],
    batches: Sequence[Batch],
    seed: int,
    on_done: Callable[[int, int], None] = lambda done, total: None,
) -> Measured:
    """Probe each layer by each narrow choice, all others wide; then all layers together, to see whether parts add up.

    model: converted, all layers wide, with parameters in float32, in training mode; it is left as it was. seed: of
    casts that are rounded stochastically, the same in each probe. on_done: told (passes done, of so many).

    Raises ConfigError for fewer than two batches: no spread could be known.
    """
    if len(batches) < LEAST_BATCHES:
        raise ConfigError(
            f"batches={len(batches)}: expected at least {LEAST_BATCHES}, so that the spread is known: raise batches"
        )
    wide_name = next(name for name, choice in choices.items() if choice.is_wide)
    narrow = [name for name, choice in choices.items() if not choice.is_wide]
    all_wide = dict.fromkeys(layers, wide_name)
    probes: list[tuple[str | None, str, Assignment]] = [
        (layer, name, {layer: name}) for layer in layers for name in narrow
    ]
    probes += [(None, name, dict.fromkeys(layers, name)) for name in narrow]
    effects = {(layer, name): Effect() for layer in layers for name in narrow}
    together = {name: Effect() for name in narrow}
    losses: list[float] = []
    total, done = len(batches) * (len(probes) + 1), 0
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    scale = _FP16_SCALE if any(choice.recipe.needs_loss_scaling for choice in choices.values()) else 1.0
    try:
        for number, batch in enumerate(batches):
            put(model, all_wide, choices)
            reference = _loss_and_grads(model, batch, seed + number, scale)
            losses.append(float(reference[0]))
            if not math.isfinite(losses[-1]):
                raise NarrowgaugeError(
                    f"batch {number + 1}: expected a finite loss with all layers wide, found {losses[-1]}: the model "
                    "itself is not finite; give a run that has not diverged"
                )
            on_done(done := done + 1, total)
            for layer, name, assignment in probes:
                put(model, {**all_wide, **assignment}, choices)
                effect = together[name] if layer is None else effects[layer, name]
                _compare(reference, _loss_and_grads(model, batch, seed + number, scale), names, layer, effect)
                on_done(done := done + 1, total)
    finally:
        put(model, all_wide, choices)
    return Measured(effects, together, losses)


def _loss_and_grads(model: nn.Module, batch: Batch, seed: int, scale: float) -> tuple[Tensor, list[Tensor]]:
    """Loss in float64, and the gradients of all trained parameters, times `scale`."""
    torch.manual_seed(seed)
    _, loss = model(*batch)
    return loss.detach().double(), list(torch.autograd.grad(loss * scale, _trained(model)))


def _trained(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def _compare(
    reference: tuple[Tensor, list[Tensor]],
    probed: tuple[Tensor, list[Tensor]],
    names: Sequence[str],
    layer: str | None,
    effect: Effect,
) -> None:
    """Add one batch's losses and gradients to an effect."""
    effect.loss_changes.append(float(probed[0] - reference[0]))
    weighted, values, own = 0.0, 0, 0.0
    for name, right, found in zip(names, reference[1], probed[1], strict=True):
        norm = float(right.square().sum())
        if norm == 0.0:  # an expert that no token visited, a token that is not in the batch
            continue
        error = float((found - right).square().sum()) / norm
        weighted, values = weighted + error * right.numel(), values + right.numel()
        if layer is not None and name == f"{layer}.weight":
            own = error
    effect.errors.append(weighted / values if values else 0.0)
    effect.own_errors.append(own)


def slope_of(losses: Sequence[float], first_step: int = 1) -> float:
    """Nats gained by e times as many steps: minus the slope of the loss over ln(step), by least squares; at least 0.

    losses: of the steps from `first_step` on. The first half is left out, where the rate warms up and the loss falls
    for other reasons. 0 for fewer than 4 losses.
    """
    points = [(math.log(first_step + at), loss) for at, loss in enumerate(losses) if math.isfinite(loss)]
    points = points[len(points) // 2 :]
    if len(points) < 2:
        return 0.0
    mean_x, mean_y = fmean(x for x, _ in points), fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return max(-sum((x - mean_x) * (y - mean_y) for x, y in points) / spread, 0.0)


@dataclass(frozen=True)
class Costs:
    """What one layer takes by one choice. bytes: kept for backward by the layer, of a whole micro-batch.

    time: of its three products, in products of 16 bits: multiply-adds times `Choice.relative_time`.
    """

    bytes: int
    time: float


def costs_of(
    model: nn.Module, layers: Sequence[str], choices: Mapping[str, Choice], batch: Batch
) -> dict[tuple[str, str], Costs]:
    """What each layer takes by each choice, counted in real forward passes, one a choice.

    Bytes are those of `SavedActivations`: codes and scales of the input and, for narrow choices, of the weight; a wide
    weight is kept by reference, and an input that something else has saved already costs nothing. model: as `measure`.
    """
    found: dict[tuple[str, str], Costs] = {}
    wide_name = next(name for name, choice in choices.items() if choice.is_wide)
    try:
        for name, choice in choices.items():
            put(model, dict.fromkeys(layers, name), choices)
            for layer, (size, work) in _forward_counts(model, layers, batch):
                found[layer, name] = Costs(size, work * choice.relative_time)
    finally:
        put(model, dict.fromkeys(layers, wide_name), choices)
    return found


def _forward_counts(model: nn.Module, layers: Sequence[str], batch: Batch) -> Iterator[tuple[str, tuple[int, int]]]:
    """(layer, (bytes saved inside it, multiply-adds of one of its products))."""
    counts: dict[str, tuple[int, int]] = {}
    hooks = []
    with SavedActivations(model) as counter:
        for name in layers:
            layer = model.get_submodule(name)
            begun: list[int] = []

            def before(module: nn.Module, args: tuple[Tensor, ...], begun: list[int] = begun) -> None:
                begun.append(counter.bytes)

            def after(
                module: nn.Module, args: tuple[Tensor, ...], output: Tensor, name: str = name, begun: list[int] = begun
            ) -> None:
                size, work = counts.get(name, (0, 0))
                rows = args[0].shape[:-1].numel()
                features = int(module.in_features) * int(module.out_features)  # type: ignore[arg-type]
                counts[name] = (size + counter.bytes - begun.pop(), work + rows * features)

            hooks += [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
        try:
            result = model(*batch)
        finally:
            for hook in hooks:
                hook.remove()
        del result
    for name in layers:
        yield name, counts.get(name, (0, 0))
