"""What a role takes, and what goes together: errors that name the role, the rule and the remedy."""

import pytest

import narrowgauge as ng
from narrowgauge.numerics.formats import BF16, E2M1FN, E2M3FN, E3M2FN, E4M3FN, FP16, FP32, INT8, UINT8
from narrowgauge.recipes.spec import COMM_ROLES, MOMENT_ROLES, OPERAND_ROLES, ROLES, SECOND_USES, STATE_ROLES

E4M3 = ng.CastSpec(E4M3FN)
NVFP4 = ng.CastSpec(E2M1FN, ng.Block(1, 16), ng.NVFP4)
RESIDUAL = {"param": ng.CastSpec(BF16), "master": ng.CastSpec(INT8, scale=ng.ULP)}


def test_the_roles():
    assert set(ROLES) == {*OPERAND_ROLES, *SECOND_USES, "activation", *STATE_ROLES, *COMM_ROLES}
    assert len(ROLES) == 15


@pytest.mark.parametrize("fmt", [E2M1FN, E3M2FN, E2M3FN])
@pytest.mark.parametrize("role", ROLES)
def test_formats_below_8_bits_hold_operands_moments_and_messages_but_no_weights(role, fmt):
    spec = ng.CastSpec(fmt, ng.Block(1, 32), ng.E8M0_UP)
    if role not in STATE_ROLES or role in MOMENT_ROLES:
        assert getattr(ng.Recipe(**{role: spec}), role) is spec
        return
    with pytest.raises(ng.RecipeError) as error:
        ng.Recipe(**{role: spec})
    message = str(error.value)
    assert message.startswith(f"{role}={spec!r}")
    assert f"which {fmt} with its {fmt.mantissa_bits} mantissa bits rounds away" in message
    assert "use a format of at least 8 bits here" in message


@pytest.mark.parametrize("role", ROLES)
def test_unsigned_values_are_for_the_second_moment(role):
    if role == "exp_avg_sq":
        assert ng.Recipe(exp_avg_sq=ng.CastSpec(UINT8)).exp_avg_sq.format is UINT8
    else:
        with pytest.raises(ng.RecipeError, match=f"{role}=.*UINT8 has no negative values.*use INT8 here"):
            ng.Recipe(**{role: ng.CastSpec(UINT8)})
    signed = {role: ng.CastSpec(INT8)} if role != "master" else RESIDUAL
    assert getattr(ng.Recipe(**signed), role).format is INT8


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"format": E4M3FN, "granularity": ng.Block(1, 16), "scale": ng.NVFP4}, "NVFP4 with E4M3FN.*use CastSpec"),
        ({"format": E2M1FN, "granularity": ng.PER_ROW, "scale": ng.NVFP4}, "defined for blocks of E2M1FN"),
        ({"format": E2M1FN, "scale": ng.NVFP4}, "defined for blocks of E2M1FN"),
        ({"format": FP16, "granularity": ng.Block(1, 32), "scale": ng.E8M0_UP}, "E8M0_UP with FP16: E8M0 scales are"),
        ({"format": BF16, "granularity": ng.Block(1, 32)}, "with NONE: parts of a tensor need scales"),
        ({"format": FP16, "granularity": ng.PER_ROW, "scale": ng.TENSOR_POW2}, "use CURRENT, CURRENT_POW2"),
        ({"format": E4M3FN, "granularity": ng.PER_ROW, "scale": ng.Delayed()}, "a history is kept of whole tensors"),
        ({"format": FP32, "rounding": ng.STOCHASTIC}, "FP32 with STOCHASTIC rounding: expected .* at most 16 bits"),
    ],
)
def test_what_does_not_go_together_in_a_cast(fields, expected):
    with pytest.raises(ng.RecipeError, match=expected):
        ng.CastSpec(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"weight": NVFP4},  # grad_weight has no part in it
        {"input": NVFP4, "grad_output": NVFP4, "override_linear_precision": (False, False, True)},
        {"activation": NVFP4, "override_linear_precision": (False, False, True)},
    ],
)
def test_a_hadamard_transform_needs_a_quantized_grad_weight(fields):
    with pytest.raises(ng.RecipeError, match="hadamard=.*operands of grad_weight.*use hadamard=None, or cast input"):
        ng.Recipe(hadamard=ng.Hadamard(), **fields)


@pytest.mark.parametrize("fields", [{"input": NVFP4}, {"grad_output": NVFP4}, {"activation": E4M3}])
def test_one_quantized_operand_of_grad_weight_is_enough(fields):
    assert ng.Recipe(hadamard=ng.Hadamard(), **fields).hadamard == ng.Hadamard()


def test_a_history_knows_nothing_of_transformed_tensors():
    with pytest.raises(ng.RecipeError, match="hadamard=.* with grad_output=.*history.*use CURRENT scaling"):
        ng.DelayedScaling(fp8_format="E4M3").replace(input=E4M3, hadamard=ng.Hadamard())
    recipe = ng.DelayedScaling().replace(activation=E4M3, grad_output_for_grad_weight=E4M3, hadamard=ng.Hadamard())
    assert recipe.grad_output.is_delayed


def test_smoothing_needs_a_cast_of_the_input():
    with pytest.raises(ng.RecipeError, match=r"smooth=\('\*.down',\).*casts no input; use smooth=\(\), or cast input"):
        ng.recipe("bf16", smooth="*.down")
    assert ng.recipe("fp8_current", smooth="*.down").smooth == ("*.down",)


def test_the_cast_of_an_operand_follows_the_product():
    other = ng.CastSpec(E4M3FN, ng.PER_ROW)
    recipe = ng.recipe("fp8_current", weight_for_grad_input=other, grad_output_for_grad_weight=NVFP4, activation=E4M3)
    assert recipe.operand("output", "input") == recipe.input
    assert recipe.operand("output", "weight") == recipe.weight
    assert recipe.operand("grad_input", "weight") == other
    assert recipe.operand("grad_input", "grad_output") == recipe.grad_output
    assert recipe.operand("grad_weight", "grad_output") == NVFP4
    assert recipe.operand("grad_weight", "input") == E4M3
    wide = recipe.replace(override_linear_precision=(True, True, True))
    assert [wide.operand("output", "weight"), wide.operand("grad_input", "weight")] == [None, None]
    assert wide.operand("grad_weight", "input") == E4M3  # what was saved, whatever multiplies it
