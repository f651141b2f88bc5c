"""A checkpoint of any recipe in a model and an optimizer of any other: full values, moments cast anew."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.errors import CheckpointError
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.optim.storage import decode, encode, spec_of

Parts = tuple[nn.Module, torch.optim.Optimizer]
BLOCK64 = ng.CastSpec(ng.formats.INT8, ng.Block(1, 64), companding=ng.SQUARE_ROOT)
FP32_MASTER = ng.recipe("narrow8", master=ng.CastSpec(ng.formats.FP32))
RECIPES: dict[str, Any] = {
    "torch": None,  # torch.optim.AdamW, not prepared
    "fp32": "fp32",
    "fp8_lm_o2": "fp8_lm_o2",
    "fp8_lm_o3": "fp8_lm_o3",
    "narrow8": "narrow8",
    "blocks of 64": ng.recipe("narrow8", exp_avg=BLOCK64, min_state_size=0),
    "4 bits": ng.recipe("narrow8", moment_bits=4),
    "lossless": ng.recipe("narrow8", master=ng.CastSpec(ng.formats.INT16, scale=ng.ULP)),
    "fp32 master": FP32_MASTER,
    "narrow8_sr": "narrow8_sr",
    "bf16_pure": "bf16_pure",
}
# of what a parameter and its master hold together, relative to the value: half a unit in the last place. The 8-bit
# residual parts half a unit of bfloat16, 2^-8, into 127 steps.
HALF_ULP = {
    "torch": 0.0, "fp32": 0.0, "lossless": 0.0, "fp32 master": 0.0, "narrow8": 2**-8 / 254, "blocks of 64": 2**-8 / 254,
    "4 bits": 2**-8 / 254, "narrow8_sr": 2**-8, "bf16_pure": 2**-8, "fp8_lm_o2": 2**-11, "fp8_lm_o3": 2**-11,
}  # fmt: skip


def build(recipe: str, seed: int, lr: float = 1e-2, **options: Any) -> Parts:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 64, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    if RECIPES[recipe] is None:
        return model, optimizer
    return ng.prepare(model, optimizer, RECIPES[recipe], **options)


def train(parts: Parts, steps: range) -> list[float]:
    model, optimizer = parts
    torch.manual_seed(steps.start)  # the key of stochastic rounding
    losses = []
    for step in steps:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        loss = (model(x).float() - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def full_values(parts: Parts) -> dict[str, Tensor]:
    model, optimizer = parts
    if isinstance(optimizer, LowPrecisionOptimizer):
        return {name: optimizer.full_values(p) for name, p in model.named_parameters()}
    return {name: p.detach().clone().float() for name, p in model.named_parameters()}


def moments(parts: Parts) -> dict[str, dict[str, Any]]:
    model, optimizer = parts
    return {name: optimizer.state[p] for name, p in model.named_parameters()}


def bits(value: Any) -> Any:
    """What must be equal where two states are the same: type, dtype, shape and all bytes."""
    if not isinstance(value, Tensor):
        return value
    if hasattr(value, "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        return type(value).__name__, context, *[bits(getattr(value, name)) for name in names]
    raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
    return value.dtype, tuple(value.shape), raw.numpy().tobytes()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Parts]]:
    """Of every recipe a model after three steps, and its checkpoint."""
    folder = tmp_path_factory.mktemp("sources")
    made = {}
    for recipe in RECIPES:
        parts = build(recipe, 0)
        train(parts, range(3))
        made[recipe] = ng.save(folder / recipe, *parts), parts
    return made


def _often(pairs: list[tuple[str, str]]) -> list[Any]:
    """Every pair, those of the levels that differ most on every run of the tests."""
    often = {"torch", "fp8_lm_o3", "narrow8", "4 bits"}
    return [pytest.param(*pair, marks=() if often.issuperset(pair) else pytest.mark.slow) for pair in pairs]


@pytest.mark.parametrize(("source", "target"), _often([(a, b) for a in RECIPES for b in RECIPES]))
def test_values_and_moments_come_in_the_formats_that_the_target_keeps(source: str, target: str, sources) -> None:
    path, saved = sources[source]
    parts = build(target, 1)
    ng.load(path, *parts)
    expected = full_values(saved)
    for name, found in full_values(parts).items():
        bound = expected[name].abs() * HALF_ULP[target]
        if target.startswith("fp8_lm"):  # below 2^-14 of its scale float16 has fewer bits
            bound = bound.clamp(min=expected[name].abs().max().item() * 2**-15 * 2**-11)
        error = (found - expected[name]).abs()
        assert bool((error <= bound * 1.01).all()), (name, error.max().item())
    for name, state in moments(parts).items():
        before = moments(saved)[name]
        assert int(state["step"]) == 3
        for moment in ("exp_avg", "exp_avg_sq"):
            shape = before[moment].shape
            values = decode(before[moment], shape)
            p = dict(parts[0].named_parameters())[name]
            spec = ng.CastSpec(ng.formats.FP32)
            if isinstance(parts[1], LowPrecisionOptimizer):
                spec = parts[1].formats_of(p).of_moment(moment, p.numel())
            same = spec_of(before[moment]) == spec
            assert bits(state[moment]) == bits(before[moment] if same else encode(values, spec)), (name, moment)
    assert all(torch.isfinite(torch.tensor(loss)) for loss in train(parts, range(3, 5)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_same_recipe_takes_every_bit_and_goes_on_alike(recipe: str, sources, tmp_path: Path) -> None:  # case 41
    path, _ = sources[recipe]
    whole, other = build(recipe, 0), build(recipe, 1)
    train(whole, range(3))
    ng.load(path, *other)
    for a, b in zip(whole[0].parameters(), other[0].parameters(), strict=True):
        assert bits(a.data) == bits(b.data)
        for key, value in whole[1].state[a].items():
            assert bits(value) == bits(other[1].state[b][key]), key
    expected = train(whole, range(3, 6))
    assert train(other, range(3, 6)) == expected
    ng.save(tmp_path / "a", *whole)
    ng.save(tmp_path / "b", *other)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("source", RECIPES)
def test_a_plain_model_gets_the_full_values_without_an_optimizer(source: str, sources) -> None:
    path, saved = sources[source]
    model, _ = build("torch", 1)
    ng.load(path, model)
    for name, values in full_values(saved).items():
        assert torch.equal(model.get_parameter(name), values), name


def test_narrow8_is_bfloat16_and_a_residual_in_the_files(sources) -> None:
    from safetensors.torch import load_file

    path, (model, optimizer) = sources["narrow8"]
    weights, states = load_file(path / "model.safetensors"), load_file(path / "optimizer.safetensors")
    assert {name: t.dtype for name, t in weights.items()} == dict.fromkeys(model.state_dict(), torch.bfloat16)
    master = states["state.state.0.master"]
    assert master.dtype is torch.int8
    joined = weights["0.weight"].float() + master.float() / 127 * _half_ulp(weights["0.weight"])
    assert torch.equal(joined, optimizer.full_values(model[0].weight))
    assert not torch.equal(joined, weights["0.weight"].float())


def _half_ulp(hi: Tensor) -> Tensor:
    return torch.exp2(torch.frexp(hi.float().abs()).exponent - 1.0 - 8)


def test_a_tied_parameter_gets_its_full_values_under_both_names(tmp_path: Path) -> None:  # case 55
    def tied(recipe: str | None) -> Parts:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(64, 96), nn.Linear(96, 64, bias=False))
        model[1].weight = model[0].weight
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return (model, optimizer) if recipe is None else ng.prepare(model, optimizer, recipe)

    model, optimizer = tied("narrow8")
    model(torch.arange(8)).float().square().mean().backward()
    optimizer.step()
    ng.save(tmp_path / "c", model, optimizer)
    plain, plain_optimizer = tied(None)
    ng.load(tmp_path / "c", plain, plain_optimizer)
    assert plain[0].weight is plain[1].weight
    assert torch.equal(plain[0].weight, optimizer.full_values(model[0].weight))


WITH_MASTERS = ("narrow8", "fp8_lm_o3", "fp32 master", "lossless", "narrow8_sr")
# to `.data` a residual, of half a unit at most, cannot tell that it was written; a copy beside the parameter can
WAYS = [(recipe, how) for recipe in WITH_MASTERS for how in ("load", "load_state_dict", "copy_")]
WAYS += [(recipe, "data") for recipe in ("fp8_lm_o3", "fp32 master")]


@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize(("recipe", "how"), WAYS)
def test_masters_follow_when_only_the_model_is_loaded(
    recipe: str, how: str, offload: str | None, sources
) -> None:  # case 75
    path, saved = sources[recipe]
    model, optimizer = build(recipe, 1, lr=0.0, offload=offload)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    train((model, optimizer), range(2))  # masters are there, and have digits
    new = {name: p.detach() for name, p in saved[0].named_parameters()}
    if how == "load":
        ng.load(path, model)
    elif how == "load_state_dict":
        model.load_state_dict(saved[0].state_dict())
    else:
        with torch.no_grad():
            for name, p in model.named_parameters():
                (p if how == "copy_" else p.data).copy_(new[name])
    train((model, optimizer), range(2, 3))
    for name, p in model.named_parameters():
        assert bits(p.data) == bits(new[name]), name
        if recipe in ("narrow8", "lossless"):  # digits of the old value are gone
            assert torch.equal(optimizer.full_values(p), new[name].float()), name
    optimizer.param_groups[0]["lr"] = 1e-3
    train((model, optimizer), range(3, 4))
    for name, p in model.named_parameters():
        # a step of Adam is lr at most when it is young, here a few times that as v is older than m; formats add half
        # a unit of the largest: E4M3's last place is 2^-3 of the value
        room = 5e-3 + new[name].float().abs() * (2**-3 if recipe == "fp8_lm_o3" else 2**-7)
        assert bool(((p.detach().float() - new[name].float()).abs() <= room).all()), name
        if p.numel() > 100:
            assert not torch.equal(p.detach().float(), new[name].float()), name


@pytest.mark.parametrize("recipe", ["fp8_lm_o3", "4 bits"])
def test_state_dicts_load_weights_only_in_a_process_of_their_own(recipe: str, sources, tmp_path: Path) -> None:
    # case 71
    _, (model, optimizer) = sources[recipe]
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    again = tmp_path / "again.pt"
    program = (
        "import sys, torch; import narrowgauge; "
        f"state = torch.load({str(tmp_path / 'state.pt')!r}, weights_only=True, map_location='cpu'); "
        f"torch.save(state, {str(again)!r})"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    loaded = torch.load(again, weights_only=True)
    other, other_optimizer = build(recipe, 1)
    other.load_state_dict(loaded["model"])
    other_optimizer.load_state_dict(loaded["optimizer"])
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert bits(a.data) == bits(b.data)
        for key, value in optimizer.state[a].items():
            assert bits(value) == bits(other_optimizer.state[b][key]), key


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_copied_state_is_equal_and_apart(recipe: str, sources) -> None:  # case 41
    _, (model, optimizer) = sources[recipe]
    copied = copy.deepcopy(optimizer.state_dict())
    other = build(recipe, 1)
    other[0].load_state_dict(copy.deepcopy(model.state_dict()))
    other[1].load_state_dict(copied)

    def all_bits(parts: Parts) -> list[Any]:
        return [(key, bits(value)) for p in parts[0].parameters() for key, value in parts[1].state[p].items()]

    before = all_bits((model, optimizer))
    assert sorted(before, key=str) == sorted(all_bits(other), key=str)
    train(other, range(3, 5))
    assert before == all_bits((model, optimizer))


class TestBadStates:
    @pytest.mark.parametrize("recipe", ["torch", "fp32", "narrow8"])
    def test_of_another_shape(self, recipe: str, tmp_path: Path, sources) -> None:
        path, _ = sources["narrow8"]
        model, _ = build(recipe, 1)
        copied = tmp_path / "c"
        _edit_state(path, copied, "state.state.0.exp_avg", "state.state.2.exp_avg")
        with pytest.raises(CheckpointError, match=r"expected a state 'exp_avg' of shape \[96, 64\]"):
            ng.load(copied, *build(recipe, 1))

    @pytest.mark.parametrize("recipe", ["torch", "fp32", "narrow8"])
    def test_of_another_kind_of_optimizer(self, recipe: str, tmp_path: Path) -> None:
        model = nn.Linear(64, 96)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        ng.save(tmp_path / "c", model, optimizer)
        other = nn.Linear(64, 96)
        adam = torch.optim.AdamW(other.parameters())
        if RECIPES[recipe]:
            other, adam = ng.prepare(other, adam, RECIPES[recipe])
        with pytest.raises(CheckpointError, match="has no state 'momentum_buffer'"):
            ng.load(tmp_path / "c", other, adam)


def _edit_state(path: Path, copied: Path, name: str, instead: str) -> None:
    """A copy of a checkpoint with one moment in the place of another, and a manifest that says so."""
    import hashlib
    import json
    import shutil

    shutil.copytree(path, copied)
    document = json.loads((copied / "state.json").read_text())
    entries = dict(document["optimizer"]["state"]["state"]["$items"])
    moment = name.rpartition(".")[2]
    entries[int(name.split(".")[2])][moment] = entries[int(instead.split(".")[2])][moment]
    text = json.dumps(document)
    (copied / "state.json").write_text(text)
    manifest = json.loads((copied / "manifest.json").read_text())
    digest = hashlib.sha256(text.encode()).hexdigest()
    manifest["files"]["state.json"] = {"bytes": len(text.encode()), "sha256": digest}
    (copied / "manifest.json").write_text(json.dumps(manifest))
