"""The commands of README.md and docs/distributed.md: processes and layouts fit, and they run as written on CPUs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from narrowgauge.cli.config import parse_arguments
from narrowgauge.observe import journal

ROOT = Path(__file__).resolve().parents[2]
README, PAGE = ROOT / "README.md", ROOT / "docs" / "distributed.md"
# smaller than what is written, and in a folder of the test
SMALL = (
    "--name documented --model.layers 2 --model.width 64 --model.heads 2 --model.kv_heads 2 --model.context 32 "
    "--data.tokenizer bytes --data.max_bytes 100000 --batch_size 4 --eval_batches 1 --sample_tokens 0 --steps 3 "
    "--device cpu"
)


def commands(document: Path) -> list[str]:
    return re.findall(r"^torchrun .*$", document.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("command", [*commands(README), *commands(PAGE)])
def test_torchrun_starts_as_many_processes_as_the_layout_asks_for(command):
    asked = get_args_parser().parse_args(shlex.split(command, comments=True)[1:])
    assert asked.module and asked.training_script == "narrowgauge" and asked.nnodes == "1:1"
    subcommand, *words = asked.training_script_args
    assert subcommand == "train"
    config = parse_arguments(words).config
    config.check()
    assert config.parallel.ranks == int(asked.nproc_per_node)


def test_every_kind_of_parallelism_has_a_command():
    for document in (README, PAGE):
        text = "\n".join(commands(document))
        assert all(f"--parallel.{kind} 2" in text for kind in ("data", "shard", "tensor", "pipeline"))


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("command", commands(README))
def test_it_runs(command, tmp_path):
    _, *words = [*shlex.split(command, comments=True), *SMALL.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [str(Path(sys.executable).parent / "torchrun"), *words], capture_output=True, text=True, cwd=tmp_path,
        timeout=500, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = journal.read(tmp_path / "runs" / "documented" / "journal.jsonl").of_kind("step")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(5.0 < row["loss"] < 6.0 and not row["skipped"] for row in rows)  # log(256) = 5.55, hardly trained
