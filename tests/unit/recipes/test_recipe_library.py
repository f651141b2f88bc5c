"""The named recipes, their options, and the errors for names that do not exist."""

import inspect

import pytest
import torch

import narrowgauge as ng
from narrowgauge.numerics.formats import BF16, E2M1FN, E3M2FN, E4M3FN, E5M2, FP16, FP32
from narrowgauge.numerics.scaling import roll
from narrowgauge.recipes import library
from narrowgauge.recipes.spec import OPERAND_ROLES

NAMES = [
    "fp32", "tf32", "bf16", "bf16_pure", "fp16", "fp16_pure", "fp8_current", "fp8_delayed", "fp8_rowwise",
    "fp8_rowwise_gw_hp", "fp8_block", "mxfp8", "mxfp6", "mxfp4", "nvfp4", "fp8_lm_o1", "fp8_lm_o2", "fp8_lm_o3",
    "narrow8", "narrow8_sr",
]  # fmt: skip


def operand_formats(recipe):
    return tuple(spec and spec.format for spec in (getattr(recipe, role) for role in OPERAND_ROLES))


def test_names_and_functions_agree():
    assert ng.recipe_names() == NAMES
    for name in NAMES:
        assert ng.recipe(name) == getattr(library, name)()
        assert ng.recipe(name).name == name
        assert getattr(library, name).__doc__


@pytest.mark.parametrize(
    ("name", "compute", "operands"),
    [
        ("fp32", FP32, (None, None, None)),
        ("tf32", FP32, (None, None, None)),
        ("bf16", BF16, (None, None, None)),
        ("fp16", FP16, (None, None, None)),
        ("fp16_pure", FP16, (None, None, None)),
        ("fp8_current", "auto", (E4M3FN, E4M3FN, E5M2)),
        ("fp8_delayed", "auto", (E4M3FN, E4M3FN, E5M2)),
        ("bf16_pure", BF16, (None, None, None)),
        ("fp8_rowwise", "auto", (E4M3FN, E4M3FN, E4M3FN)),
        ("fp8_rowwise_gw_hp", "auto", (E4M3FN, E4M3FN, E4M3FN)),
        ("fp8_block", "auto", (E4M3FN, E4M3FN, E4M3FN)),
        ("mxfp8", "auto", (E4M3FN, E4M3FN, E4M3FN)),
        ("mxfp6", "auto", (E3M2FN, E3M2FN, E3M2FN)),
        ("mxfp4", "auto", (E2M1FN, E2M1FN, E2M1FN)),
        ("nvfp4", "auto", (E2M1FN, E2M1FN, E2M1FN)),
    ],
)
def test_what_each_name_means(name, compute, operands):
    recipe = ng.recipe(name)
    assert recipe.compute == compute
    assert operand_formats(recipe) == operands
    assert recipe.tf32 == (name == "tf32")
    assert recipe.grad == ng.CastSpec(BF16 if name == "bf16_pure" else FP32)
    assert recipe.exp_avg == recipe.exp_avg_sq == ng.CastSpec(FP32)
    params = {
        "fp16_pure": ng.CastSpec(FP16, scale=ng.TENSOR_POW2),
        "bf16_pure": ng.CastSpec(BF16, rounding=ng.STOCHASTIC),
    }
    assert recipe.param == params.get(name, ng.CastSpec(FP32))


@pytest.mark.parametrize("name", NAMES)
def test_tf32_goes_with_any_recipe(name):
    recipe = ng.recipe(name, tf32=True)
    assert recipe.tf32
    assert recipe.replace(tf32=name == "tf32") == ng.recipe(name)


def test_a_recipe_passes_through_and_takes_fields():
    recipe = ng.recipe("bf16")
    assert ng.recipe(recipe) is recipe
    assert ng.recipe(recipe, min_size=64).min_size == 64
    assert ng.recipe("fp8_current", min_size=64) == ng.recipe(ng.recipe("fp8_current"), min_size=64)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("fp8-current", "'fp8_current'"),
        ("FP8_CURRENT", "'fp8_current'"),
        ("fp8 delayed", "'fp8_delayed'"),
        ("fp8_delay", "'fp8_delayed'"),
        ("mxfp", "'mxfp8' or 'mxfp6' or 'mxfp4'"),
        ("bfloat16", "'bf16'"),
        ("BF16", "'bf16'"),
        ("fp16_pur", "'fp16_pure'"),
        ("tf23", "'tf32'"),
    ],
)
def test_unknown_names_are_errors_that_name_the_closest(wrong, right):
    with pytest.raises(ng.RecipeError) as error:
        ng.recipe(wrong)
    assert str(error.value) == f"unknown recipe '{wrong}'; did you mean {right}?"


def test_a_name_like_no_other_lists_all():
    with pytest.raises(ng.RecipeError, match="unknown recipe 'zzz'; valid: bf16, bf16_pure, fp16, fp16_pure, fp32"):
        ng.recipe("zzz")


@pytest.mark.parametrize("value", [None, 8, FP16, {"name": "bf16"}])
def test_what_is_neither_name_nor_recipe_is_refused(value):
    with pytest.raises(ng.RecipeError, match="expected a name .* or a Recipe"):
        ng.recipe(value)


def test_delayed_scaling_has_the_documented_signature():
    parameters = inspect.signature(ng.DelayedScaling).parameters
    assert {name: p.default for name, p in parameters.items()} == {
        "margin": 0,
        "interval": 1,
        "fp8_format": "HYBRID",
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "override_linear_precision": (False, False, False),
    }
    assert ng.DelayedScaling() == ng.recipe("fp8_delayed")
    assert ng.DelayedScaling(2, 4).input.scale == ng.Delayed(margin=2, interval=4)


def test_a_name_takes_the_options_of_its_function_beside_fields():
    recipe = ng.recipe("fp8_delayed", amax_history_len=16, tf32=True, override_linear_precision=(True, False, False))
    assert recipe == ng.DelayedScaling(amax_history_len=16, override_linear_precision=(True, False, False)).replace(
        tf32=True
    )


@pytest.mark.parametrize(
    ("fp8_format", "operands"),
    [
        ("HYBRID", (E4M3FN, E4M3FN, E5M2)),
        ("hybrid", (E4M3FN, E4M3FN, E5M2)),
        ("E4M3", (E4M3FN, E4M3FN, E4M3FN)),
        (E4M3FN, (E4M3FN, E4M3FN, E4M3FN)),
    ],
)
def test_fp8_format_sets_the_operands(fp8_format, operands):
    assert operand_formats(ng.DelayedScaling(fp8_format=fp8_format)) == operands
    assert operand_formats(ng.recipe("fp8_current", fp8_format=fp8_format)) == operands


@pytest.mark.parametrize("role", OPERAND_ROLES)
def test_scale_options_reach_every_operand(role):
    recipe = ng.DelayedScaling(margin=1, interval=3, amax_history_len=4, amax_compute_algo="most_recent")
    assert getattr(recipe, role).scale == ng.Delayed(1, 3, 4, "most_recent")


def next_scale(rolls_before=0, history=(2.0, 8.0, 4.0), **options):
    """The scale of an E4M3 operand after one roll of a history whose newest value stands in slot 0."""
    spec = ng.DelayedScaling(amax_history_len=len(history), **options).input
    return roll(torch.tensor(history), torch.tensor(1.0), spec.format, spec.scale, rolls_before)[1].item()


def test_each_scale_option_acts():
    assert next_scale() == 448 / 8
    assert next_scale(margin=3) == 448 / 8 / 8
    assert next_scale(amax_compute_algo="most_recent") == 448 / 2
    assert next_scale(amax_compute_algo=lambda history: history.min()) == 448 / 2
    assert next_scale(amax_compute_algo=lambda history: history[-1]) == 448 / 4
    assert next_scale(history=(2.0, 0.0)) == 448 / 2
    assert next_scale(rolls_before=1, interval=2) == 1
    assert next_scale(rolls_before=2, interval=2) == 448 / 8


def test_override_linear_precision_is_the_recipes():
    assert ng.DelayedScaling(override_linear_precision=(False, True, False)).override_linear_precision == (
        False,
        True,
        False,
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"margin": "1"}, "margin='1'"),
        ({"margin": True}, "margin=True"),
        ({"margin": float("nan")}, "margin=nan"),
        ({"margin": 1000}, "margin=1000: expected .* between -64 and 64"),
        ({"interval": 0}, "interval=0"),
        ({"interval": 1.5}, "interval=1.5"),
        ({"interval": True}, "interval=True"),
        ({"amax_history_len": 0}, "amax_history_len=0"),
        ({"amax_history_len": "16"}, "amax_history_len='16'"),
        ({"amax_compute_algo": "maximum"}, "amax_compute_algo='maximum'.*did you mean 'max'"),
        ({"amax_compute_algo": "most-recent"}, "did you mean 'most_recent'"),
        ({"amax_compute_algo": 3}, "amax_compute_algo=3"),
        ({"fp8_format": "HYBRD"}, "fp8_format='HYBRD'.*did you mean 'HYBRID'"),
        ({"fp8_format": "E5M2"}, "expected 'HYBRID' or 'E4M3'"),  # E5M2 in the forward pass does not train
        ({"fp8_format": None}, "expected 'HYBRID' or 'E4M3'"),
        ({"override_linear_precision": (False, False)}, "three booleans"),
    ],
)
def test_bad_values_of_delayed_scaling_options(options, expected):
    with pytest.raises(ng.RecipeError, match=expected):
        ng.DelayedScaling(**options)


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("amax_history_length", "did you mean 'amax_history_len'"),
        ("margins", "did you mean 'margin'"),
        ("amax", "did you mean 'amax_history_len' or 'amax_compute_algo'"),
        ("reduce_amax", "valid: amax_compute_algo, amax_history_len, fp8_format"),
        ("fp8_dpa", "did you mean"),
    ],
)
def test_unknown_delayed_scaling_options_are_errors(option, hint):
    with pytest.raises(ng.RecipeError, match=f"no option '{option}'; {hint}"):
        ng.DelayedScaling(**{option: True})


def test_an_option_of_another_recipe_says_whose_it_is():
    with pytest.raises(ng.RecipeError, match="'margin' is an option of 'fp8_delayed'"):
        ng.recipe("fp8_current", margin=2)
    with pytest.raises(ng.RecipeError, match="'margin' is an option of 'fp8_delayed'"):
        ng.recipe(ng.DelayedScaling(), margin=2)
    with pytest.raises(ng.RecipeError, match="unknown recipe field 'margn'; did you mean 'margin'"):
        ng.recipe("fp8_delayed", margn=2)
