"""The benchmark's script works, and a planted layer is found also in a model that has hardly learnt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "tune.py"


@pytest.mark.slow
def test_the_small_form_prints_every_figure(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--small", "--seeds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert done.returncode in (0, 1), done.stderr  # 1: a figure was missed, which says little of so small a model
    for words in ("tune of the default GPT, seconds", "layers, weights as they are", "blocks, 2 steps more"):
        assert words in done.stdout
    assert "planted layer kept in bf16 by tune: 1.0000, goal >= 1  ok" in done.stdout
