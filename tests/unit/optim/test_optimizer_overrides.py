"""Formats of single parameters, asked for before an optimizer is built or after, and the threshold of small ones."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from state_formats import MASTERS, MOMENTS, SCALED_FP16, assert_same_bits
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import NarrowgaugeError, RecipeError
from narrowgauge.numerics.formats import FP32
from narrowgauge.tensors.packed import PackedTensor

INT8_MOMENTS = dict(zip(("exp_avg", "exp_avg_sq"), MOMENTS["int8 square root"], strict=True))
INT4_MOMENTS = dict(zip(("exp_avg", "exp_avg_sq"), MOMENTS["4 bits"], strict=True))


class Two(nn.Module):
    """Two weights of 8192 values, and a bias of 10."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False)
        self.bias = nn.Parameter(torch.zeros(10))


def build(model: nn.Module, **options: Any) -> ng.optim.AdamW:
    return ng.optim.AdamW(model.named_parameters(), lr=1e-3, **options)


def step(optimizer: ng.optim.LowPrecisionOptimizer, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in optimizer.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    optimizer.step()


def kinds(optimizer: ng.optim.LowPrecisionOptimizer) -> list[str]:
    """What exp_avg is kept as, of each parameter."""
    stored = [optimizer.state[p]["exp_avg"] for p in optimizer.parameters()]
    return [m.spec.format.name if isinstance(m, ng.QuantizedTensor | PackedTensor) else str(m.dtype) for m in stored]


def on_the_parameter(model: Two) -> ng.optim.AdamW:
    ng.optim.override(model.first.weight, **INT8_MOMENTS)
    return build(model)


def on_the_parameter_late(model: Two) -> ng.optim.AdamW:
    optimizer = build(model)
    step(optimizer)
    ng.optim.override(model.first.weight, **INT8_MOMENTS)
    return optimizer


def at_construction(model: Two) -> ng.optim.AdamW:
    return build(model, overrides={"first.*": INT8_MOMENTS})


def after_construction(model: Two) -> ng.optim.AdamW:
    optimizer = build(model)
    optimizer.override("first.weight", **INT8_MOMENTS)
    return optimizer


def of_the_parameter_after_steps(model: Two) -> ng.optim.AdamW:
    optimizer = build(model)
    step(optimizer)
    optimizer.override(model.first.weight, **INT8_MOMENTS)
    return optimizer


ORDERS: list[Callable[[Two], ng.optim.AdamW]] = [
    on_the_parameter, on_the_parameter_late, at_construction, after_construction, of_the_parameter_after_steps,
]  # fmt: skip


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_an_override_holds_whatever_the_order(order: Callable[[Two], ng.optim.AdamW]) -> None:
    """Case 43."""
    optimizer = order(Two())
    step(optimizer)
    assert sorted(kinds(optimizer)) == sorted(["INT8", "torch.float32", "torch.float32"])
    first = next(p for p in optimizer.parameters() if optimizer.name_of(p) == "first.weight")
    for role, spec in INT8_MOMENTS.items():
        assert optimizer.state[first][role].spec.format == spec.format
    assert optimizer.state[first]["exp_avg_sq"].spec.rounding is ng.NONZERO


def test_state_that_is_there_is_cast_anew() -> None:
    model = Two()
    optimizer = build(model)
    step(optimizer)
    wide = optimizer.state[model.first.weight]["exp_avg"].clone()
    optimizer.override("first.*", **INT8_MOMENTS)
    assert_same_bits(optimizer.state[model.first.weight]["exp_avg"], ng.quantize(wide, INT8_MOMENTS["exp_avg"]))
    assert optimizer.state[model.first.weight]["step"] == 1


@pytest.mark.parametrize("size", [4095, 4096])
def test_parameters_below_the_threshold_keep_float32_moments(size: int) -> None:
    p = nn.Parameter(torch.randn(size))
    optimizer = ng.optim.AdamW([p], **INT8_MOMENTS)
    step(optimizer)
    assert kinds(optimizer) == (["torch.float32"] if size < 4096 else ["INT8"])


def test_the_threshold_can_be_changed_and_an_override_goes_over_it() -> None:
    model = Two()
    optimizer = build(model, **INT8_MOMENTS, min_state_size=10_000)
    optimizer.override("bias", **INT4_MOMENTS)
    step(optimizer)
    assert dict(zip((optimizer.name_of(p) for p in optimizer.parameters()), kinds(optimizer), strict=True)) == {
        "bias": "INT4", "first.weight": "torch.float32", "second.weight": "torch.float32",
    }  # fmt: skip
    optimizer.override("second*", min_state_size=4096)
    assert "INT8" in kinds(optimizer)


def test_later_overrides_go_over_earlier_ones() -> None:
    model = Two()
    ng.optim.override(model.second.weight, **INT4_MOMENTS)
    ng.optim.override(model.second.weight, exp_avg_sq=SCALED_FP16)
    optimizer = build(model, overrides={"*": INT8_MOMENTS, "first.*": {"exp_avg": ng.CastSpec(FP32)}})
    step(optimizer)
    assert optimizer.state[model.first.weight]["exp_avg"].dtype is torch.float32
    assert optimizer.state[model.first.weight]["exp_avg_sq"].spec.format.name == "UINT8"
    assert optimizer.state[model.second.weight]["exp_avg"].spec.format.name == "INT8"  # the optimizer's own go over
    alone = build(model)
    step(alone)
    assert alone.state[model.second.weight]["exp_avg"].spec.format.name == "INT4"
    assert alone.state[model.second.weight]["exp_avg_sq"].spec.format.name == "FP16"


def test_a_master_of_another_kind_keeps_the_digits() -> None:
    p = nn.Parameter(torch.randn(8, 16).bfloat16())
    optimizer = ng.optim.AdamW([("w", p)], lr=1e-3, master=MASTERS["16-bit remainder"])
    for seed in range(3):
        step(optimizer, seed)
    values = optimizer.full_values(p)
    assert not torch.equal(values, p.float())
    for master, unit in (("fp32", 0.0), ("8-bit residual", 2.0**-16), ("fp32", 0.0), ("scaled fp16", 2.0**-11)):
        optimizer.override("w", master=MASTERS[master])
        torch.testing.assert_close(optimizer.full_values(p), values, rtol=unit * 1.01, atol=0)
        values = optimizer.full_values(p)
        assert torch.equal(p, values.bfloat16())
    optimizer.override(p, master=None, stochastic_rounding=True)
    assert "master" not in optimizer.state[p]


@pytest.mark.parametrize("which", ["head.*", "First.weight", ""])
def test_a_glob_that_matches_nothing_is_refused(which: str) -> None:
    with pytest.raises(NarrowgaugeError, match=f"found '{which}' matches none of its names".replace("*", r"\*")):
        build(Two()).override(which, **INT8_MOMENTS)
    with pytest.raises(NarrowgaugeError, match="matches none of its names"):
        build(Two(), overrides={which: INT8_MOMENTS})


def test_a_parameter_of_another_model_is_refused() -> None:
    with pytest.raises(NarrowgaugeError, match="found that is none of them"):
        build(Two()).override(nn.Parameter(torch.zeros(3)), **INT8_MOMENTS)
    with pytest.raises(NarrowgaugeError, match="expected a parameter, found 'first.weight'"):
        ng.optim.override("first.weight", **INT8_MOMENTS)  # type: ignore[arg-type]


def test_unknown_fields_are_refused_before_anything_changes() -> None:
    model = Two()
    optimizer = build(model)
    for override in (lambda **f: optimizer.override("first.*", **f), lambda **f: ng.optim.override(model.bias, **f)):
        with pytest.raises(RecipeError, match="unknown state format 'exp_average'.*did you mean 'exp_avg'"):
            override(exp_average=INT8_MOMENTS["exp_avg"])
        with pytest.raises(RecipeError, match="exp_avg=.*has no negative values"):
            override(exp_avg=INT8_MOMENTS["exp_avg_sq"])
        with pytest.raises(RecipeError, match="min_state_size=-1: expected"):
            override(min_state_size=-1)
    step(optimizer)
    assert kinds(optimizer) == ["torch.float32"] * 3


def test_a_moment_that_the_optimizer_has_not_is_refused() -> None:
    p = nn.Parameter(torch.zeros(4, 4))
    for kind in (ng.optim.Lion, ng.optim.Muon):
        optimizer = kind([("w", p)])
        with pytest.raises(NarrowgaugeError, match=f"'w' has no exp_avg_sq under {kind.__name__}, which keeps exp_avg"):
            optimizer.override("w", exp_avg_sq=SCALED_FP16)
        with pytest.raises(TypeError, match="exp_avg_sq"):
            kind([p], exp_avg_sq=SCALED_FP16)  # type: ignore[call-arg]
    with pytest.raises(NarrowgaugeError, match="'w' has no exp_avg under SGD, which keeps no moment"):
        ng.optim.SGD([("w", p)]).override("w", exp_avg=SCALED_FP16)
    with pytest.raises(NarrowgaugeError, match="SGD with momentum=0 has no state to keep so"):
        ng.optim.SGD([p], exp_avg=SCALED_FP16)
    ng.optim.SGD([{"params": [p], "momentum": 0.9}], exp_avg=SCALED_FP16)
    ng.optim.override(p, exp_avg_sq=SCALED_FP16)
    with pytest.raises(NarrowgaugeError, match="has no exp_avg_sq under Lion"):
        ng.optim.Lion([p])
    ng.optim.AdamW([p])


def test_names_follow_the_order_of_groups() -> None:
    model = Two()
    named = dict(model.named_parameters())
    optimizer = ng.optim.AdamW(
        [
            {"params": [("bias", named["bias"])]},
            {"params": [(n, p) for n, p in named.items() if n != "bias"]},
        ]
    )
    assert [optimizer.name_of(p) for p in optimizer.parameters()] == ["bias", "first.weight", "second.weight"]
    unnamed = ng.optim.AdamW([{"params": [model.bias]}, {"params": [model.first.weight]}])
    assert unnamed.name_of(model.first.weight) == "parameter 0 of group 1"
    with pytest.raises(NarrowgaugeError, match="expected a parameter of this optimizer"):
        unnamed.name_of(model.second.weight)


def test_an_override_by_glob_holds_for_groups_that_are_added_later() -> None:
    model = Two()
    optimizer = ng.optim.AdamW([("first.weight", model.first.weight)], overrides={"*.weight": INT8_MOMENTS})
    optimizer.add_param_group({"params": [("second.weight", model.second.weight)]})
    step(optimizer)
    assert kinds(optimizer) == ["INT8", "INT8"]


def test_a_parameter_that_takes_the_place_of_another_has_its_overrides() -> None:
    model = Two()
    optimizer = build(model)
    optimizer.override(model.first.weight, **INT8_MOMENTS)
    step(optimizer)
    new = nn.Parameter(torch.zeros(128, 64))
    old = model.first.weight
    optimizer.hand_over(old, new)
    group = optimizer.param_groups[0]
    group["params"][:] = [new if p is old else p for p in group["params"]]
    assert old not in optimizer.state
    step(optimizer)
    assert optimizer.state[new]["exp_avg"].spec == INT8_MOMENTS["exp_avg"]


@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_a_copy_of_an_optimizer_has_the_overrides(how: Callable[[Any], Any]) -> None:
    model = Two()
    ng.optim.override(model.first.weight, **INT8_MOMENTS)
    optimizer = build(model)
    optimizer.override(model.second.weight, **INT4_MOMENTS)
    step(optimizer)
    twin = how(optimizer)
    step(twin)
    assert sorted(kinds(twin)) == sorted(kinds(optimizer)) == ["INT4", "INT8", "torch.float32"]


@pytest.mark.parametrize("before", [True, False], ids=["before prepare", "after prepare"])
def test_an_override_holds_in_a_prepared_model(before: bool) -> None:
    """narrow8 replaces torch's optimizer, and the weights."""
    model = Two()
    wide = {"exp_avg": ng.CastSpec(FP32), "exp_avg_sq": SCALED_FP16}
    if before:
        ng.optim.override(model.first.weight, **wide)
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters()), "narrow8")
    if not before:
        optimizer.override("first.*", **wide)
    (model.first.weight.float().sum() + model.second.weight.float().sum() + model.bias.float().sum()).backward()
    optimizer.step()
    state = optimizer.state[model.first.weight]
    assert state["exp_avg"].dtype is torch.float32 and state["exp_avg_sq"].spec.format.name == "FP16"
    assert optimizer.state[model.second.weight]["exp_avg"].spec.format.name == "INT8"
    assert optimizer.state[model.bias]["exp_avg"].dtype is torch.float32
    model, again = ng.prepare(model, optimizer, "fp8_lm_o2")  # another recipe; what was asked for by name stays
    assert again.state[model.first.weight]["exp_avg"].dtype is torch.float32
    assert again.state[model.second.weight]["exp_avg"].spec.format.name == "E4M3FN"
