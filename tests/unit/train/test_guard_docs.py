"""docs/guard.md: its loop runs, and what it says of defaults is so."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from narrowgauge.train.guard_limits import DB_A_BIT, NORMAL_DB
from narrowgauge.train.sections import GuardConfig

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "guard.md").read_text(encoding="utf-8")


def test_the_loop_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)  # noqa: S102 (our own page)
    assert isinstance(names["state"], dict) and names["step"] == 50


def test_defaults_are_those_of_the_page() -> None:
    config = GuardConfig()
    assert (config.mode, config.every, config.leave_out, config.rollbacks) == ("off", 25, 100, 3)
    assert (
        "`off` (default)" in PAGE
        and "at the default, 25," in " ".join(PAGE.split())
        and "`guard.leave_out` batches, 100," in PAGE
    )
    for role in ("input", "weight", "grad_output"):
        flushed = 0.5 if role == "grad_output" else 0.1
        assert dataclasses.astuple(getattr(config, role)) == (0.01, flushed, 12.0)
    assert "`grad_output` in 8 bits or more | 50 % of the values |" in PAGE
    assert config.exp_avg_sq.flushed == 0.001 and "| 0.1 % of the values whose first moment is not zero |" in PAGE
    assert f"{NORMAL_DB} + {DB_A_BIT} for each mantissa bit" in PAGE
    assert (config.nonfinite, config.spike_patience, config.spike_spreads, config.spike_floor) == (3, 3, 10.0, 0.5)
    assert "3 steps in a row above median + max(10 spreads, 0.5 nats)" in PAGE
    assert 13.5 + 3 * 6.02 == pytest.approx(31.5, abs=0.1) and 13.5 + 6.02 == pytest.approx(19.5, abs=0.1)
    assert all(f"`guard.{name}" in PAGE for name in ("every", "confirm", "calm", "rollbacks", "leave_out"))
