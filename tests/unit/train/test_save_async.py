"""Checkpoints that are written beside training: the run is the same, and so are they."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.observe import journal
from narrowgauge.train import checkpoint, events, loop
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.run_folder import RunFolder


@pytest.fixture
def values(corpus: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "model": {"layers": 1, "width": 32, "heads": 2, "kv_heads": 2, "ffn_width": 48, "context": 16},
        "data": {"corpus": str(corpus / "*.txt"), "tokenizer": "bytes", "validation_fraction": 0.2},
        "batch_size": 2, "steps": 5, "eval_every": 0, "eval_batches": 1, "save_every": 1, "keep_last": 3,
        "sample_tokens": 0, "device": "cpu", "threads": 1,
        "cache_dir": str(tmp_path / "cache"), "runs_dir": str(tmp_path / "runs"),
    }  # fmt: skip


def _run(values: dict[str, Any], name: str, **changes: Any) -> tuple[RunFolder, list[Any]]:
    told: list[Any] = []
    result = loop.run(TrainConfig.from_dict(values | changes | {"name": name}), told.append)
    return RunFolder(result.run_dir), told


def _state(folder: RunFolder, step: int) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.checkpoint(step).iterdir()}


def test_checkpoints_written_beside_training_are_those_of_a_run_that_waits(values: dict[str, Any]) -> None:
    plain, _ = _run(values, "plain")
    beside, told = _run(values, "beside", save_async=True)
    assert [event.step for event in told if isinstance(event, events.CheckpointSaved)] == [1, 2, 3, 4, 5]
    assert beside.steps() == plain.steps() == [3, 4, 5]
    for step in plain.steps():
        assert _state(beside, step) == _state(plain, step)
    loop.resume(beside.path, checkpoint=beside.checkpoint(3).name)
    assert _state(beside, 5) == _state(plain, 5)


def test_one_that_the_disk_refuses_is_told_and_the_older_ones_stay(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint.save_file

    def full_at_step_4(tensors: Any, path: Path, **options: Any) -> None:
        if "step-000004" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(tensors, path, **options)

    monkeypatch.setattr(checkpoint, "save_file", full_at_step_4)
    folder, told = _run(values, "full", save_async=True)
    (warning,) = [event.message for event in told if isinstance(event, events.Warned)]
    assert warning.startswith("no checkpoint at step 4: ") and "No space left" in warning
    assert folder.steps() == [2, 3, 5]
    assert [row["message"] for row in journal.read(folder.journal).of_kind("warning")] == [warning]


def test_a_run_that_fails_leaves_the_checkpoint_under_way_whole(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(Exception):
        pass

    def stop(event: Any) -> None:
        if isinstance(event, events.StepDone) and event.step == 3:
            raise Stop

    monkeypatch.setattr(checkpoint, "save_file", _slowly(checkpoint.save_file))
    with pytest.raises(Stop):
        loop.run(TrainConfig.from_dict(values | {"name": "stopped", "save_async": True}), stop)
    folder = RunFolder(Path(values["runs_dir"]) / "stopped")
    assert folder.choose(None) == 2  # verified


def _slowly(write: Any) -> Any:
    def slow(*arguments: Any, **options: Any) -> None:
        time.sleep(0.2)
        write(*arguments, **options)

    return slow
