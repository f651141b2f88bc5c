"""Folders of several processes: whole or not at all, written beside training, and what is missing is named."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import bits, build, train
from ranks import run
from safetensors.torch import load_file, save_file

import narrowgauge as ng
from narrowgauge.errors import CheckpointError
from narrowgauge.train import distributed_checkpoint_storage as storage
from narrowgauge.train import folder as folders

pytestmark = pytest.mark.multiproc
TIMEOUT_S = 300.0


def _saves(path: Path) -> None:
    model, optimizer = build("narrow8", "shard 2")
    train(model, optimizer, 1)
    ng.save(path, model, optimizer, note="first")


def _fails_to_load(path: Path) -> str:
    model, optimizer = build("narrow8", "shard 2") if dist.is_initialized() else build("narrow8", "one")
    before = bits(model, optimizer)
    try:
        ng.load(path, model, optimizer)
    except CheckpointError as error:
        after = bits(model, optimizer)
        assert all(torch.equal(a, b) for name in before for a, b in zip(before[name], after[name], strict=True))
        return str(error)
    return ""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole folder of two processes."""
    path = tmp_path_factory.mktemp("saved") / "whole"
    run(2, _saves, path, timeout_s=TIMEOUT_S)
    return path


def _rewritten(path: Path, change: Any) -> None:
    """Change the index, and seal the folder again, as if it had been written so."""
    index = json.loads((path / "index.json").read_text())
    change(index)
    (path / "index.json").write_text(json.dumps(index))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"] = {name: folders.seal(path / name) for name in manifest["files"] if (path / name).exists()}
    (path / "manifest.json").write_text(json.dumps(manifest))


def _remove(name: str) -> Any:
    return lambda path: (path / name).unlink()


def _flip(path: Path) -> None:
    file = path / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)


def _truncate(path: Path) -> None:
    file = path / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def _lose_piece(path: Path) -> None:
    _rewritten(path, lambda index: index["tensors"]["model/lm_head.weight"]["pieces"].pop())


def _lose_tensor(path: Path) -> None:
    _rewritten(path, lambda index: index["stored"].pop("optimizer/lm_head.weight/exp_avg@32,0.codes"))


def _lose_name(path: Path) -> None:
    _rewritten(path, lambda index: index["tensors"].pop("model/norm.weight"))


def _other_model(path: Path) -> None:
    place = {"boxes": [{"offsets": [0], "sizes": [3]}], "axis": 0}
    pieces = [{"place": place, "node": {"$tensor": "model/norm.weight@0"}}]
    _rewritten(path, lambda index: index["tensors"]["model/norm.weight"].update(shape=[3], pieces=pieces))


DAMAGES = {
    "a shard": (_remove("rank-00001.safetensors"), r"rank-00001\.safetensors is missing"),
    "the index": (_remove("index.json"), r"index\.json is missing"),
    "the manifest": (_remove("manifest.json"), r"manifest\.json is missing"),
    "a bit": (_flip, r"rank-00001\.safetensors is corrupt"),
    "the end of a file": (_truncate, r"rank-00000\.safetensors is truncated"),
    "a piece": (_lose_piece, r"'model/lm_head\.weight' of shape \[64, 64\].*found \[0:32, 0:64\]: a rank's part is"),
    "a stored tensor": (_lose_tensor, r"'optimizer/lm_head\.weight/exp_avg@32,0\.codes' is missing"),
    "a name": (_lose_name, r"lacks 1 of its tensors, the first 'norm\.weight'"),
    "a shape": (_other_model, r"'norm\.weight' has shape \[64\], and \[3\] was saved"),
    "everything": (shutil.rmtree, "expected a checkpoint folder, found none"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_a_checkpoint_lacks_is_named_on_every_rank_and_nothing_is_loaded(
    damage: str, saved: Path, tmp_path: Path
) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(saved, path)
    spoil, named = DAMAGES[damage]
    spoil(path)
    messages = [*run(2, _fails_to_load, path, timeout_s=TIMEOUT_S), _fails_to_load(path)]
    for message in messages:
        assert re.search(named, message, re.DOTALL), message


def _saves_beside_training(path: Path) -> tuple[Any, Any, Any, bool]:
    """The state at the save, what a load gives, what training went on to, and whether it was under way meanwhile."""
    model, optimizer = build("narrow8", "shard 2")
    train(model, optimizer, 1)
    at_save = bits(model, optimizer)
    write = storage.FolderWriter.write_data

    def slow(self: Any, *args: Any) -> Any:
        time.sleep(1.0)
        return write(self, *args)

    storage.FolderWriter.write_data = slow  # type: ignore[method-assign]
    try:
        handle = ng.save(path, model, optimizer, asynchronous=True, note=torch.tensor(dist.get_rank()))
        train(model, optimizer, 2, first=1)
        under_way = not handle.done and not path.exists()
        assert handle.wait(timeout_s=60) == path
    finally:
        storage.FolderWriter.write_data = write  # type: ignore[method-assign]
    other, its = build("narrow8", "shard 2", seed=1)
    assert ng.load(path, other, its)["note"] == dist.get_rank()
    return at_save, bits(other, its), bits(model, optimizer), under_way


def test_a_save_beside_training_holds_what_there_was_when_it_began(tmp_path: Path) -> None:
    for at_save, loaded, later, under_way in run(2, _saves_beside_training, tmp_path / "a", timeout_s=TIMEOUT_S):
        assert under_way
        for name, parts in at_save.items():
            assert all(map(torch.equal, parts, loaded[name])), name
        assert any(not torch.equal(a, b) for name in at_save for a, b in zip(at_save[name], later[name], strict=True))


def test_a_save_of_one_process_beside_training_is_the_same_folder(tmp_path: Path) -> None:
    model, optimizer = build("narrow8", "one")
    train(model, optimizer, 1)
    ng.save(tmp_path / "now", model, optimizer, note=[1])
    handle = ng.save(tmp_path / "beside", model, optimizer, asynchronous=True, note=[1])
    train(model, optimizer, 1, first=1)
    folder = handle.wait()
    for file in folder.iterdir():
        assert file.read_bytes() == (tmp_path / "now" / file.name).read_bytes()


def _cannot_write(path: Path) -> list[str]:
    """Errors of a save on whose rank 1 the disk is full, of one with something that is no state, and of one beside."""
    model, optimizer = build("narrow8", "shard 2")
    write, found = storage.save_file, []

    def full(*args: Any, **kwargs: Any) -> None:
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        write(*args, **kwargs)

    storage.save_file = full
    try:
        for asynchronous in (False, True):
            with pytest.raises(CheckpointError) as caught:
                done = ng.save(path, model, optimizer, asynchronous=asynchronous, note="second")
                done.wait() if asynchronous else None  # type: ignore[union-attr]
            found.append(str(caught.value))
    finally:
        storage.save_file = write
    with pytest.raises(CheckpointError) as caught:
        ng.save(path, model, optimizer, note=object() if dist.get_rank() == 1 else 0)
    return [*found, str(caught.value)]


def test_a_rank_that_cannot_write_fails_the_save_on_all_and_the_old_folder_stays(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "a"
    shutil.copytree(saved, path)
    for full, beside, unknown in run(2, _cannot_write, path, timeout_s=TIMEOUT_S):
        assert full == beside and "rank 1 found: No space left on device" in full and "make room" in full
        assert "'extra.note' is a object" in unknown
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]  # nothing half done lies about
    assert folders.verify(path) is None
    assert run(1, _note, path, timeout_s=TIMEOUT_S) == ["first"]


def _note(path: Path) -> str:
    model, optimizer = build("narrow8", "one")
    return ng.load(path, model, optimizer)["note"]


def _alone(path: Path) -> bool:
    """A model made for several ranks, on the only one."""
    model, optimizer = build("narrow8", "tensor 2")
    train(model, optimizer, 1)
    ng.save(path, model, optimizer)
    other, its = build("narrow8", "tensor 2", seed=1)
    ng.load(path, other, its)
    found, wanted = bits(other, its), bits(model, optimizer)
    return all(all(map(torch.equal, found[name], wanted[name])) for name in wanted)


def test_a_group_of_one_process_saves_as_several_do(tmp_path: Path) -> None:
    assert run(1, _alone, tmp_path / "a", timeout_s=TIMEOUT_S) == [True]
    assert (tmp_path / "a" / "index.json").exists()


def test_nothing_in_a_folder_is_pickled(saved: Path) -> None:
    assert {file.name for file in saved.iterdir()} == {
        "index.json", "manifest.json", "rank-00000.safetensors", "rank-00001.safetensors",
    }  # fmt: skip
    stored = [load_file(file) for file in sorted(saved.glob("*.safetensors"))]
    assert not stored[0].keys() & stored[1].keys()  # what all ranks have is written once
    tensors = stored[0] | stored[1]
    assert tensors["model/lm_head.weight@0,0"].dtype is torch.bfloat16
    assert tensors["optimizer/lm_head.weight/master@32,0"].shape == (32, 64)
    assert tensors["optimizer/lm_head.weight/exp_avg@0,0.codes"].dtype is torch.int8
    sizes = sorted(sum(each.nbytes for each in part.values()) for part in stored)
    assert sizes[1] < 1.1 * sizes[0]
    save_file(tensors, saved.parent / "all.safetensors")  # plain tensors: any program reads them
