"""The PPO example learns, and the RLHF benchmark counts what it says."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def small_and_seeded(one_thread: None, seeded: None) -> None:
    """Applies to every test of this file."""


def test_the_example_learns_to_count(capsys) -> None:
    rewards = runpy.run_path(str(ROOT / "examples" / "ppo.py"))["train"]("narrow8", 14)
    assert rewards[0] < 0.15 and max(rewards[-3:]) > 0.35
    assert "reference 1.1" in capsys.readouterr().out  # its linear layers in a byte a value


# the real shape takes minutes: `python benchmarks/rlhf_memory.py`
def test_four_models_take_less_than_half_of_the_memory(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("rlhf_memory")
    monkeypatch.setattr(sys, "argv", ["benchmarks/rlhf_memory.py", "--shape", "tiny", "--json"])
    monkeypatch.setattr("common.RESULTS", tmp_path)
    assert module.main() == 0
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    measured = {name.partition(": ")[2]: figure["measured"] for name, figure in result["figures"].items()}
    assert 0.46 <= measured["weights saved by fp8_lm_o2"] <= 0.5  # all at a byte less: (12 - 6) / 12
    assert 0.62 <= measured["optimizer states saved by fp8_lm_o2"] <= 0.63  # (8 - 3) / 8
    # (2 x 6.1 + 2 x 1.1) / (2 x 16 + 2 x 2)
    assert 0.38 <= measured["weights, gradients and states, narrow8 / baseline"] <= 0.42
    values = result["ledgers"]["baseline"]["policy"]["parameters"]
    assert result["bytes"]["baseline"]["weights"] == pytest.approx(12 * values, rel=0.01)
    assert "MISSED" not in capsys.readouterr().out
