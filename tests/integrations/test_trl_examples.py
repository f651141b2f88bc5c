"""The examples for TRL run, and learn."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import narrowgauge as ng

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# TRL uses names that transformers has given up
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated and will be removed in v6:FutureWarning")


@pytest.mark.parametrize(
    ("name", "steps", "key", "rise"),
    [("trl_sft", 10, "loss", -0.5), ("trl_dpo", 10, "rewards/margins", 0.1), ("trl_grpo", 10, "reward", 0.02)],
)
def test_it_learns(
    name: str, steps: int, key: str, rise: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))  # as `python examples/NAME.py` has it
    monkeypatch.delitem(sys.modules, "trl_sft", raising=False)
    trainer = runpy.run_path(str(EXAMPLES / f"{name}.py"))["train"]("narrow8", steps, str(tmp_path))
    assert trainer.conversion_report["model.layers.0.mlp.up_proj"].status == "converted"
    found = [row[key] for row in trainer.state.log_history if key in row]
    assert found, key
    if len(found) == 1:  # logged once: against what it is before the first step
        found.insert(0, {"loss": 4.6}[key])
    assert (found[-1] - found[0]) * (1 if rise > 0 else -1) >= abs(rise)
    if trainer.ref_model is not None:
        assert ng.ledger(trainer.ref_model).per_parameter < 2.0
