"""The commands of README.md and docs/distributed.md: processes and layouts fit, and they run on CPUs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run
from torch.distributed.run import get_args_parser

from narrowgauge.cli.config import parse_arguments
from narrowgauge.observe import journal
from narrowgauge.train import loop

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


(BY_TORCHRUN,) = (command for command in commands(README) if "--accumulation" in command)  # with the most options


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


def words_of(command: str) -> list[str]:
    """What follows `narrowgauge train`, and SMALL."""
    asked = get_args_parser().parse_args(shlex.split(command, comments=True)[1:])
    return [*asked.training_script_args[1:], *SMALL.split()]


def train(words: list[str]) -> None:
    loop.run(parse_arguments(words).config)


def losses(folder: Path) -> list[float]:
    rows = journal.read(folder / "documented" / "journal.jsonl").of_kind("step")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(5.0 < row["loss"] < 6.0 and not row["skipped"] for row in rows)  # log(256) = 5.55, hardly trained
    return [row["loss"] for row in rows]


def losses_of_ranks(command: str, folder: Path) -> list[float]:
    """The losses of a command's run on ranks of the pool, which take torchrun's place."""
    words = words_of(command)
    ranks = parse_arguments(words).config.parallel.ranks
    run(ranks, train, [*words, "--runs_dir", str(folder / "ranks"), "--cache_dir", str(folder / "cache")])
    return losses(folder / "ranks")


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("command", [each for each in commands(README) if each != BY_TORCHRUN])
def test_its_layout_runs(command, tmp_path):
    losses_of_ranks(command, tmp_path)


@pytest.mark.slow
@pytest.mark.multiproc
def test_torchrun_runs_a_command_as_it_is_written(tmp_path):
    _, *words = [*shlex.split(BY_TORCHRUN, comments=True), *SMALL.split()]
    expected = losses_of_ranks(BY_TORCHRUN, tmp_path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [str(Path(sys.executable).parent / "torchrun"), *words], capture_output=True, text=True, cwd=tmp_path,
        timeout=500, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "runs") == expected
