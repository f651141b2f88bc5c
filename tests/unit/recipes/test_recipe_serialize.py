"""Recipes as JSON and back."""

import json

import pytest

import narrowgauge as ng
from narrowgauge.numerics.formats import ALL, E8M0FNU, FP16, INT16, TF32
from narrowgauge.numerics.scaling import ScaleRule
from narrowgauge.recipes.serialize import from_dict, spec_from_dict, spec_to_dict, to_dict
from narrowgauge.recipes.spec import FIELDS


def through_json(recipe):
    return from_dict(json.loads(json.dumps(to_dict(recipe))))


@pytest.mark.parametrize("name", ng.recipe_names())
def test_round_trip_of_named_recipes(name):
    assert through_json(ng.recipe(name)) == ng.recipe(name)
    assert list(to_dict(ng.recipe(name))) == list(FIELDS)


def test_round_trip_of_every_changed_field():
    changed = ng.DelayedScaling(0.5, 3, "E4M3", 7, "most_recent", (True, False, True)).replace(
        name="mine",
        param=ng.CastSpec(FP16, scale=ng.TENSOR_POW2),
        master=ng.CastSpec(ALL["FP32"]),
        grad_comm=ng.CastSpec(ALL["E5M2"], scale=ng.NONE),
        compute="fp16",
        emulation="exact",
        include=("a.*", "*lm_head"),
        exclude=(),
        first_last=(1, 2),
        min_size=64,
        embeddings=False,
        evaluation="E4M3",
        tf32=True,
    )
    assert through_json(changed) == changed
    assert through_json(changed.replace(evaluation="compute")).evaluation == "compute"


@pytest.mark.parametrize("fmt", [fmt for fmt in ALL.values() if fmt not in (E8M0FNU, TF32, INT16)])
def test_round_trip_of_formats(fmt):
    is_state = fmt.bits >= 8 or not fmt.signed
    recipe = ng.Recipe(exp_avg_sq=ng.CastSpec(fmt)) if is_state else ng.Recipe(input=ng.CastSpec(fmt))
    assert through_json(recipe) == recipe
    assert (through_json(recipe).input or through_json(recipe).exp_avg_sq).format is fmt


@pytest.mark.parametrize("rule", [rule for rule in ScaleRule if rule is not ng.ULP])
def test_round_trip_of_scales(rule):
    spec = (
        ng.CastSpec(ALL["E2M1FN"], ng.Block(1, 16), rule)
        if rule is ng.NVFP4
        else ng.CastSpec(ALL["E4M3FN"], scale=rule)
    )
    assert through_json(ng.Recipe(input=spec)).input.scale is rule


@pytest.mark.parametrize(
    "block", [ng.PER_TENSOR, ng.PER_ROW, ng.PER_COLUMN, ng.Block(1, 128), ng.Block(128, 128), ng.Block(None, 32)]
)
def test_round_trip_of_granularities(block):
    recipe = ng.Recipe(weight_for_grad_input=ng.CastSpec(ALL["E4M3FN"], block))
    assert through_json(recipe).weight_for_grad_input.granularity == block


def test_a_block_is_written_by_its_name():
    spec = ng.CastSpec(ALL["E2M1FN"], ng.Block(1, 16), ng.NVFP4, ng.STOCHASTIC)
    assert spec_to_dict(spec) == {
        "format": "E2M1FN",
        "granularity": "1x16",
        "scale": "NVFP4",
        "rounding": "STOCHASTIC",
        "companding": "LINEAR",
    }


def test_round_trip_of_transforms():
    recipe = ng.recipe("nvfp4", hadamard=ng.Hadamard.seeded(3), smooth=("*.down",), first_last=(0.25, 2))
    data = to_dict(recipe)
    assert data["hadamard"] == {"signs": list(ng.Hadamard.seeded(3).signs)}
    assert (data["smooth"], data["first_last"]) == (["*.down"], [0.25, 2])
    assert through_json(recipe) == recipe
    assert from_dict({**data, "hadamard": None}).hadamard is None


def test_one_cast_alone():
    spec = ng.CastSpec(FP16, scale=ng.TENSOR_POW2)
    data = {"format": "FP16", "granularity": "PER_TENSOR", "scale": "TENSOR_POW2", "rounding": "NEAREST_EVEN",
            "companding": "LINEAR"}  # fmt: skip
    assert spec_to_dict(spec) == data
    assert spec_from_dict(data) == spec
    with pytest.raises(ng.RecipeError, match="cast: unknown key 'round'; did you mean 'rounding'"):
        spec_from_dict({"format": "FP16", "round": "NEAREST_EVEN"})


def test_missing_fields_take_their_defaults():
    assert from_dict({"name": "bf16", "compute": "BF16"}) == ng.recipe("bf16")
    assert from_dict({"input": {"format": "E4M3FN"}}).input == ng.CastSpec(ALL["E4M3FN"])


def test_an_algorithm_that_is_a_function_cannot_be_written():
    with pytest.raises(ng.RecipeError, match="input: .*function cannot be written; use 'max' or 'most_recent'"):
        to_dict(ng.DelayedScaling(amax_compute_algo=lambda history: history.amax()))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ([1], "a recipe: expected a mapping .* found list"),
        ({8: None}, "unknown recipe field .8."),
        ({"inputs": None}, "unknown recipe field 'inputs'; did you mean 'input'"),
        ({"input": "E4M3FN"}, "input: expected a mapping"),
        ({"input": {"fromat": "E4M3FN"}}, "input: unknown key 'fromat'; did you mean 'format'"),
        ({"input": {"scale": "CURRENT"}}, "input: expected a 'format', found only scale"),
        ({"input": {"format": "E4M3"}}, "input format: unknown 'E4M3'; did you mean 'E4M3FN'"),
        ({"input": {"format": 8}}, "input format: unknown 8"),
        ({"input": {"format": "E4M3FN", "granularity": "PER_TENSR"}}, "did you mean 'PER_TENSOR'"),
        ({"input": {"format": "E4M3FN", "scale": "CURENT"}}, "did you mean 'CURRENT'"),
        ({"input": {"format": "E4M3FN", "scale": {"margins": 1}}}, "input scale: unknown key 'margins'; .*'margin'"),
        ({"input": {"format": "E4M3FN", "scale": {"interval": 0}}}, "interval=0"),
        ({"input": {"format": "E4M3FN", "rounding": "NEAREST"}}, "did you mean 'NEAREST_EVEN'"),
        ({"input": {"format": "E4M3FN", "granularity": "1x0"}}, "input granularity: unknown '1x0'"),
        ({"hadamard": [1, -1]}, "hadamard: expected a mapping"),
        ({"hadamard": {"sign": []}}, "hadamard: unknown key 'sign'; did you mean 'signs'"),
        ({"hadamard": {"signs": [1, -1]}}, "expected 16 of 1 or -1"),
        ({"param": None}, "param=None: expected a CastSpec"),
        ({"min_size": "16"}, "min_size='16'"),
    ],
)
def test_bad_data_is_refused(data, expected):
    with pytest.raises(ng.RecipeError, match=expected):
        from_dict(data)
