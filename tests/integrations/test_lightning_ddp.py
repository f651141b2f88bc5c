"""Lightning's DDP strategy with a recipe, on two gloo processes that torchrun starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of lightning and what it loads
    import lightning_script as script


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.filterwarnings("ignore")  # lightning's own, of its workers, intervals and hooks
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script.__file__]
    done = subprocess.run(
        [*command, str(tmp_path), "fp32", "narrow8"], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    for recipe in ("fp32", "narrow8"):
        first, second = (json.loads((tmp_path / f"{recipe}-{rank}.json").read_text()) for rank in (0, 1))
        assert first == second and first["processes"] == 2
        whole = script.train(recipe, tmp_path, 1)
        assert whole["casts"] == first["casts"] == [recipe == "narrow8"] * script.STEPS
        progress = whole["losses"][0] - whole["losses"][-1]
        assert progress > 0.1
        # sums in another order; or other roundings of each gradient, at most by 1/16 of it: scales go by half a batch
        assert first["losses"] == pytest.approx(whole["losses"], abs=1e-5 if recipe == "fp32" else progress / 16)
