"""What the casts of a sampled step did: shares saturated and flushed, and the largest magnitude, by layer and role."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from narrowgauge.layers.recipe_layer import RecipeLayer


class _Tally:
    """Counts of one role; tensors stay on their device until they are read."""

    def __init__(self) -> None:
        self.numel = 0
        self.saturated: int | Tensor = 0
        self.flushed: int | Tensor = 0
        self.amax: Tensor | None = None

    def shares(self) -> dict[str, float]:
        count = max(self.numel, 1)
        amax = 0.0 if self.amax is None else float(self.amax)
        return {"saturated": int(self.saturated) / count, "flushed": int(self.flushed) / count, "amax": amax}


class LayerCounter:
    """Takes counts from `ops.linear`: one for each layer."""

    def __init__(self) -> None:
        self.tallies: dict[str, _Tally] = {}

    def add(self, role: str, numel: int, saturated: int | Tensor, flushed: int | Tensor, amax: Tensor | None) -> None:
        """Add one cast of `numel` values to the counts of `role`."""
        tally = self.tallies.setdefault(role, _Tally())
        tally.numel += numel
        tally.saturated = tally.saturated + saturated
        tally.flushed = tally.flushed + flushed
        if amax is not None:
            amax = amax.detach().float()
            tally.amax = amax if tally.amax is None else torch.maximum(tally.amax, amax)


class Statistics:
    """Counts gathered inside `collect`."""

    def __init__(self, counters: dict[str, LayerCounter]) -> None:
        self._counters = counters

    def read(self) -> dict[str, dict[str, dict[str, float]]]:
        """{layer: {role: {"saturated": share, "flushed": share, "amax": value}}}; waits for the device.

        Shares are of the values cast, in [0, 1]. Roles: input, weight, grad_output. Layers that did not run are absent.
        """
        return {
            name: {role: tally.shares() for role, tally in counter.tallies.items()}
            for name, counter in self._counters.items()
            if counter.tallies
        }


@contextmanager
def collect(model: nn.Module) -> Iterator[Statistics]:
    """Count what the casts of quantized layers do during the forward and backward inside."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, RecipeLayer) and m.quantized}
    counters = {name: LayerCounter() for name in layers}
    before = {name: layer.counter for name, layer in layers.items()}
    try:
        for name, layer in layers.items():
            layer.counter = counters[name]
        yield Statistics(counters)
    finally:
        for name, layer in layers.items():
            if isinstance(layer, RecipeLayer):  # a precision schedule may have made it torch's own again
                layer.counter = before[name]
