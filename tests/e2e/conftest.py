"""A run small enough to repeat many times, and ways to start it here or as a process of its own."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.observe import journal
from narrowgauge.train import folder as folders
from narrowgauge.train import loop
from narrowgauge.train.assemble import Parts
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.run_folder import RunFolder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the token files of all runs lie."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def make_config(tmp_path: Path, corpus: Path, cache: Path) -> Callable[..., TrainConfig]:
    """A configuration of a tiny run, with fields changed: `make_config("name", steps=3, model={...})`."""

    def make(name: str, **changes: Any) -> TrainConfig:
        values: dict[str, Any] = {
            "model": {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "ffn_width": 64, "context": 32},
            "data": {"corpus": str(corpus / "*.txt"), "tokenizer": "bytes", "validation_fraction": 0.2},
            "optimizer": {"lr": 1e-3},
            "schedule": {"warmup_steps": 2},
            "batch_size": 2,
            "steps": 8,
            "eval_every": 4,
            "eval_batches": 2,
            "save_every": 4,
            "statistics_every": 3,
            "sample_tokens": 4,
            "threads": 1,
            "cache_dir": str(cache),
            "runs_dir": str(tmp_path / "runs"),
            "name": name,
        }
        return TrainConfig.from_dict(values | changes)

    return make


@dataclasses.dataclass
class Process:
    """A `narrowgauge train` of its own, whose journal can be watched."""

    popen: subprocess.Popen[str]
    folder: RunFolder

    def wait_for_step(self, step: int, limit_s: float = 120.0) -> None:
        """Return as soon as the journal holds that step."""
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s:
            if (
                self.folder.journal.exists()
                and b'"kind": "step", "step": %d,' % step in self.folder.journal.read_bytes()
            ):
                return
            assert self.popen.poll() is None, self.popen.communicate()
            time.sleep(0.002)
        raise AssertionError(f"step {step} was not reached in {limit_s} s")


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """Start `narrowgauge train` on a configuration; what still runs at the end of the test is killed."""
    running: list[subprocess.Popen[str]] = []

    def begin(config: TrainConfig) -> Process:
        path = tmp_path / f"{config.name}.yaml"
        path.write_text(config.to_yaml())
        command = [sys.executable, "-m", "narrowgauge", "train", "--config", str(path)]
        popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        running.append(popen)
        assert config.name is not None
        return Process(popen, RunFolder(Path(config.runs_dir) / config.name))

    yield begin
    for popen in running:
        popen.kill()
        popen.communicate()


@dataclasses.dataclass
class Ending:
    """What two runs must share to be the same run: all losses and norms, and the bytes of their last checkpoints."""

    steps: list[tuple[Any, ...]]
    evaluations: list[tuple[Any, ...]]
    files: dict[str, bytes]


@pytest.fixture
def ending() -> Callable[[Path], Ending]:
    """Read the ending of a run folder."""

    def read(run_dir: Path) -> Ending:
        contents = journal.read(run_dir / "journal.jsonl")
        folder = RunFolder(run_dir)
        checkpoint = folder.checkpoint(folder.steps()[-1])
        names = ("model.safetensors", "optimizer.safetensors", "extra.safetensors", "state.json")
        return Ending(
            [
                tuple(row[k] for k in ("step", "loss", "grad_norm", "lr", "loss_scale"))
                for row in contents.of_kind("step")
            ],
            [(row["step"], row["loss"]) for row in contents.of_kind("evaluation")],
            {name: (checkpoint / name).read_bytes() for name in names},
        )

    return read


@pytest.fixture
def sums_taken(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose checksums are taken to be compared, from now on; those of files just written do not count."""
    read: list[Path] = []
    sum_of = folders._sha256
    monkeypatch.setattr(folders, "_sha256", lambda path: read.append(path) or sum_of(path))
    monkeypatch.setattr(folders, "seal", lambda file: {"bytes": file.stat().st_size, "sha256": sum_of(file)})
    return read


@pytest.fixture
def with_fault(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Parts], None]], None]:
    """Let every run be trained on parts that a function has changed."""
    real = loop.assemble

    def install(fault: Callable[[Parts], None]) -> None:
        def changed(*args: Any, **kwargs: Any) -> Parts:
            parts = real(*args, **kwargs)
            fault(parts)
            return parts

        monkeypatch.setattr(loop, "assemble", changed)

    return install
