"""`ng.save` and `ng.load`: the same bits back, whole or not at all, and clear words for whatever is wrong."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.train import checkpoint as checkpoints
from narrowgauge.train import folder as folders


def make_model(seed: int = 0, *, tied: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 10, bias=False))
    model.register_buffer("counter", torch.tensor(3))
    if tied:
        model[3].weight = model[0].weight
    return model


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        ids = torch.randint(10, (4, 6))
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.detach().flatten().view(torch.uint8), b.detach().flatten().view(torch.uint8))
    )


def test_training_goes_on_with_the_same_bits(tmp_path: Path) -> None:  # case 69
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    take_steps(model, optimizer, 3)
    ng.save(tmp_path / "c", model, optimizer, random=torch.get_rng_state())
    expected = take_steps(model, optimizer, 3)
    other = make_model(seed=1)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=5.0)
    torch.set_rng_state(ng.load(tmp_path / "c", other, other_optimizer)["random"])
    assert other_optimizer.param_groups[0]["lr"] == 1e-2
    assert take_steps(other, other_optimizer, 3) == expected
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert bits_equal(a, b), name


@pytest.mark.parametrize("recipe", ng.recipe_names())
def test_a_prepared_model_goes_on_with_the_same_bits_in_every_recipe(tmp_path: Path, recipe: str) -> None:  # case 69
    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, ng.LossScaler]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 32))
        model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe)
        return model, optimizer, ng.LossScaler(recipe, "cpu", init_scale=2.0**12, growth_interval=2)

    def go_on(parts: tuple[nn.Module, torch.optim.Optimizer, ng.LossScaler], steps: range) -> list[float]:
        model, optimizer, scaler = parts
        losses = []
        for step in steps:
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
            loss = (model(x).float() - x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    whole = build(0)
    go_on(whole, range(3))
    ng.save(tmp_path / "c", *whole[:2], scaler=whole[2])
    expected = go_on(whole, range(3, 6))
    other = build(1)
    other[2].load_state_dict(ng.load(tmp_path / "c", *other[:2])["scaler"])
    assert go_on(other, range(3, 6)) == expected
    assert whole[2].get_scale() == other[2].get_scale()
    for (name, a), b in zip(whole[0].state_dict().items(), other[0].state_dict().values(), strict=True):
        for x, y in zip(plain(a), plain(b), strict=True):
            assert bits_equal(x, y), name


def plain(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (value.codes, value.dequant_scale) if isinstance(value, ng.QuantizedTensor) else (value,)


def test_extra_state_comes_back_as_it_was(tmp_path: Path) -> None:
    extra = {
        "numbers": [1, -2.5, True, None, "text", math.inf, 2**70],
        "pair": (1, (2.0, "x")),
        "by_index": {0: "a", 7: torch.arange(3, dtype=torch.int16)},
        "scalar": torch.tensor(2.0, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "nested": {"list": [torch.ones(2, 3).t()]},
    }
    ng.save(tmp_path / "c", nn.Linear(1, 1), **extra)
    loaded = ng.load(tmp_path / "c", nn.Linear(1, 1))
    assert loaded["numbers"] == extra["numbers"] and loaded["pair"] == extra["pair"]
    assert loaded["numbers"][2] is True and loaded["by_index"][0] == "a"
    assert bits_equal(loaded["by_index"][7], extra["by_index"][7])
    assert bits_equal(loaded["scalar"], extra["scalar"])
    assert loaded["empty"].shape == (0, 4)
    assert torch.equal(loaded["nested"]["list"][0], torch.ones(3, 2))
    ng.save(tmp_path / "n", nn.Linear(1, 1), nan=math.nan)
    assert math.isnan(ng.load(tmp_path / "n", nn.Linear(1, 1))["nan"])


def test_an_object_with_state_is_stored_as_its_state(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    ng.save(tmp_path / "c", nn.Linear(1, 1), schedule=schedule)
    assert ng.load(tmp_path / "c", nn.Linear(1, 1))["schedule"]["step_size"] == 2


def test_the_files_hold_plain_tensors_that_load_without_this_library(tmp_path: Path) -> None:  # case 71
    model = make_model()
    ng.save(tmp_path / "c", model, torch.optim.AdamW(model.parameters()))
    plain = safetensors.torch.load_file(tmp_path / "c" / "model.safetensors")
    assert set(plain) == set(model.state_dict())
    assert not [p for p in (tmp_path / "c").iterdir() if p.suffix not in (".safetensors", ".json")]


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:  # case 55
    model = make_model(tied=True)
    ng.save(tmp_path / "c", model)
    assert "3.weight" not in safetensors.torch.load_file(tmp_path / "c" / "model.safetensors")
    other = make_model(seed=1, tied=True)
    weight = other[0].weight
    ng.load(tmp_path / "c", other)
    assert other[3].weight is other[0].weight is weight
    assert bits_equal(weight, model[0].weight)


def test_overlapping_views_are_stored_apart(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    ng.save(tmp_path / "c", nn.Linear(1, 1), a=base[:4], b=base[2:], c=base)
    loaded = ng.load(tmp_path / "c", nn.Linear(1, 1))
    assert [loaded[k].tolist() for k in "abc"] == [[0, 1, 2, 3], [2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("format_name", ["E4M3FN", "E5M2", "FP16", "BF16"])
def test_quantized_parameters_are_stored_as_codes_and_scale(tmp_path: Path, format_name: str) -> None:
    spec = ng.CastSpec(getattr(ng.formats, format_name))
    model, other = (nn.Linear(8, 4) for _ in range(2))
    for module in (model, other):
        module.weight = nn.Parameter(ng.quantize(module.weight.detach(), spec))
    ng.save(tmp_path / "c", model, state=model.weight)
    extra = ng.load(tmp_path / "c", other)
    for loaded in (other.weight, extra["state"]):
        assert isinstance(loaded, ng.QuantizedTensor) and loaded.spec == spec
        assert bits_equal(loaded.codes, model.weight.codes)
        assert bits_equal(loaded.dequant_scale, model.weight.dequant_scale)
        assert bits_equal(loaded.amax, model.weight.amax)
    stored = safetensors.torch.load_file(tmp_path / "c" / "model.safetensors")
    assert stored["weight.codes"].dtype == spec.format.dtype


def test_optimizer_state_keeps_the_dtype_in_which_it_was_saved(tmp_path: Path) -> None:  # case 41
    model = nn.Linear(8, 8).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"step": torch.tensor(3.0), "exp_avg": torch.randn(8, 8), "exp_avg_sq": torch.rand(8, 8)}
    optimizer.state[model.weight] = dict(state)
    ng.save(tmp_path / "c", model, optimizer)
    fresh = torch.optim.AdamW(model.parameters())
    ng.load(tmp_path / "c", model, fresh)
    for key, value in state.items():
        assert bits_equal(fresh.state[model.weight][key], value), key


def test_saving_again_replaces_the_folder(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    ng.save(tmp_path / "c", model, step=1)
    ng.save(tmp_path / "c", model, step=2)
    assert ng.load(tmp_path / "c", model)["step"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_compiled_model_is_stored_under_its_own_names(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    ng.save(tmp_path / "c", torch.compile(model, backend="eager"))  # type: ignore[arg-type]
    ng.load(tmp_path / "c", model)


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
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    take_steps(model, optimizer, 1)
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
    model = make_model()
    path = ng.save(tmp_path / "c", model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ng.CheckpointError, match=r"(?s)does not fit the model.*prepare"):
        ng.load(path, nn.Linear(8, 8))
    backwards = torch.optim.AdamW(list(model.parameters())[::-1])
    with pytest.raises(ng.CheckpointError, match="'0.weight' was saved where '3.weight' is now"):
        ng.load(path, model, backwards)
    no_optimizer = ng.save(tmp_path / "d", model)
    with pytest.raises(ng.CheckpointError, match="no optimizer state"):
        ng.load(no_optimizer, model, backwards)


@contextmanager
def largest_file(limit_bytes: int) -> Iterator[None]:
    """Let the operating system refuse longer files, as a full disk would."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_write_that_the_system_refuses_leaves_the_old_checkpoint_and_no_rest(tmp_path: Path) -> None:
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
