"""Conversion by every recipe: what stays as it is, which layers run quantized, and sizes of any kind."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from states import assert_same_state, state_of
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import narrowgauge as ng
from narrowgauge.layers.linear import Linear
from narrowgauge.layers.report import CONVERTED, KEPT, SKIPPED

QUANTIZED = [name for name in ng.recipe_names() if ng.recipe(name).quantizes_gemms]


class OwnForward(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Model(nn.Module):
    """Plain layers, one of them under two names, and what cannot be converted."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.Sequential(
            nn.LayerNorm(32, elementwise_affine=False), nn.LayerNorm(32, bias=False), nn.RMSNorm(32)
        )
        self.first = nn.Linear(32, 32, bias=False)
        self.own, self.computed = OwnForward(32, 32), weight_norm(nn.Linear(32, 32))
        self.twice = nn.Linear(32, 32)
        self.again = self.twice
        self.lm_head = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.again(self.twice(self.computed(self.own(self.first(self.norms(x)))))))


@pytest.mark.parametrize("name", QUANTIZED)
def test_what_is_converted_what_is_not_and_that_twice_is_once(name: str) -> None:  # cases 57, 59
    model, recipe = Model(), ng.recipe(name, first_last=0)
    plain, calls = copy.deepcopy(model), []
    keys, parameters = list(model.state_dict()), list(model.parameters())
    model.twice.register_forward_hook(lambda *_: calls.append("forward"))
    model.twice.weight.register_hook(lambda _: calls.append("gradient"))
    report = ng.convert(model, recipe)
    rows = {row.name: row for row in report if not row.name.startswith(("norms", "computed."))}
    assert {row_name: row.status for row_name, row in rows.items()} == {
        "first": CONVERTED, "own": SKIPPED, "computed": SKIPPED, "twice": CONVERTED, "lm_head": KEPT,
    }  # fmt: skip
    assert recipe.input is not None
    for layer in ("first", "twice"):
        tile = f" {recipe.input.granularity!s}".removesuffix(" blocks") if recipe.input.in_blocks else ""
        assert f"; {recipe.input.format}{tile}" in rows[layer].reason  # the report says what it runs in
        assert getattr(model, layer).training_casts.input == recipe.input
    assert model.again is model.twice and type(model.own) is OwnForward
    assert [key for key in model.state_dict() if "amax" not in key and "scale" not in key] == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    x = torch.randn(16, 32)
    assert torch.equal(model.norms(x), plain.norms(x))
    model(x).float().square().sum().backward()
    assert sorted(calls) == ["forward", "forward", "gradient"]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    # what ran was quantized: E4M3's error is 3 to 4 percent, and no format here has less
    off = (model.first(x) - plain.first(x)).norm() / plain.first(x).norm()
    assert 0.02 < off < 0.4
    before = state_of(model)
    ng.convert(model, recipe)
    assert_same_state(before, state_of(model))


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_root_layer_is_converted_in_place(name: str) -> None:  # case 59
    layer = nn.Linear(64, 48)
    weight = layer.weight
    model, _ = ng.prepare(layer, None, ng.recipe(name, first_last=0))
    assert model is layer and type(model) is Linear
    assert (model.weight is weight) is not ng.recipe(name).param.is_scaled  # a scale makes it another object
    assert ng.report(model)[""].status == CONVERTED


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize(("k", "n"), [(1, 1), (1, 40), (17, 1), (5, 7), (130, 33)])
def test_tiles_larger_than_a_layer_and_sizes_of_one_are_ragged_tiles(name: str, k: int, n: int) -> None:
    layer = nn.Linear(k, n)
    plain = copy.deepcopy(layer)
    ng.convert(layer, ng.recipe(name, first_last=0, min_size=0))
    for rows in (1, 3, 20):
        # of one magnitude, so that a delayed scale fits
        x = (torch.randn(rows, k).sign() * (1 + torch.rand(rows, k) / 2)).requires_grad_()
        y = layer(x)
        y.square().sum().backward()
        assert y.shape == (rows, n) and x.grad is not None and x.grad.isfinite().all()
        wanted = plain(x)
        # values of 4 bits are up to a quarter off, and both operands are
        assert (y - wanted).norm() <= 0.6 * ((x.detach().abs() @ plain.weight.abs().t()).norm() + 1e-6)
    assert layer.weight.grad is not None and layer.weight.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize(("k", "n"), [(0, 32), (32, 0)])
def test_sizes_of_zero_are_kept_with_the_reason_or_give_empty_products(name: str, k: int, n: int) -> None:
    model = nn.ModuleDict({"empty": nn.Linear(k, n), "full": nn.Linear(32, 32)})
    kept = ng.convert(model, ng.recipe(name, first_last=0))["empty"]
    assert kept.status == KEPT and f"0 {'inputs' if k == 0 else 'outputs'}: below min_size=16" in kept.reason
    ng.convert(model, ng.recipe(name, first_last=0, min_size=0))
    x = torch.randn(4, k, requires_grad=True)
    y = model["empty"](x)
    y.sum().backward()
    assert y.shape == (4, n) and x.grad is not None and x.grad.shape == x.shape
    assert torch.equal(y, model["empty"].bias.expand(4, n))


def test_smoothing_concerns_the_layers_that_are_named_and_quantized_in_training_and_evaluation() -> None:
    model = nn.ModuleDict({name: nn.Linear(32, 32) for name in ("up", "down", "last_down")})
    recipe = ng.recipe("fp8_delayed", smooth="*down", first_last=(0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ng.convert(model, recipe)
    smoothed = {name: (layer.training_casts.smooth, layer.evaluation_casts.smooth) for name, layer in model.items()}
    assert smoothed == {"up": (False, False), "down": (True, True), "last_down": (False, False)}
    ng.convert(model, recipe.replace(evaluation="E4M3"))
    assert model["down"].evaluation_casts.smooth and not model["up"].evaluation_casts.smooth
    ng.convert(model, recipe.replace(smooth=()))
    assert not model["down"].training_casts.smooth


def test_evaluation_in_one_format_takes_one_cast_of_the_weight() -> None:
    layer = nn.Linear(32, 32)
    ng.convert(layer, ng.recipe("fp8_rowwise_gw_hp", evaluation="E4M3"))
    assert layer.training_casts.weight_for_grad_input == ng.recipe("fp8_rowwise_gw_hp").weight_for_grad_input
    casts = layer.evaluation_casts
    assert (casts.input, casts.weight, casts.weight_for_grad_input) == (*[ng.CastSpec(ng.formats.E4M3FN)] * 2, None)
    assert casts.in_compute == (False, False, False)


def test_the_report_says_tiles_transform_rounding_and_smoothing():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    ng.convert(model, ng.recipe("nvfp4", first_last=0, smooth=("1",)))
    first, second = (row.reason for row in ng.report(model).rows)
    operands = "E2M1FN 1x16 NVFP4 x E2M1FN 16x16 NVFP4, grad_output E2M1FN 1x16 NVFP4"
    assert f"{operands}, grad_output rounded stochastically, Hadamard transform in grad_weight; this CPU" in first
    assert "Hadamard transform in grad_weight, smoothed input; this CPU" in second
    ng.convert(model, "mxfp8")
    assert "E4M3FN 1x32 E8M0 x E4M3FN 1x32 E8M0, grad_output" in ng.report(model).rows[0].reason
