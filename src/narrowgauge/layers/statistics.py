"""What the casts of a sampled step did, by layer and role: magnitudes, scales, shares lost, and the cast's error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from narrowgauge.layers.recipe_layer import RecipeLayer
from narrowgauge.numerics.tally import Figures, Tally
from narrowgauge.ops.operands import Counter


class LayerCounter:
    """Takes tallies from `ops.linear`: one for each layer. has_bins: whether exponents are counted, too."""

    def __init__(self, has_bins: bool = False) -> None:
        self.has_bins = has_bins
        self.tallies: dict[str, Tally] = {}

    def add(self, role: str, tally: Tally) -> None:
        """Add one cast's to that of `role`."""
        self.tallies.setdefault(role, Tally()).take(tally)


class Counters:
    """Hands what the casts of a layer did to several that look at once, in whatever order they begin and end."""

    def __init__(self, counters: Sequence[Counter]) -> None:
        self.counters = counters
        self.has_bins = any(counter.has_bins for counter in counters)

    def add(self, role: str, tally: Tally) -> None:
        """Give one cast's tally to all of them."""
        for counter in self.counters:
            counter.add(role, tally)


class Statistics:
    """Counts gathered inside `collect`."""

    def __init__(self, counters: dict[str, LayerCounter]) -> None:
        self._counters = counters

    def figures(self) -> dict[str, dict[str, Figures]]:
        """{layer: {role: figures}}; waits for the device. Roles: input, weight, grad_output.

        Layers that did not run are absent.
        """
        return {
            name: {role: tally.read() for role, tally in counter.tallies.items()}
            for name, counter in self._counters.items()
            if counter.tallies
        }

    def read(self) -> dict[str, dict[str, dict[str, float]]]:
        """{layer: {role: {measure: value}}}, see `numerics.tally.Figures.measures`; waits for the device."""
        return {
            name: {role: figures.measures() for role, figures in roles.items()}
            for name, roles in self.figures().items()
        }


@contextmanager
def collect(model: nn.Module, has_bins: bool = False) -> Iterator[Statistics]:
    """Count what the casts of quantized layers do during the forward and backward inside.

    Of several at once, one inside another or overlapping, each counts what happens while it lasts.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, RecipeLayer) and m.quantized}
    counters = {name: LayerCounter(has_bins) for name in layers}
    try:
        for name, layer in layers.items():
            layer.counter = _of_all([*_parts(layer.counter), counters[name]])
        yield Statistics(counters)
    finally:
        for name, layer in layers.items():
            if isinstance(layer, RecipeLayer):  # a precision schedule may have made it torch's own again
                layer.counter = _of_all([each for each in _parts(layer.counter) if each is not counters[name]])


def _parts(counter: Counter | None) -> Sequence[Counter]:
    if counter is None:
        return ()
    return counter.counters if isinstance(counter, Counters) else (counter,)


def _of_all(counters: Sequence[Counter]) -> Counter | None:
    return Counters(counters) if len(counters) > 1 else next(iter(counters), None)
