"""Recipes from TransformerEngine's: every field acts, or is refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformer_engine_like as te
from torch import Tensor, nn
from transformer_engine_like import Format, MMParams, QParams

import narrowgauge as ng
from narrowgauge.numerics.scaling import roll
from narrowgauge.recipes.compat import transformer_engine as compat
from narrowgauge.recipes.compat.options import fields_of

E4M3FN, E5M2 = ng.formats.E4M3FN, ng.formats.E5M2
BLOCK = {"granularity": ng.Block(1, 128), "scale": ng.CURRENT_POW2}
SQUARE = {"granularity": ng.Block(128, 128), "scale": ng.CURRENT_POW2}
from_te = ng.recipes.from_transformer_engine


def with_attribute(recipe: Any, name: str, value: Any) -> Any:
    setattr(recipe, name, value)
    return recipe


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (te.DelayedScaling(), ng.DelayedScaling()),
        (te.Float8CurrentScaling(), ng.recipe("fp8_current")),
        (te.Float8BlockScaling(), ng.recipe("fp8_block")),
        (te.MXFP8BlockScaling(), ng.recipe("mxfp8")),
        (te.NVFP4BlockScaling(), ng.recipe("nvfp4", first_last=0)),
    ],
)
def test_defaults_are_recipes_of_ours(theirs: Any, ours: ng.Recipe) -> None:
    assert from_te(theirs) == ours
    assert from_te({}, kind=type(theirs).__name__) == ours


@pytest.mark.parametrize("kind", compat.RECIPES)
def test_the_options_are_its_fields_with_its_defaults(kind: str) -> None:
    fields = fields_of(getattr(te, kind)())
    options = compat.RECIPES[kind]
    assert set(options) - set(fields) == ({"interval", "override_linear_precision"} if "Delayed" in kind else set())
    assert set(fields) <= set(options)
    for name, value in fields.items():
        if not dataclasses.is_dataclass(value):
            assert options[name].default == getattr(value, "name", value), name
    for options, params in ((compat.QUANT, QParams), (compat.MATMUL, MMParams)):
        assert {field.name for field in dataclasses.fields(params)} == set(options)


DELAYED = [
    ({"margin": 2}, {"margin": 2}),
    ({"fp8_format": Format.E4M3}, {"fp8_format": "E4M3"}),
    ({"amax_history_len": 16}, {"amax_history_len": 16}),
    ({"amax_compute_algo": "most_recent"}, {"amax_compute_algo": "most_recent"}),
    ({"interval": 4}, {"interval": 4}),
    ({"override_linear_precision": (False, True, False)}, {"override_linear_precision": (False, True, False)}),
    ({"reduce_amax": True, "fp8_dpa": False, "fp8_mha": False, "backward_override": None}, {}),
]


@pytest.mark.parametrize(("fields", "ours"), DELAYED)
def test_fields_of_delayed_scaling(fields: dict[str, Any], ours: dict[str, Any]) -> None:
    assert from_te(fields, "DelayedScaling") == ng.DelayedScaling(**ours)
    recipe = te.DelayedScaling()
    for name, value in fields.items():  # interval and override_linear_precision: as objects of 1.x have them
        setattr(recipe, name, value)
    assert from_te(recipe) == ng.DelayedScaling(**ours)


def mean_of_the_newest_two(history: Tensor) -> Tensor:
    assert history.ndim == 2  # [history, tensors], as TransformerEngine calls it
    return history[:2].mean(dim=0)


def test_an_amax_function_sees_histories_as_transformer_engine_gives_them() -> None:
    recipe = from_te(te.DelayedScaling(amax_history_len=4, amax_compute_algo=mean_of_the_newest_two))
    assert recipe == from_te({"amax_history_len": 4, "amax_compute_algo": mean_of_the_newest_two}, "DelayedScaling")
    assert "mean_of_the_newest_two" in str(recipe)
    algorithm = recipe.input.scale.algorithm
    assert algorithm(torch.tensor([4.0, 2.0, 100.0, 100.0])).item() == 3.0
    rule = recipe.input.scale
    _, scale = roll(torch.tensor([6.0, 2.0, 0.0, 0.0]), torch.tensor(1.0), E4M3FN, rule, rolls_before=0)
    assert scale.item() == E4M3FN.max / 4.0


CURRENT = [
    (te.Float8CurrentScaling(fp8_format=Format.E4M3), ng.recipe("fp8_current", fp8_format="E4M3")),
    (te.Float8CurrentScaling(use_power_2_scales=True), (True, True, True)),
    (with_attribute(te.Float8CurrentScaling(), "fp8_quant_fwd_inp", QParams(True)), (True, False, False)),
    (with_attribute(te.Float8CurrentScaling(), "fp8_quant_fwd_weight", QParams(True)), (False, True, False)),
    (with_attribute(te.Float8CurrentScaling(), "fp8_quant_bwd_grad", QParams(True)), (False, False, True)),
    (te.Float8CurrentScaling(fp8_gemm_fprop=MMParams(True)), (False, False, False)),
    (te.Float8CurrentScaling(fp8_gemm_dgrad=MMParams(False)), (False, False, False)),
    (te.Float8CurrentScaling(fp8_gemm_wgrad=MMParams(False)), (False, False, False)),
]


@pytest.mark.parametrize(("theirs", "ours"), CURRENT)
def test_fields_of_current_scaling(theirs: Any, ours: Any) -> None:
    if isinstance(ours, tuple):
        formats = {"input": E4M3FN, "weight": E4M3FN, "grad_output": E5M2}
        rules = {True: ng.CURRENT_POW2, False: ng.CURRENT}
        casts = {
            role: ng.CastSpec(fmt, scale=rules[pow2]) for (role, fmt), pow2 in zip(formats.items(), ours, strict=True)
        }
        ours = ng.recipe("fp8_current", **casts)
    assert from_te(theirs) == ours


BLOCKS = [
    ({"fp8_format": Format.HYBRID}, {"grad_output": ng.CastSpec(E5M2, **BLOCK)}),
    ({"x_block_scaling_dim": 2, "w_block_scaling_dim": 1},
     {"input": ng.CastSpec(E4M3FN, **SQUARE), "weight": ng.CastSpec(E4M3FN, **BLOCK)}),
    ({"grad_block_scaling_dim": 2}, {"grad_output": ng.CastSpec(E4M3FN, **SQUARE)}),
    ({"w_block_scaling_dim": 1}, {"weight": ng.CastSpec(E4M3FN, **BLOCK)}),
    ({"fp8_quant_bwd_grad": {"power_2_scale": False}},
     {"grad_output": ng.CastSpec(E4M3FN, ng.Block(1, 128), ng.CURRENT)}),
    ({"fp8_quant_fwd_inp": {"power_2_scale": True}}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "ours"), BLOCKS)
def test_fields_of_block_scaling(fields: dict[str, Any], ours: dict[str, ng.CastSpec]) -> None:
    assert from_te(fields, "Float8BlockScaling") == ng.recipe("fp8_block", **ours)


def test_float32_scales_of_blocks() -> None:
    assert from_te(te.Float8BlockScaling(use_f32_scales=True)) == ng.recipe("fp8_block", scale=ng.CURRENT)
    theirs = with_attribute(te.Float8BlockScaling(), "fp8_quant_fwd_weight", QParams(power_2_scale=False))
    weight = ng.CastSpec(E4M3FN, ng.Block(128, 128), ng.CURRENT)
    assert from_te(theirs) == ng.recipe("fp8_block", weight=weight)


def test_fields_of_mxfp8() -> None:
    assert from_te(te.MXFP8BlockScaling(fp8_format=Format.HYBRID)) == ng.recipe("mxfp8", fp8_format="HYBRID")


NVFP4 = [
    ({"disable_rht": True}, {"hadamard": False}),
    ({"disable_stochastic_rounding": True}, {"stochastic": False}),
    ({"nvfp4_4over6_e4m3_use_256": "none", "nvfp4_4over6_err_mode": "MSE"}, {}),
    ({"fp4_format": Format.E2M1, "fp8_format": Format.E4M3}, {}),
]


@pytest.mark.parametrize(("fields", "ours"), NVFP4)
def test_fields_of_nvfp4(fields: dict[str, Any], ours: dict[str, Any]) -> None:
    expected = ng.recipe("nvfp4", first_last=0, **ours)
    assert from_te(te.NVFP4BlockScaling(**fields)) == expected == from_te(fields, "NVFP4BlockScaling")


def test_nvfp4_without_square_blocks() -> None:
    recipe = from_te(te.NVFP4BlockScaling(disable_2d_quantization=True))
    assert recipe.weight == ng.CastSpec(ng.formats.E2M1FN, ng.Block(1, 16), ng.NVFP4)
    assert recipe == ng.recipe("nvfp4", first_last=0, weight=recipe.weight)


@pytest.mark.parametrize("kind", [kind for kind in compat.RECIPES if kind != "DelayedScaling"])
def test_a_backward_in_high_precision_has_the_gradients_of_float32_products(kind: str) -> None:
    recipe = from_te(getattr(te, kind)(backward_override="high_precision"))
    assert recipe.override_linear_precision == (False, True, True)
    layer = nn.Linear(64, 32, bias=False)
    weight = layer.weight.detach().clone()
    ng.prepare(nn.Sequential(layer), None, recipe.replace(compute="fp32"))
    x, g = torch.randn(16, 64, requires_grad=True), torch.randn(16, 32)
    y = layer(x)
    y.backward(g)
    assert not torch.allclose(y, x @ weight.T, rtol=1e-3)
    assert x.grad is not None and layer.weight.grad is not None
    assert torch.allclose(x.grad, g @ weight, rtol=1e-5, atol=1e-5)
    assert torch.allclose(layer.weight.grad, g.T @ x.detach(), rtol=1e-5, atol=1e-5)


def test_the_class_of_a_mapping_follows_from_its_fields_where_only_one_has_them() -> None:
    assert from_te({"amax_history_len": 16}) == ng.DelayedScaling(amax_history_len=16)
    assert from_te({"disable_rht": True, "fp8_format": "E4M3"}).hadamard is None
    with pytest.raises(ng.RecipeError, match="say which with kind=, one of DelayedScaling, MXFP8BlockScaling$"):
        from_te({"margin": 0})
    with pytest.raises(ng.RecipeError, match="no recipe has all the options amax_history_len, disable_rht: give"):
        from_te({"amax_history_len": 16, "disable_rht": True})


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (te.DelayedScaling(fp8_format=Format.E5M2), "fp8_format='E5M2' cannot be honoured: expected 'HYBRID' or"),
        (te.DelayedScaling(scaling_factor_compute_algo=max), "scaling_factor_compute_algo=.* cannot be honoured"),
        (te.DelayedScaling(reduce_amax=False), "reduce_amax=False .* drift apart"),
        (te.DelayedScaling(fp8_dpa=True), "fp8_dpa=True .* attention is not quantized"),
        (te.DelayedScaling(fp8_mha=True), "fp8_mha=True .* attention is not quantized"),
        (te.DelayedScaling(backward_override="high_precision"), "use override_linear_precision="),
        (te.DelayedScaling(amax_compute_algo="maximum"), "amax_compute_algo='maximum'"),
        (te.DelayedScaling(margin="1"), "margin='1'"),
        (te.DelayedScaling(amax_history_len=0), "amax_history_len=0"),
        (with_attribute(te.DelayedScaling(), "amax_histroy_len", 8), "unknown option 'amax_histroy_len'; did you mean"),
        (te.Float8CurrentScaling(backward_override="dequantized"), "'dequantized' .* high_precision multiplies exact"),
        (with_attribute(te.Float8CurrentScaling(), "fp8_quant_fwd_inp", QParams(amax_epsilon=0.5)), "amax_epsilon=0.5"),
        (with_attribute(te.Float8CurrentScaling(), "fp8_quant_bwd_grad", QParams(stochastic_rounding=True)),
         "fp8_quant_bwd_grad: stochastic_rounding=True cannot be honoured: it is for NVFP4"),
        (with_attribute(te.Float8CurrentScaling(), "fp8_quant_fwd_inp", QParams(random_hadamard_transform=True)),
         "random_hadamard_transform=True cannot"),
        (with_attribute(te.Float8BlockScaling(), "fp8_quant_fwd_weight", QParams(fp4_2d_quantization=True)),
         "fp4_2d_quantization=True cannot"),
        (te.Float8BlockScaling(w_block_scaling_dim=3), "w_block_scaling_dim=3 cannot be honoured: expected 1 or 2"),
        (te.MXFP8BlockScaling(margin=1), "margin=1 .* does nothing in TransformerEngine either"),
        (te.NVFP4BlockScaling(row_scaled_activation=True), "row_scaled_activation=True"),
        (te.NVFP4BlockScaling(nvfp4_4over6="weights"), "nvfp4_4over6='weights' cannot"),
        (te.NVFP4BlockScaling(nvfp4_4over6_err_mode="MAX"), "nvfp4_4over6_err_mode='MAX' cannot"),
        (te.NVFP4BlockScaling(fp8_format=Format.HYBRID), "fp8_format='HYBRID' cannot be honoured: expected 'E4M3'"),
        (with_attribute(te.NVFP4BlockScaling(), "fp4_quant_bwd_grad", QParams()),
         "fp4_quant_bwd_grad: random_hadamard_transform=False cannot .* expected True, as the disable_ flags say"),
        (with_attribute(te.NVFP4BlockScaling(), "fp4_quant_fwd_inp", QParams(random_hadamard_transform=True,
         stochastic_rounding=True)), "fp4_quant_fwd_inp: stochastic_rounding=True cannot"),
        (te.MXFP4QATMXFP8BlockScaling(), "found MXFP4QATMXFP8BlockScaling; "),
        (te.MMParams(), "expected a mapping of fields, with kind, or one of its configurations, found MMParams"),
        ({"disable_rth": True}, "no recipe has an option 'disable_rth'; did you mean 'disable_rht'"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(theirs: Any, message: str) -> None:
    with pytest.raises(ng.RecipeError, match=message):
        from_te(theirs)


def test_a_kind_that_is_none() -> None:
    with pytest.raises(ng.RecipeError, match="unknown recipe 'DelayedScalling'; did you mean 'DelayedScaling'"):
        from_te({}, "DelayedScalling")
    with pytest.raises(ng.RecipeError, match=r"unknown recipe '\['DelayedScaling'\]'"):
        from_te({}, ["DelayedScaling"])  # type: ignore[arg-type]
    with pytest.raises(ng.RecipeError, match="DelayedScaling: unknown option 'disable_rht'"):
        from_te({"disable_rht": True}, "DelayedScaling")
