"""Checkpoints of several processes that are written beside training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run

from narrowgauge.train import loop
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.run_folder import RunFolder

pytestmark = pytest.mark.multiproc


def _endings(values: dict[str, Any]) -> list[dict[str, bytes]]:
    """The last checkpoints of a run that waits for its saves, of one that does not, and of that from its first on."""
    found = []
    for name, beside in (("plain", False), ("beside", True)):
        folder = RunFolder(loop.run(TrainConfig.from_dict(values | {"name": name, "save_async": beside})).run_dir)
        found.append(_last(folder.path))
    loop.resume(folder.path, checkpoint=folder.checkpoint(1).name)
    return [*found, _last(folder.path)]


def _last(path: Path) -> dict[str, bytes]:
    torch.distributed.barrier()  # the first rank removes what is too old
    folder = RunFolder(path)
    assert folder.steps() == [1, 2, 3]
    files = {file.name: file.read_bytes() for file in folder.checkpoint(3).iterdir()}
    torch.distributed.barrier()
    return files


@pytest.mark.parametrize("parallel", [{"data": 2}, {"shard": 2}], ids=str)
def test_they_are_those_of_a_run_that_waits(parallel: dict[str, Any], make_values: Any) -> None:
    values = make_values("", parallel, steps=3, save_every=1, eval_every=0, statistics_every=0, sample_tokens=0)
    for plain, beside, resumed in run(2, _endings, values):
        assert "rank-00001.safetensors" in plain
        assert beside == plain
        assert resumed == plain
