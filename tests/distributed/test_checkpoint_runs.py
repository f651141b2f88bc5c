"""Runs of several processes: resumed bit for bit, and read by one process afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run
from runs import ranks_of
from safetensors.torch import load_file

from narrowgauge.cli.main import main
from narrowgauge.observe import journal
from narrowgauge.train import loop
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.run_folder import RunFolder
from narrowgauge.train.trained import Trained

pytestmark = pytest.mark.multiproc
TIMEOUT_S = 300.0


@pytest.fixture
def make_values(make_values: Any) -> Any:
    """As for all runs, with no more than what a checkpoint needs."""
    less = {"batch_size": 2, "eval_every": 4, "statistics_every": 0, "sample_tokens": 0}
    return lambda name, parallel, **changes: make_values(name, parallel, **less | changes)


def _train(values: dict[str, Any]) -> Path:
    return loop.run(TrainConfig.from_dict(values)).run_dir


def _train_and_resume(values: dict[str, Any]) -> tuple[Any, Any]:
    """The endings of a run, and of the same from its first checkpoint on."""
    folder = RunFolder(_train(values))
    whole = _ending(folder)
    loop.resume(folder.path, checkpoint=folder.checkpoint(values["save_every"]).name)
    return whole, _ending(folder)


def _ending(folder: RunFolder) -> tuple[list[tuple[Any, ...]], dict[str, bytes]]:
    """All losses, norms and loss scales, and the bytes of the last checkpoint."""
    torch.distributed.barrier()  # the first rank may still write its journal
    rows = journal.read(folder.journal).of_kind("step")
    files = {file.name: file.read_bytes() for file in folder.checkpoint(folder.steps()[-1]).iterdir()}
    torch.distributed.barrier()
    return [tuple(row[k] for k in ("step", "loss", "grad_norm", "lr", "loss_scale")) for row in rows], files


# every kind of state once, and the recipe that has the most in both layouts
@pytest.mark.parametrize(
    ("recipe", "parallel"),
    [
        ("narrow8", {"data": 2}), ("narrow8", {"shard": 2}), ("fp8_delayed", {"shard": 2}), ("fp8_lm_o2", {"data": 2}),
        ("fp16", {"shard": 2}),
    ],
    ids=str,
)  # fmt: skip
def test_a_run_resumed_is_the_same_run(recipe: str, parallel: dict[str, Any], make_values: Any) -> None:  # case 69
    for whole, resumed in run(2, _train_and_resume, make_values("a", parallel, recipe=recipe), timeout_s=TIMEOUT_S):
        assert [row[0] for row in whole[0]] == [1, 2, 3, 4]
        assert {"index.json", "manifest.json", "rank-00000.safetensors"} < whole[1].keys()
        assert resumed == whole


@pytest.mark.parametrize(
    "parallel",
    [
        {"data": 2, "partition": True}, {"tensor": 2}, {"pipeline": 2},
        pytest.param({"shard": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "shard": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor": 2, "pipeline": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_any_layout_is_resumed_and_read_by_one_process(
    parallel: dict[str, Any], make_values: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = make_values("a", parallel)
    for whole, resumed in run(ranks_of(parallel), _train_and_resume, values, timeout_s=TIMEOUT_S):
        assert resumed == whole
    folder = RunFolder(tmp_path / "runs" / "a")
    trained = Trained.open(folder.path)
    (row,) = journal.read(folder.journal).of_kind("evaluation")
    readers = parallel.get("data", 1) * parallel.get("shard", 1)
    found = trained.evaluate(trained.dataset(), 2 * readers)
    assert found.tokens == row["tokens"]
    # activations have other scales in other batches, and between layers and stages they travel in 8 bits
    assert found.loss == pytest.approx(row["loss"], rel=2e-3)
    assert main(["generate", str(folder.path), "--prompt", "In ", "--tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("In ")
    assert main(["export", str(folder.path), str(tmp_path / "hf"), "--format", "fp32"]) == 0
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    # the export has what float32 holds of parameters and residuals; in bfloat16 alone, nothing would lie between
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in exported.values())
    plain = Trained.open(folder.path, prepared=False).model.state_dict()
    assert torch.equal(exported["model.norm.weight"], plain["norm.weight"])
