"""The share of a step's time that benchmarks/observation.py prints is that of the default configuration."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from narrowgauge.cli.figures import is_met

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("observation")


def test_the_cost_is_that_of_all_steps_together(script) -> None:
    times = {"plain": [1.0, 9.0, 1.0], "off": [1.0] * 3, "sampled": [2.0] * 3, "with exponents": [3.0] * 3}
    cost, off, bits = script.figures(times, 2e-6, {"narrow8": True, "bf16": False}).values()
    # of 200 steps 3 are sampled, and one counts exponents: (3 * 1 + 1 * 2) / 200
    assert cost["measured"] == pytest.approx(5 / 200) and is_met(cost)
    assert off["measured"] == pytest.approx(2e-6) and is_met(off)
    assert bits["measured"] == 1 and not is_met(bits)


def test_an_observation_that_is_off_costs_microseconds(script) -> None:
    assert 0 < script.seconds_off(1000) < 1e-4
