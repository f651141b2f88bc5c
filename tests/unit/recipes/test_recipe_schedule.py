"""Schedules of recipes: what is in force when, what may follow what, and how they are printed and written."""

import copy
import json
import pickle

import pytest

import narrowgauge as ng
from narrowgauge.numerics.formats import BF16, E4M3FN, FP16, FP32, INT8
from narrowgauge.recipes.chart import chart_rows
from narrowgauge.recipes.serialize import from_dict, to_dict
from narrowgauge.recipes.spec import COMM_ROLES, STATE_ROLES

FP8 = ng.recipe("fp8_current")
BOTH = FP8.switch_at(30, "bf16").switch_at(20, ng.DelayedScaling())


def test_the_recipe_in_force():
    names = {steps: BOTH.at(steps).name for steps in (0, 19, 20, 29, 30, 10**9)}
    assert names == {
        0: "fp8_current", 19: "fp8_current", 20: "fp8_delayed", 29: "fp8_delayed", 30: "bf16", 10**9: "bf16",
    }  # fmt: skip
    assert BOTH.at(0) == FP8
    assert BOTH.at(25) == ng.recipe("fp8_delayed")
    assert [step for step, _ in BOTH.phases] == [0, 20, 30]
    assert all(recipe.schedule == () for _, recipe in BOTH.phases)


def test_a_plain_recipe_is_in_force_for_ever():
    assert FP8.schedule == ()
    assert FP8.at(0) is FP8 and FP8.at(1000) is FP8


def test_a_schedule_is_a_part_of_the_value():
    assert BOTH != FP8 and BOTH != FP8.switch_at(30, "bf16")
    assert BOTH == FP8.switch_at(20, "fp8_delayed").switch_at(30, "bf16")
    through_json = from_dict(json.loads(json.dumps(to_dict(BOTH))))
    for again in (copy.deepcopy(BOTH), pickle.loads(pickle.dumps(BOTH)), through_json):
        assert again == BOTH and hash(again) == hash(BOTH)


def test_what_is_written():
    written = to_dict(BOTH)["schedule"]
    assert [(step, recipe["name"], recipe["schedule"]) for step, recipe in written] == [
        (20, "fp8_delayed", []),
        (30, "bf16", []),
    ]


def test_replace_changes_the_first_recipe_alone():
    changed = BOTH.replace(min_size=64)
    assert [recipe.min_size for _, recipe in changed.phases] == [64, 16, 16]
    assert BOTH.replace(schedule=()) == FP8


def test_printed_are_all_fields_and_then_what_changes():
    lines = str(BOTH).splitlines()
    assert lines[0] == "recipe fp8_current"
    at = [number for number, line in enumerate(lines) if line.startswith("after step")]
    assert [lines[number] for number in at] == ["after step 20: recipe fp8_delayed", "after step 30: recipe bf16"]
    assert "  schedule                     after step 20: fp8_delayed; after step 30: bf16" in lines[: at[0]]
    assert [line.split()[0] for line in lines[at[0] + 1 : at[1]]] == ["input", "weight", "grad_output"]
    assert [line.split(maxsplit=1) for line in lines[at[1] + 1 :]] == [
        ["input", "as compute"],
        ["weight", "as compute"],
        ["grad_output", "as compute"],
        ["compute", "BF16"],
    ]
    assert "schedule" in str(FP8) and "after step" not in str(FP8)
    assert "schedule=((20, Recipe(name='fp8_delayed'" in repr(BOTH)


def test_the_chart_has_a_row_for_each():
    rows = chart_rows([BOTH, "fp32"])
    assert [(row.name, row.gemm) for row in rows] == [
        ("fp8_current", "FP8"),
        ("fp8_delayed after step 20", "FP8"),
        ("bf16 after step 30", "BF16"),
        ("fp32", "FP32"),
    ]


def test_auto_is_decided_for_all():
    assert [recipe.compute for _, recipe in BOTH.resolve("cpu").phases] == [BF16, BF16, BF16]
    mixed = ng.recipe("fp32").switch_at(1, FP8).resolve("cpu")
    assert [recipe.compute for _, recipe in mixed.phases] == [FP32, BF16]
    assert mixed.resolve("cpu") is mixed


def test_a_master_stays():
    first = FP8.replace(param=ng.CastSpec(BF16))
    other = first.replace(name="other", master=ng.CastSpec(INT8, scale=ng.ULP))
    with pytest.raises(
        ng.RecipeError, match=r"'other' after step 7.*master=CastSpec\(INT8, scale=ULP\), expected None"
    ):
        first.switch_at(7, other)
    assert other.switch_at(7, other.replace(tf32=True)).at(7).master == other.master


@pytest.mark.parametrize("role", [*(role for role in STATE_ROLES if role != "master"), *COMM_ROLES])
def test_what_is_stored_or_sent_stays(role):
    other = ng.recipe("bf16", **{role: ng.CastSpec(INT8)})
    with pytest.raises(ng.RecipeError) as error:
        FP8.switch_at(7, other)
    message = str(error.value)
    assert message.startswith(f"recipe 'bf16' after step 7 of 'fp8_current': {role}=CastSpec(INT8), expected ")
    assert message.endswith(f"use other.replace({role}=...)")
    same = FP8.replace(**{role: ng.CastSpec(INT8)}).switch_at(7, other)
    assert getattr(same.at(7), role) == ng.CastSpec(INT8)


@pytest.mark.parametrize(
    "fields",
    [
        {"input": None, "weight": None, "grad_output": None},
        {"activation": ng.CastSpec(E4M3FN)},
        {"weight_for_grad_input": ng.CastSpec(E4M3FN, ng.PER_ROW)},
        {"override_linear_precision": (True, False, False)},
        {"emulation": "exact"},
        {"include": "*.mlp.*", "exclude": "x", "first_last": 1, "min_size": 64},
        {"evaluation": "compute"},
        {"tf32": True, "compute": "fp32"},
        {"hadamard": ng.Hadamard()},
        {"smooth": "*.down"},
    ],
)
def test_what_may_change(fields):
    other = FP8.replace(name="other", **fields)
    assert FP8.switch_at(1, other).at(1) == other


def test_embeddings_stay_where_they_are():
    with pytest.raises(ng.RecipeError, match="embeddings=False, expected True as before"):
        FP8.switch_at(1, FP8.replace(embeddings=False))


def test_loss_scaling_does_not_begin_or_end_on_the_way():
    with pytest.raises(ng.RecipeError, match="compute=FP16, expected BF16 as before: FP16 trains with loss scaling"):
        ng.recipe("bf16").switch_at(1, "fp16")
    half = ng.recipe("fp16").switch_at(1, FP8)  # auto: on a device without bfloat16 this is float16 throughout
    assert half.at(1) == FP8
    with pytest.raises(ng.RecipeError, match="compute=BF16, expected FP16 as before"):
        half.resolve("cpu")
    assert ng.recipe("fp16").switch_at(1, FP8.replace(compute=FP16)).resolve("cpu").at(1).needs_loss_scaling


@pytest.mark.parametrize("step", [0, -1, 1.0, True, "1", None])
def test_a_step_is_a_number_of_steps(step):
    with pytest.raises(ng.RecipeError, match="schedule=.*expected pairs of a number of steps, at least 1"):
        FP8.switch_at(step, "bf16")


@pytest.mark.parametrize("steps", [-1, 1.0, True, "1", None])
def test_what_is_in_force_is_asked_with_a_count(steps):
    with pytest.raises(ng.RecipeError, match=f"steps={steps!r}: expected a whole number, at least 0"):
        BOTH.at(steps)


@pytest.mark.parametrize("value", [None, "bf16", 3, [3], [(3,)], [(3, "bf16")], {3: "bf16"}])
def test_a_schedule_is_pairs(value):
    with pytest.raises(ng.RecipeError, match="schedule=.*expected pairs"):
        ng.Recipe(schedule=value)


def test_other_contradictions():
    with pytest.raises(ng.RecipeError, match="expected one recipe after step 20, found two: take one away"):
        BOTH.switch_at(20, "bf16")
    with pytest.raises(ng.RecipeError, match="has a schedule of its own: chain the switches"):
        FP8.switch_at(5, BOTH)
    with pytest.raises(ng.RecipeError, match="did you mean 'bf16'"):
        FP8.switch_at(5, "bf61")


@pytest.mark.parametrize("data", [3, [3], [[3]], "bf16"])
def test_bad_data_is_refused(data):
    with pytest.raises(ng.RecipeError, match="schedule=.*expected pairs"):
        from_dict({"schedule": data})
    with pytest.raises(ng.RecipeError, match="a recipe: expected a mapping"):
        from_dict({"schedule": [[3, "bf16"]]})
