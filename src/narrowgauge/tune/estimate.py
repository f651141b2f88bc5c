"""From what was measured on a few batches to what a choice costs a layer, and what choices cost a short run.

Two errors, in one unit. A cast in the forward pass raises the loss at once: the loss change d, in nats. A wrong
gradient costs steps: an error whose power is the share e^2 of the gradient's own raises the root mean square that Adam
divides by, so that each step goes the share 1 / sqrt(1 + e^2) of its way, about e^2 / 2 less. A training that goes the
share x less of its way loses x * worth, where worth is the slope of its loss over the logarithm of its way. That error
in forward passes acts like a smaller model, and in backward passes like less data, is what Castro et al. 2025
(arXiv:2505.14669) find for training in FP4. So a choice costs

    d + worth * e^2 / 2

and there are two questions, of one formula. What to choose by is the training that the recipe is for: `slope`, the nats
that e times as many steps gain, and d no less than 0, since no rounding can be counted on to lower a loss. What a short
run is expected to lose is a sum over the layers, which that bound would bias by all of their noise: there d is what was
measured, of either sign, and the worth is that of the short run itself, see `tuner`.

Loss changes of single layers are mostly noise: the best of many noisy ones is chosen for its luck. They are therefore
drawn to the mean over the layers, of each choice, by the positive-part estimator of James and Stein in the form of
Efron and Morris 1973, whose total squared error is less than that of the measurements for four layers or more, whatever
the truth is; the sum over all layers stays as it was measured. Layers that stand out of the noise keep their values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev, variance

from narrowgauge.tune.choices import Assignment
from narrowgauge.tune.measure import Effect, Measured


@dataclass(frozen=True)
class Estimate:
    """A mean over batches, infinite where something was not finite; error: its standard error, NaN where not known."""

    value: float
    error: float

    @staticmethod
    def of(values: Sequence[float]) -> Estimate:
        """Of one value for each batch."""
        if not all(map(math.isfinite, values)):
            return Estimate(math.inf, math.nan)
        return Estimate(fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan)


def whole(effect: Effect, worth: float) -> Estimate:
    """What a measured change of precision is expected to cost, nats a token: d + worth * e^2 / 2."""
    return Estimate.of(_summed(effect.loss_changes, effect.errors, worth))


class Estimates:
    """Costs by layer and choice; those of the wide choice are 0."""

    def __init__(self, measured: Measured) -> None:
        self._changes: dict[tuple[str, str], list[float]] = {}
        self._errors = {key: effect.errors for key, effect in measured.effects.items()}
        for choice in measured.together:
            changes = {
                layer: effect.loss_changes for (layer, name), effect in measured.effects.items() if name == choice
            }
            self._changes |= {(layer, choice): values for layer, values in shrunk(changes).items()}

    def cost(self, layer: str, choice: str, slope: float) -> Estimate:
        """What to choose by, nats a token; infinite where a loss or a gradient was not finite.

        slope: of the training that the recipe is for.
        """
        if (layer, choice) not in self._changes:
            return Estimate(0.0, 0.0)
        changes, errors = self._changes[layer, choice], self._errors[layer, choice]
        found = Estimate.of(_summed(changes, errors, slope))
        return Estimate(found.value - min(fmean(changes), 0.0), found.error) if math.isfinite(found.value) else found

    def expected(self, assignment: Assignment, worth: float) -> Estimate:
        """Nats a token above all layers wide, by the sum over the layers, of a training of such a worth."""
        parts = [
            _summed(self._changes[key], self._errors[key], worth) for key in assignment.items() if key in self._changes
        ]
        return Estimate.of([math.fsum(of_batch) for of_batch in zip(*parts, strict=True)]) if parts else Estimate(0, 0)


def shrunk(changes: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """{layer: loss changes, batch by batch}, drawn to each batch's mean over the layers by the share that is noise.

    With k layers, s^2 the noise of a layer's mean over the batches (beside what all layers have in common), and S the
    sum of squares of those means about their own: by (k - 3) s^2 / S, and no more than all. Layers with values that are
    not finite take no part.
    """
    finite = {layer: values for layer, values in changes.items() if all(map(math.isfinite, values))}
    found = {layer: list(values) for layer, values in changes.items()}
    k = len(finite)
    batches = len(next(iter(finite.values()), ()))
    if k < 4 or batches < 2:
        return found
    common = [fmean(column) for column in zip(*finite.values(), strict=True)]
    apart = {layer: [a - b for a, b in zip(values, common, strict=True)] for layer, values in finite.items()}
    noise = math.fsum(variance(values) for values in apart.values()) / (batches * (k - 1))
    spread = math.fsum(fmean(values) ** 2 for values in apart.values())
    kept = max(0.0, 1 - (k - 3) * noise / spread) if spread else 0.0
    return found | {
        layer: [b + kept * a for a, b in zip(values, common, strict=True)] for layer, values in apart.items()
    }


def _summed(changes: Sequence[float], errors: Sequence[float], worth: float) -> list[float]:
    """By batch. No infinite error becomes NaN by a worth of 0."""
    return [
        change + worth * error / 2 if math.isfinite(error) else math.inf
        for change, error in zip(changes, errors, strict=True)
    ]
