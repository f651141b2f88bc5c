"""Checkpoints that cannot be written, or read, or do not fit: clear words, and what was there before stays."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.train import checkpoint as checkpoints
from narrowgauge.train import folder as folders


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "'thing' is a object"),
        ({"deep": [torch.optim]}, "'thing.deep.0' is a module"),
        ({(1, 2): 3}, "strings or integers"),
        (torch.zeros(2, device="meta"), "meta device"),
    ],
)
def test_what_is_no_plain_state_is_refused_by_its_path(tmp_path: Path, value: object, words: str) -> None:
    with pytest.raises(ng.CheckpointError, match=words):
        ng.save(tmp_path / "c", nn.Linear(1, 1), thing=value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_a_truncated_corrupt_or_missing_file_is_named(tmp_path: Path, name: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    path = ng.save(tmp_path / "c", model, optimizer)
    data = (path / name).read_bytes()
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 0x10
    for damaged in (data[:-7], bytes(flipped), b""):
        (path / name).write_bytes(damaged)
        with pytest.raises(ng.CheckpointError, match=f"{name}.*(truncated|corrupt)|corrupt"):
            ng.load(path, model, optimizer)
    (path / name).unlink()
    with pytest.raises(ng.CheckpointError, match=f"{name} is missing"):
        ng.load(path, model, optimizer)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "does not list model.safetensors"),
        ([], "manifest.json is corrupt"),
        ({"model.safetensors": 3}, "manifest.json is corrupt"),
        ({"model.safetensors": {"bytes": 3}}, "manifest.json is corrupt"),
    ],
)
def test_a_manifest_that_was_edited_is_corrupt(tmp_path: Path, files: object, words: str) -> None:
    path = ng.save(tmp_path / "c", nn.Linear(1, 1))
    for name in ("optimizer.safetensors", "extra.safetensors", "state.json"):
        (path / name).unlink()
    (path / "manifest.json").write_text(json.dumps({"format_version": folders.FORMAT_VERSION, "files": files}))
    with pytest.raises(ng.CheckpointError, match=words):
        ng.load(path, nn.Linear(1, 1))


def test_a_missing_folder_and_a_folder_of_another_kind_are_named(tmp_path: Path) -> None:
    with pytest.raises(ng.CheckpointError, match="found none"):
        ng.load(tmp_path / "c", nn.Linear(1, 1))
    with pytest.raises(ng.CheckpointError, match="no checkpoint"):
        ng.load(tmp_path, nn.Linear(1, 1))


def test_a_newer_checkpoint_format_is_refused(tmp_path: Path) -> None:
    path = ng.save(tmp_path / "c", nn.Linear(1, 1))
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format_version": 99}))
    with pytest.raises(ng.CheckpointError, match="format 1, found 99"):
        ng.load(path, nn.Linear(1, 1))


def test_a_model_or_an_optimizer_of_another_shape_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    path = ng.save(tmp_path / "c", model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ng.CheckpointError, match=r"(?s)does not fit the model.*prepare"):
        ng.load(path, nn.Linear(8, 8))
    backwards = torch.optim.AdamW(list(model.parameters())[::-1])
    with pytest.raises(ng.CheckpointError, match="'0.weight' was saved where '1.bias' is now"):
        ng.load(path, model, backwards)
    no_optimizer = ng.save(tmp_path / "d", model)
    with pytest.raises(ng.CheckpointError, match="no optimizer state"):
        ng.load(no_optimizer, model, backwards)


def test_a_write_that_the_system_refuses_leaves_the_old_checkpoint_and_no_rest(tmp_path: Path, largest_file) -> None:
    model = nn.Linear(200, 200)
    ng.save(tmp_path / "c", model, step=1)
    with largest_file(50_000), pytest.raises(ng.CheckpointError, match=r"File too large.*Make room"):
        ng.save(tmp_path / "c", model, step=2)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert ng.load(tmp_path / "c", model)["step"] == 1


@pytest.mark.parametrize("where", ["write", "fsync", "rename"])
def test_a_full_disk_at_any_point_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    model = nn.Linear(2, 2)
    ng.save(tmp_path / "c", model, step=1)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if where == "write":
            patch.setattr(checkpoints, "save_file", full)
        elif where == "fsync":
            patch.setattr(folders.os, "fsync", full)
        else:
            real = Path.rename
            patch.setattr(Path, "rename", lambda self, to: full() if "writing" in self.name else real(self, to))
        with pytest.raises(ng.CheckpointError, match="No space left on device"):
            ng.save(tmp_path / "c", model, step=2)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert ng.load(tmp_path / "c", model)["step"] == 1


def test_a_crash_while_replacing_brings_the_old_folder_back(tmp_path: Path) -> None:
    ng.save(tmp_path / "c", nn.Linear(2, 2), step=1)
    (tmp_path / "c").rename(tmp_path / ".replaced-c")
    (tmp_path / ".writing-c-123").mkdir()
    with pytest.raises(ng.CheckpointError, match=r"\.replaced-c"):
        ng.load(tmp_path / "c", nn.Linear(2, 2))
    folders.remove_unfinished(tmp_path)
    assert ng.load(tmp_path / "c", nn.Linear(2, 2))["step"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
