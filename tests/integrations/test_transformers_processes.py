"""transformers' Trainer with a recipe in two processes that torchrun starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers_script as script

RECIPES = ("fp8_delayed", "narrow8")


@pytest.mark.slow
@pytest.mark.multiproc
def test_two_processes_agree_skip_together_and_resume_bit_for_bit(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", script.__file__]
    started = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, str(tmp_path), *RECIPES], env=started, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    for recipe in RECIPES:
        found = {
            (rank, how): json.loads((tmp_path / f"{recipe}-{rank}-{how}.json").read_text())
            for rank in (0, 1)
            for how in ("whole", "resumed")
        }
        whole = found[0, "whole"]
        assert (whole["processes"], whole["wrapper"], whole["converted"]) == (2, "DistributedDataParallel", 14)
        assert whole["skipped"] == 1 and whole["rates"][1] == whole["rates"][2] > whole["rates"][3]
        assert found[1, "whole"]["state"] == whole["state"]
        assert found[0, "resumed"]["state"] == found[1, "resumed"]["state"] == whole["state"]
        assert found[0, "resumed"]["losses"][2:] == whole["losses"][2:] and found[0, "resumed"]["eval"] == whole["eval"]
        alone = script.train(recipe, tmp_path / f"{recipe}-alone", 2)
        assert whole["losses"][0] == pytest.approx(alone["losses"][0], rel=1e-3)
        assert whole["losses"][-1] == pytest.approx(alone["losses"][-1], rel=1e-2)
