"""Casts of what a training run keeps: companded moments, residual masters, and what a recipe may combine."""

import dataclasses
import json

import pytest

import narrowgauge as ng
from narrowgauge.numerics.companding import Companding
from narrowgauge.numerics.formats import (
    BF16,
    E2M1FN,
    E2M3FN,
    E3M2FN,
    E4M3FN,
    E5M2,
    FP16,
    FP32,
    INT4,
    INT8,
    INT16,
    UINT4,
    UINT8,
)
from narrowgauge.recipes.fields import GradAccumulation
from narrowgauge.recipes.serialize import from_dict, to_dict
from narrowgauge.recipes.spec import MOMENT_ROLES, ROLES

TILE = ng.Block(1, 128)
RESIDUAL = ng.CastSpec(INT8, scale=ng.ULP)
REMAINDER = ng.CastSpec(INT16, scale=ng.ULP)
SCALED_FP16 = ng.CastSpec(FP16, scale=ng.TENSOR_POW2)
ROUNDED = ng.CastSpec(BF16, rounding=ng.STOCHASTIC)
SQRT_INT8 = ng.CastSpec(INT8, TILE, companding=ng.SQUARE_ROOT)
SQRT_UINT8 = ng.CastSpec(UINT8, TILE, rounding=ng.NONZERO, companding=ng.SQUARE_ROOT)
TENSOR_E4M3 = ng.CastSpec(E4M3FN, scale=ng.TENSOR_POW2)


# the named recipes


def state(recipe):
    return recipe.param, recipe.master, recipe.grad, recipe.exp_avg, recipe.exp_avg_sq


NONZERO_FP16 = dataclasses.replace(SCALED_FP16, rounding=ng.NONZERO)
WIDE = ng.CastSpec(FP32)
FP8 = ng.CastSpec(E4M3FN)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("fp8_lm_o1", {}, (SCALED_FP16, None, FP8, WIDE, WIDE)),
        ("fp8_lm_o2", {}, (SCALED_FP16, None, FP8, TENSOR_E4M3, NONZERO_FP16)),
        ("fp8_lm_o3", {}, (TENSOR_E4M3, SCALED_FP16, FP8, TENSOR_E4M3, NONZERO_FP16)),
        ("narrow8", {}, (ng.CastSpec(BF16), RESIDUAL, FP8, SQRT_INT8, SQRT_UINT8)),
        ("narrow8", {"moment_bits": 32}, (ng.CastSpec(BF16), RESIDUAL, FP8, WIDE, WIDE)),
        ("narrow8_sr", {}, (ROUNDED, None, FP8, SQRT_INT8, SQRT_UINT8)),
        ("bf16_pure", {}, (ROUNDED, None, ng.CastSpec(BF16), WIDE, WIDE)),
        ("bf16_pure", {"moment_bits": 8}, (ROUNDED, None, ng.CastSpec(BF16), SQRT_INT8, SQRT_UINT8)),
    ],
)
def test_what_each_recipe_keeps(name, options, expected):
    recipe = ng.recipe(name, **options)
    assert state(recipe) == expected
    assert (recipe.min_state_size, recipe.grad_accumulation) == (4096, GradAccumulation.EXACT)


@pytest.mark.parametrize("name", ["narrow8", "narrow8_sr", "bf16_pure"])
def test_four_bits_a_moment(name):
    recipe = ng.recipe(name, moment_bits=4)
    assert recipe.exp_avg == ng.CastSpec(INT4, TILE, companding=ng.SQUARE_ROOT)
    assert recipe.exp_avg_sq == ng.CastSpec(UINT4, TILE, rounding=ng.NONZERO, companding=ng.SQUARE_ROOT)
    assert recipe.replace(exp_avg=SQRT_INT8, exp_avg_sq=SQRT_UINT8) == ng.recipe(name, moment_bits=8)


@pytest.mark.parametrize("bits", [16, 0, "8", 8.0, True, None, [8]])
def test_other_widths_of_moments_are_refused(bits):
    for name in ("narrow8", "narrow8_sr", "bf16_pure"):
        with pytest.raises(ng.RecipeError, match=r"moment_bits=.*: expected 32, 8, 4"):
            ng.recipe(name, moment_bits=bits)


def test_fp8_lm_multiplies_what_it_stores():
    """FP8-LM: E4M3 operands and E5M2 gradients; amax windows of 16 for input and grad_output, none for weights."""
    for name in ("fp8_lm_o1", "fp8_lm_o2", "fp8_lm_o3"):
        recipe = ng.recipe(name)
        assert (recipe.input.format, recipe.weight, recipe.grad_output.format) == (E4M3FN, TENSOR_E4M3, E5M2)
        assert recipe.input.scale.history_length == recipe.grad_output.scale.history_length == 16
    assert ng.recipe("fp8_lm_o3").weight == ng.recipe("fp8_lm_o3").param


@pytest.mark.parametrize("name", ["fp8_lm_o1", "fp8_lm_o2", "fp8_lm_o3", "narrow8", "narrow8_sr"])
def test_an_option_of_another_recipe_is_refused(name):
    with pytest.raises(ng.RecipeError, match="'amax_history_len' is an option of 'fp8_delayed'"):
        ng.recipe(name, amax_history_len=4)


# casts


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"format": INT8, "companding": "square root"}, "companding='square root': expected LINEAR, SQUARE_ROOT, "),
        ({"format": INT8, "companding": ng.SQUARE_ROOT}, r"SQUARE_ROOT with PER_TENSOR.*use Block\(1, 128\)"),
        ({"format": E4M3FN, "granularity": TILE, "scale": ng.E8M0_UP, "companding": ng.SQUARE_ROOT}, "leave scale out"),
        (
            {"format": INT8, "granularity": TILE, "rounding": ng.STOCHASTIC, "companding": ng.SQUARE_ROOT},
            "SQUARE_ROOT with STOCHASTIC rounding: it would be unbiased on the curve only; leave it out",
        ),
        (
            {"format": FP16, "granularity": TILE, "scale": ng.CURRENT, "companding": ng.SQUARE_ROOT},
            "SQUARE_ROOT with FP16: expected a format of at most 8 bits",
        ),
        ({"format": E4M3FN, "granularity": TILE, "companding": ng.DYNAMIC}, "with E4M3FN: expected INT8 or UINT8"),
        ({"format": INT8, "granularity": TILE, "companding": ng.RANGE_EXPANSION}, "with INT8: expected E4M3FN"),
        ({"format": E4M3FN, "scale": ng.ULP}, r"scale ULP with E4M3FN.*use CastSpec\(formats.INT8, scale=ULP\), or"),
        ({"format": INT8, "granularity": TILE, "scale": ng.ULP}, "scale ULP with INT8, Block"),
        ({"format": INT8, "scale": ng.ULP, "rounding": ng.STOCHASTIC}, "scale ULP with INT8"),
        ({"format": INT16}, "scale NONE with INT16: it holds residuals .*; use scale=ULP"),
        ({"format": INT16, "scale": ng.CURRENT}, "scale CURRENT with INT16"),
        ({"format": FP32, "rounding": ng.NONZERO}, "FP32 with NONZERO rounding: it has float32's range"),
        ({"format": BF16, "rounding": ng.NONZERO}, "BF16 with NONZERO rounding"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(fields, expected):
    with pytest.raises(ng.RecipeError, match=expected):
        ng.CastSpec(**fields)


@pytest.mark.parametrize("fmt", [INT8, UINT8, INT4, UINT4, E4M3FN, E5M2, E2M1FN])
def test_square_roots_take_every_narrow_format(fmt):
    spec = ng.CastSpec(fmt, TILE, companding=ng.SQUARE_ROOT)
    assert spec.scale is ng.CURRENT and spec.in_blocks and not spec.is_stochastic


def test_how_casts_of_states_are_printed():
    assert repr(SQRT_UINT8) == "CastSpec(UINT8, Block(1, 128), rounding=NONZERO, companding=SQUARE_ROOT)"
    assert str(SQRT_INT8) == "INT8, scale current, float32, 1x128 blocks, square root"
    assert str(SQRT_UINT8).endswith("square root, nearest even, and nothing but zero to zero")
    assert str(RESIDUAL) == "INT8, scale units in the last place of the parameter, per tensor"
    assert repr(REMAINDER) == "CastSpec(INT16, scale=ULP)"


# roles


@pytest.mark.parametrize("role", ROLES)
def test_companding_and_nonzero_are_for_moments(role):
    companded = dataclasses.replace(SQRT_INT8)
    if role in MOMENT_ROLES:
        assert getattr(ng.Recipe(**{role: companded}), role) == companded
    else:
        with pytest.raises(ng.RecipeError, match=f"{role}=.*companding is for moments.*leave it out here"):
            ng.Recipe(**{role: companded})
    nonzero = ng.CastSpec(E4M3FN, rounding=ng.NONZERO)
    if role == "exp_avg_sq":
        assert ng.Recipe(exp_avg_sq=nonzero).exp_avg_sq == nonzero
    else:
        with pytest.raises(ng.RecipeError, match=f"{role}=.*NONZERO is for exp_avg_sq.*use NEAREST_EVEN here"):
            ng.Recipe(**{role: nonzero})


@pytest.mark.parametrize("role", [role for role in ROLES if role != "master"])
def test_residuals_are_for_masters(role):
    for spec in (RESIDUAL, REMAINDER):
        with pytest.raises(ng.RecipeError, match=f"{role}=.*ULP is the scale of a master's residual; use CURRENT here"):
            ng.Recipe(**{role: spec})


@pytest.mark.parametrize("role", MOMENT_ROLES)
def test_moments_may_have_four_bits(role):
    for fmt in (E2M1FN, E3M2FN, E2M3FN, INT4):
        assert getattr(ng.Recipe(**{role: ng.CastSpec(fmt, TILE)}), role).format is fmt


# masters


@pytest.mark.parametrize(
    ("param", "master"),
    [
        (ng.CastSpec(BF16), RESIDUAL),
        (ng.CastSpec(BF16), REMAINDER),
        (ng.CastSpec(BF16), ng.CastSpec(FP32)),
        (ng.CastSpec(BF16), SCALED_FP16),
        (SCALED_FP16, ng.CastSpec(FP32)),
        (TENSOR_E4M3, SCALED_FP16),
        (TENSOR_E4M3, ng.CastSpec(BF16)),
    ],
)
def test_masters_that_complete_a_parameter(param, master):
    assert ng.Recipe(param=param, master=master).master == master


@pytest.mark.parametrize(
    ("param", "master", "expected"),
    [
        (ng.CastSpec(FP32), RESIDUAL, r"a residual completes bfloat16; use param=CastSpec\(BF16\), or master=None"),
        (SCALED_FP16, REMAINDER, "a residual completes bfloat16"),
        (ROUNDED, RESIDUAL, "nothing is left to chance; use NEAREST_EVEN, or master=None"),
        (ROUNDED, ng.CastSpec(FP32), "nothing is left to chance"),
        (ng.CastSpec(FP32), ng.CastSpec(FP32), "more digits than the parameter; use a wider master, or master=None"),
        (ng.CastSpec(FP32), SCALED_FP16, "more digits than the parameter"),
        (SCALED_FP16, ng.CastSpec(BF16), "more digits than the parameter"),
        (ng.CastSpec(E5M2), ng.CastSpec(E4M3FN), r"CastSpec\(E4M3FN\): expected a copy, CastSpec\(FP32\)"),
        (ng.CastSpec(BF16), ng.CastSpec(INT8), r"expected a copy, .* or a residual, CastSpec\(INT8, scale=ULP\)"),
        (TENSOR_E4M3, ROUNDED, "expected a copy"),
        (TENSOR_E4M3, ng.CastSpec(FP16, TILE, ng.CURRENT), "expected a copy"),
    ],
)
def test_masters_that_do_not(param, master, expected):
    with pytest.raises(ng.RecipeError, match=f"master=.*{expected}"):
        ng.Recipe(param=param, master=master)


def test_changes_of_a_named_recipe_that_do_not_go_together():
    narrow8 = ng.recipe("narrow8")
    with pytest.raises(ng.RecipeError, match="a residual completes bfloat16"):
        narrow8.replace(param=ng.CastSpec(FP32))
    assert narrow8.replace(param=ng.CastSpec(FP32), master=None).master is None
    assert narrow8.replace(name="narrow8_sr", param=ROUNDED, master=None) == ng.recipe("narrow8_sr")
    with pytest.raises(ng.RecipeError, match="more digits"):
        ng.recipe("fp8_lm_o3", param=SCALED_FP16)


# accumulation and small parameters


def test_accumulation():
    assert ng.recipe("narrow8", grad_accumulation="stochastic").grad_accumulation is GradAccumulation.STOCHASTIC
    for value in ("stochastc", None, True):
        with pytest.raises(ng.RecipeError, match="grad_accumulation=.*: expected one of exact, stochastic"):
            ng.recipe("narrow8", grad_accumulation=value)
    for name in ("fp32", "bf16_pure"):
        with pytest.raises(ng.RecipeError, match="it is for gradients of at most 8 bits.*; use 'exact', or grad="):
            ng.recipe(name, grad_accumulation="stochastic")


@pytest.mark.parametrize("value", [-1, 4096.0, True, None, "4096"])
def test_a_size_is_a_number_of_values(value):
    assert ng.recipe("narrow8", min_state_size=0).min_state_size == 0
    with pytest.raises(ng.RecipeError, match=f"min_state_size={value!r}: expected a whole number, at least 0"):
        ng.recipe("narrow8", min_state_size=value)


@pytest.mark.parametrize("fields", [{"grad_accumulation": "stochastic"}, {"min_state_size": 0}])
def test_they_stay_for_a_whole_schedule(fields):
    (field,) = fields
    with pytest.raises(ng.RecipeError, match=f"{field}=.*, expected .* as before"):
        ng.recipe("narrow8").switch_at(5, ng.recipe("narrow8", **fields))


# written and read


@pytest.mark.parametrize("curve", Companding)
def test_round_trip_of_curves(curve):
    fmt = E4M3FN if curve is ng.RANGE_EXPANSION else INT8
    recipe = ng.Recipe(exp_avg=ng.CastSpec(fmt, TILE, companding=curve))
    assert from_dict(json.loads(json.dumps(to_dict(recipe)))) == recipe
    assert to_dict(recipe)["exp_avg"]["companding"] == curve.name


def test_round_trip_of_what_is_new():
    recipe = ng.recipe("narrow8", master=REMAINDER, grad_accumulation="stochastic", min_state_size=7)
    data = json.loads(json.dumps(to_dict(recipe)))
    assert (data["grad_accumulation"], data["min_state_size"]) == ("stochastic", 7)
    assert from_dict(data) == recipe


def test_recipes_written_before_there_were_these_fields_still_load():
    data = to_dict(ng.DelayedScaling(amax_history_len=4))
    for field in ("grad_accumulation", "min_state_size"):
        del data[field]
    for spec in data.values():
        if isinstance(spec, dict):
            spec.pop("companding", None)
            if isinstance(spec.get("scale"), dict):
                spec["scale"].pop("warmup", None)
    assert from_dict(data) == ng.DelayedScaling(amax_history_len=4)


def test_a_misspelt_curve_is_refused():
    with pytest.raises(ng.RecipeError, match="exp_avg companding: unknown 'SQUAREROOT'; did you mean 'SQUARE_ROOT'"):
        from_dict({"exp_avg": {"format": "INT8", "companding": "SQUAREROOT"}})
