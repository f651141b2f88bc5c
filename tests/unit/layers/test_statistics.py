"""Counts of sampled steps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.layers.statistics import collect


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed"])
def test_shares_and_magnitudes_by_layer_and_role(recipe: str) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    ng.prepare(model, None, recipe)
    x = torch.ones(8, 16)
    x[0] = 1e-6  # below half of the smallest subnormal, whatever the scale: flushed
    x[1] = 0.0
    x[2, 0] = -448.0
    with collect(model) as statistics:
        model(x).float().sum().backward()
    seen = statistics.read()
    assert list(seen) == ["0", "1"]  # the third is below min_size
    assert set(seen["0"]) == {"input", "weight", "grad_output"}
    signal, noise = 16 * 1e-12 + 448.0**2 + 15 + 5 * 16 * 1.0, 16 * 1e-12  # row 1 is zero, and all but row 0 is exact
    assert statistics.read() == seen
    sqnr_db = seen["0"]["input"].pop("sqnr_db")
    assert sqnr_db == pytest.approx(10 * math.log10(signal / noise), abs=1e-5)
    assert seen["0"]["input"] == {"saturated": 0.0, "flushed": 16 / 128, "amax": 448.0, "scale": 1.0}
    assert seen["0"]["weight"]["amax"] == model[0].weight.detach().abs().max().item()
    model(x).float().sum().backward()  # outside: nothing is counted
    assert statistics.read()["1"] == seen["1"]
    assert all(layer.counter is None for layer in model[:2])


def test_recomputed_casts_count_like_others() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    ng.prepare(model, None, "fp8_current")
    with collect(model) as statistics:
        for _ in range(2):
            torch.utils.checkpoint.checkpoint(model, torch.ones(4, 16), use_reentrant=False).float().sum().backward()
    found = statistics.read()["0"]["input"]
    assert found == {"saturated": 0.0, "flushed": 0.0, "amax": 1.0, "scale": found["scale"], "sqnr_db": math.inf}
    assert found["scale"] == pytest.approx(1 / 448)


def test_delayed_scales_show_what_they_saturate() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ng.prepare(model, optimizer, "fp8_delayed")
    for factor, share in ((1.0, 0.0), (1.0, 0.0), (3.0, 1.0)):
        with collect(model) as statistics:
            model(torch.ones(4, 16) * factor).float().sum().backward()
        optimizer.step()
        assert statistics.read()["0"]["input"]["saturated"] == share
