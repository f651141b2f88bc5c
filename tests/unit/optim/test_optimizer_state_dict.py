"""Saving, loading and copying: bits, dtypes, counters and hooks, and what does not fit."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from state_formats import MASTERS, MOMENTS, assert_same_bits, parameter
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.errors import CheckpointError
from narrowgauge.optim import storage

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (ng.optim.AdamW, {}),
    "SGD": (ng.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "Lion": (ng.optim.Lion, {}),
    "Muon": (ng.optim.Muon, {}),
}
MASTER_OF = {"bf16": "8-bit residual", "scaled fp16": "none", "E4M3": "scaled fp16", "fp32": "none"}


def parameters(weight: str = "bf16") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [parameter(torch.randn(shape, generator=generator), weight) for shape in ((6, 300), (40, 8))]


def build(of: list[nn.Parameter], moments: str, master: str = "8-bit residual", kind: str = "AdamW") -> Any:
    make, options = KINDS[kind]
    m, v = MOMENTS[moments]
    formats = {"exp_avg": m, "exp_avg_sq": v} if kind == "AdamW" else {"exp_avg": m}
    return make(of, lr=1e-2, master=MASTERS[master], min_state_size=1000, **formats, **options)


def run(optimizer: Any, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in optimizer.parameters():
            p.grad_dtype = torch.float32
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


def saved_and_read(state: dict[str, Any], **options: Any) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


def assert_same_state(a: Any, b: Any) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert_same_bits(p, q)
        assert a.state[p].keys() == b.state[q].keys()
        for name, value in a.state[p].items():
            if name == "step":
                assert value == b.state[q][name] and type(b.state[q][name]) is int
            else:
                assert_same_bits(value, b.state[q][name])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moments", ["fp32", "int8 square root", "4 bits", "COAT", "FP8-LM", "int8 dynamic", "bf16"])
def test_a_loaded_state_is_the_same_and_goes_on_the_same(moments: str, kind: str) -> None:
    """Case 41: 3 steps, save, load into a fresh optimizer, 2 more, against 5 without a stop."""
    through = build(parameters(), moments, kind=kind)
    run(through, 3, seed=1)
    fresh = build([nn.Parameter(p.detach().clone()) for p in through.parameters()], moments, kind=kind)
    fresh.load_state_dict(saved_and_read(through.state_dict(), map_location="cpu"))
    assert_same_state(through, fresh)
    for p, q in zip(through.parameters(), fresh.parameters(), strict=True):  # copies, not the same memory
        for name in through.moments:
            assert through.state[p][name] is not fresh.state[q][name]
    run(through, 2, seed=2)
    run(fresh, 2, seed=2)
    assert_same_state(through, fresh)


@pytest.mark.parametrize("weight", MASTER_OF)
def test_a_state_goes_on_for_every_kind_of_weight(weight: str) -> None:
    through = build(parameters(weight), "int8 square root", MASTER_OF[weight])
    run(through, 3, seed=1)
    copies = [nn.Parameter(p.detach().clone()) for p in through.parameters()]
    fresh = build(copies, "int8 square root", MASTER_OF[weight])
    fresh.load_state_dict(saved_and_read(through.state_dict()))
    run(through, 2, seed=2)
    run(fresh, 2, seed=2)
    assert_same_state(through, fresh)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_goes_on_the_same_and_apart(kind: str, how: Any) -> None:
    original = build(parameters(), "int8 square root", kind=kind)
    original.override(next(original.parameters()), master=MASTERS["16-bit remainder"])
    original.generator = torch.Generator().manual_seed(3)
    run(original, 2, seed=1)
    twin = how(original)
    assert_same_state(original, twin)
    assert all(p is not q for p, q in zip(original.parameters(), twin.parameters(), strict=True))
    assert twin.formats == original.formats and twin.generator is not original.generator
    assert torch.equal(twin.generator.get_state(), original.generator.get_state())
    before = [p.detach().clone() for p in original.parameters()]
    run(twin, 2, seed=2)
    assert all(torch.equal(p, old) for p, old in zip(original.parameters(), before, strict=True))
    run(original, 2, seed=2)
    assert_same_state(original, twin)


def test_the_counter_of_steps_is_an_int_in_the_file() -> None:
    optimizer = build(parameters(), "int8 square root")
    run(optimizer, 3, seed=1)
    state = saved_and_read(optimizer.state_dict())
    assert [(type(entry["step"]), entry["step"]) for entry in state["state"].values()] == [(int, 3)] * 2


def test_moments_of_bfloat16_weights_stay_float32_when_loaded() -> None:
    """torch's own load_state_dict would cast them to the parameter's dtype."""
    optimizer = build(parameters(), "fp32")
    run(optimizer, 2, seed=1)
    fresh = build(parameters(), "fp32")
    fresh.load_state_dict(optimizer.state_dict())
    assert all(fresh.state[p][name].dtype is torch.float32 for p in fresh.parameters() for name in fresh.moments)


@pytest.mark.parametrize("new", MOMENTS)
@pytest.mark.parametrize("old", ["fp32", "int8 square root", "4 bits", "FP8-LM"])
def test_moments_in_other_formats_are_cast_anew(old: str, new: str) -> None:
    before, after = build(parameters(), old), build(parameters(), new)
    run(before, 3, seed=1)
    after.load_state_dict(before.state_dict())
    formats = ng.optim.StateFormats(*MOMENTS[new])
    for p, q in zip(before.parameters(), after.parameters(), strict=True):
        for name, spec in zip(before.moments, (formats.exp_avg, formats.exp_avg_sq), strict=True):
            stored = before.state[p][name]
            if p.numel() < 1000 or storage.spec_of(stored) == spec:
                assert_same_bits(after.state[q][name], stored)
            else:
                assert_same_bits(after.state[q][name], storage.encode(storage.decode(stored, p.shape), spec))
        assert after.state[q]["step"] == 3
    run(after, 1, seed=2)


def test_another_block_size_is_cast_anew() -> None:
    narrow = ng.CastSpec(ng.formats.INT8, ng.Block(1, 128), companding=ng.SQUARE_ROOT)
    p, q = nn.Parameter(torch.randn(4, 300)), nn.Parameter(torch.randn(4, 300))
    before = ng.optim.Lion([p], exp_avg=MOMENTS["int8 square root"][0], min_state_size=0)
    after = ng.optim.Lion([q], exp_avg=narrow, min_state_size=0)
    run(before, 2, seed=1)
    after.load_state_dict(before.state_dict())
    assert after.state[q]["exp_avg"].dequant_scale.shape == (4, 3)
    assert_same_bits(after.state[q]["exp_avg"], ng.quantize(before.state[p]["exp_avg"].dequantize(), narrow))


@pytest.mark.parametrize("new", MASTERS)
@pytest.mark.parametrize("old", MASTERS)
def test_a_master_of_another_kind_follows_from_the_parameter(old: str, new: str) -> None:
    before = build(parameters(), "fp32", old) if old != "none" else quiet(build, parameters(), "fp32", old)
    run(before, 3, seed=1)
    copies = [nn.Parameter(p.detach().clone()) for p in before.parameters()]
    after = build(copies, "fp32", new) if new != "none" else quiet(build, copies, "fp32", new)
    after.load_state_dict(before.state_dict())
    for p, q in zip(before.parameters(), after.parameters(), strict=True):
        assert ("master" in after.state[q]) == (new != "none")
        if old == new:
            assert torch.equal(after.full_values(q), before.full_values(p))
        else:
            assert ((after.full_values(q) - p.float()).abs() <= p.float().abs() * 2.0**-11).all()


def quiet(call: Any, *args: Any) -> Any:
    with pytest.warns(UserWarning, match="without a master"):
        return call(*args)


def test_hooks_see_the_whole() -> None:
    optimizer = build(parameters(), "int8 square root")
    run(optimizer, 2, seed=1)
    state = optimizer.state_dict()
    fresh = build(parameters(), "int8 square root")
    seen: list[Any] = []

    def before(o: Any, given: dict[str, Any]) -> dict[str, Any]:
        assert given["state"].keys() == state["state"].keys()
        for entry in given["state"].values():
            entry["step"] = 7
        return given

    fresh.register_load_state_dict_pre_hook(before)
    fresh.register_load_state_dict_post_hook(lambda o: seen.extend(o.state[p]["step"] for p in o.parameters()))
    fresh.load_state_dict(state)
    assert seen == [7, 7]
    fresh.load_state_dict(state)
    assert seen == [7, 7, 7, 7]  # the hooks are there still


def test_groups_stay_the_same_objects() -> None:
    """A scheduler, or the optimizer that ours took the place of, may hold them."""
    optimizer = build(parameters(), "fp32")
    run(optimizer, 1, seed=1)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.5
    groups, group = optimizer.param_groups, optimizer.param_groups[0]
    optimizer.load_state_dict(state)
    assert optimizer.param_groups is groups and groups[0] is group and group["lr"] == 0.5


# what does not fit


def changed(state: dict[str, Any], **entries: Any) -> dict[str, Any]:
    state = copy.deepcopy(state)
    state["state"][1].update(entries)
    return state


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"exp_avg": torch.zeros(7)}, r"expected a state 'exp_avg' of shape \[40, 8\], .* found \[7\]"),
        ({"exp_avg": torch.zeros(8, 40)}, r"of shape \[40, 8\], .* found \[8, 40\]: it belongs to another model"),
        ({"master": torch.zeros(3, dtype=torch.int8)}, r"expected a state 'master' of shape"),
        ({"max_exp_avg_sq": torch.zeros(40, 8)}, "AdamW has no state 'max_exp_avg_sq'; expected step, exp_avg"),
        ({"momentum_buffer": torch.zeros(40, 8)}, "AdamW has no state 'momentum_buffer'"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_before_anything_changed(entries: dict[str, Any], message: str) -> None:
    optimizer = build(parameters(), "int8 square root")
    run(optimizer, 2, seed=1)
    state = changed(optimizer.state_dict(), **entries)
    state["param_groups"][0]["lr"] = 0.5
    twin = copy.deepcopy(optimizer)
    with pytest.raises(CheckpointError, match=message):
        optimizer.load_state_dict(state)
    assert_same_state(optimizer, twin)
    assert optimizer.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("groups", [[2], [1, 1], [1, 2]], ids=str)
def test_other_groups_are_refused(groups: list[int]) -> None:
    optimizer = ng.optim.AdamW([{"params": [p]} for p in parameters("fp32")] + [{"params": []}])
    other = ng.optim.AdamW([{"params": [nn.Parameter(torch.zeros(1)) for _ in range(size)]} for size in groups])
    with pytest.raises(CheckpointError, match=r"expected groups of \[1, 1, 0\] parameters, .* found \["):
        optimizer.load_state_dict(other.state_dict())


# empty tensors and groups: case 46


@pytest.mark.parametrize("moments", ["fp32", "int8 square root", "4 bits", "FP8-LM", "COAT", "int8 dynamic"])
@pytest.mark.parametrize("weight", MASTER_OF)
def test_empty_parameters_and_groups_count_their_steps(weight: str, moments: str) -> None:
    def groups(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
        return [parameter(torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape), weight) for shape in shapes]

    m, v = MOMENTS[moments]
    options: Any = {"exp_avg": m, "exp_avg_sq": v, "master": MASTERS[MASTER_OF[weight]], "min_state_size": 0}
    with_empty, alone = groups((4,), (0,), (0, 16), (3, 0)), groups((4,))
    first = ng.optim.AdamW([{"params": with_empty}, {"params": []}], lr=1e-2, **options)
    second = ng.optim.AdamW(alone, lr=1e-2, **options)
    for _ in range(3):
        for p in (*with_empty, *alone):
            p.grad_dtype = torch.float32
            p.grad = torch.full(p.shape, 0.5)
        first.step()
        second.step()
    assert_same_bits(with_empty[0], alone[0])
    state = saved_and_read(first.state_dict())
    assert [state["state"][i]["step"] for i in range(4)] == [3] * 4
    fresh = ng.optim.AdamW(
        [{"params": [nn.Parameter(p.detach().clone()) for p in with_empty]}, {"params": []}], lr=1e-2, **options
    )
    fresh.load_state_dict(state)
    assert_same_state(first, fresh)


# shapes and strides: case 44


def strided(kind: str, x: Tensor) -> Tensor:
    """The values of `x` in memory of other strides."""
    if kind == "transposed":
        return x.t().contiguous().t()
    if kind == "part":
        return torch.stack([x, x], dim=-1)[..., 0]
    return torch.cat([x, x], dim=1).chunk(2, dim=1)[1]


@pytest.mark.parametrize("moments", ["fp32", "int8 square root", "4 bits", "E4M3", "COAT"])
@pytest.mark.parametrize("layout", ["transposed", "part", "chunk"])
@pytest.mark.parametrize(("weight", "master"), [("fp32", "none"), ("bf16", "8-bit residual"), ("bf16", "fp32"),
                                                ("bf16", "16-bit remainder"), ("bf16", "none")])  # fmt: skip
def test_strides_change_no_bit(weight: str, master: str, layout: str, moments: str) -> None:
    m, v = MOMENTS[moments]
    x = torch.randn(64, 32).to(torch.bfloat16 if weight == "bf16" else torch.float32)
    p, q = nn.Parameter(strided(layout, x)), nn.Parameter(x.clone())
    assert not p.is_contiguous() and p.is_leaf
    pointer, strides = p.data_ptr(), p.stride()
    options: Any = {"exp_avg": m, "exp_avg_sq": v, "master": MASTERS[master], "min_state_size": 0,
                    "stochastic_rounding": master == "none"}  # fmt: skip
    first = ng.optim.AdamW([p], lr=1e-2, generator=torch.Generator().manual_seed(0), **options)
    second = ng.optim.AdamW([q], lr=1e-2, generator=torch.Generator().manual_seed(0), **options)
    for step in range(3):
        grad = torch.randn(64, 32).to(p.dtype)
        p.grad = [strided("chunk", grad), strided("transposed", grad), grad[:1].expand(64, 32)][step]
        q.grad = p.grad.contiguous()
        first.step()
        second.step()
    assert torch.equal(p, q)
    assert (p.data_ptr(), p.stride()) == (pointer, strides)
    for name in ("exp_avg", "exp_avg_sq"):
        assert_same_bits(first.state[p][name], second.state[q][name])
    if "master" in first.state[p]:
        assert_same_bits(first.state[p]["master"], second.state[q]["master"])
