"""A process of a run is killed in the middle of a step: torchrun starts all anew, and the run is as if nothing was."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ranks import run

from narrowgauge.observe import journal
from narrowgauge.train import loop
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.run_folder import RunFolder

pytestmark = pytest.mark.multiproc
STEPS = 12
LIMIT_S = 400.0


@pytest.fixture
def torchrun(tmp_path: Path) -> Any:
    """Start `torchrun -m narrowgauge train` on two processes; what still runs at the end of the test is stopped."""
    running: list[subprocess.Popen[str]] = []

    def begin(config: TrainConfig, *options: str) -> subprocess.Popen[str]:
        path = tmp_path / f"{config.name}.yaml"
        path.write_text(config.to_yaml())
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
        command += ["-m", "narrowgauge", "train", "--config", str(path)]
        with (tmp_path / f"{config.name}.log").open("w") as log:
            running.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True))
        return running[-1]

    yield begin
    for popen in running:
        popen.terminate()  # it ends its workers
        popen.wait()


def worker(launcher: int, rank: int) -> int:
    """The process number of a rank that a torchrun has started."""
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and f"\0RANK={rank}\0".encode() in (entry / "environ").read_bytes():
                return int(entry.name)
        except (OSError, ValueError):  # no process, or one that has just ended
            continue
    raise AssertionError(f"no rank {rank} of {launcher}")


def wait_for_step(folder: RunFolder, step: int, popen: subprocess.Popen[str]) -> None:
    """Return as soon as the journal holds that step."""
    end_s = time.monotonic() + LIMIT_S
    while not (folder.journal.exists() and b'"kind": "step", "step": %d,' % step in folder.journal.read_bytes()):
        assert popen.poll() is None and time.monotonic() < end_s
        time.sleep(0.002)


def ending(folder: RunFolder) -> tuple[list[Any], dict[str, bytes]]:
    """All losses and norms, and the bytes of the last checkpoint."""
    steps = journal.read(folder.journal).of_kind("step")
    rows = [tuple(row[key] for key in ("step", "loss", "grad_norm", "lr", "loss_scale")) for row in steps]
    files = {file.name: file.read_bytes() for file in folder.checkpoint(folder.steps()[-1]).iterdir()}
    return rows, files


def train(values: dict[str, Any]) -> None:
    loop.run(TrainConfig.from_dict(values))


def test_a_rank_killed_in_a_step_comes_back_and_nothing_shows(  # case 69
    make_values: Any, torchrun: Any, tmp_path: Path
) -> None:
    """In one layout: what a checkpoint holds of others, and of other recipes, `test_checkpoint_runs.py` resumes."""
    changes = {"recipe": "narrow8", "steps": STEPS, "save_every": 3, "eval_every": 6}
    whole, killed = (make_values(name, {"data": 2}, **changes) for name in ("whole", "killed"))
    run(2, train, whole)
    config = TrainConfig.from_dict(killed)
    launcher, folder = torchrun(config, "--max-restarts", "1"), RunFolder(config.path)
    at, rank = random.randrange(1, STEPS - 1), random.randrange(2)
    wait_for_step(folder, at, launcher)
    os.kill(worker(launcher.pid, rank), signal.SIGKILL)
    assert launcher.wait(LIMIT_S) == 0, (tmp_path / "killed.log").read_text()
    contents = journal.read(folder.journal)
    assert [row["step"] for row in contents.of_kind("step")] == list(range(1, STEPS + 1))
    assert len(contents.of_kind("resumed")) == 1 or at <= 3  # there was a checkpoint
    rows, files = ending(folder)
    expected_rows, expected_files = ending(RunFolder(TrainConfig.from_dict(whole).path))
    assert rows == expected_rows, f"rank {rank} killed after step {at}"
    assert files.keys() == {"index.json", "manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"}
    assert files == expected_files, f"rank {rank} killed after step {at}"
