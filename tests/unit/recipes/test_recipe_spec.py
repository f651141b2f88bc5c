"""CastSpec and Recipe: values of every field, errors, copies, and how they print."""

import copy
import pickle

import pytest
import torch

import narrowgauge as ng
from narrowgauge.numerics.formats import ALL, BF16, E4M3FN, E5M2, E8M0FNU, FP16, FP32, INT8, TF32
from narrowgauge.recipes.fields import Emulation, Evaluation
from narrowgauge.recipes.spec import FIELDS, OPERAND_ROLES, REQUIRED_ROLES, ROLES

CURRENT_E4M3 = ng.CastSpec(E4M3FN)
DELAYED_E4M3 = ng.CastSpec(E4M3FN, scale=ng.Delayed())


def test_scale_defaults_to_current_for_narrow_formats_and_none_for_wide_ones():
    assert ng.CastSpec(E4M3FN).scale is ng.CURRENT
    assert ng.CastSpec(FP16).scale is ng.NONE
    assert not ng.CastSpec(E4M3FN, scale=ng.NONE).is_scaled
    assert DELAYED_E4M3.is_delayed and not CURRENT_E4M3.is_delayed


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"format": "E4M3"}, "format='E4M3': expected a Format"),
        ({"format": torch.float16}, "expected a Format"),
        ({"format": E4M3FN, "granularity": "per row"}, "expected PER_TENSOR"),
        ({"format": E4M3FN, "scale": 2.0}, "expected NONE, CURRENT, .* or Delayed"),
        ({"format": E4M3FN, "rounding": "nearest"}, "expected NEAREST_EVEN"),
        ({"format": E8M0FNU}, "the format of a block's scale"),
        ({"format": BF16, "scale": ng.CURRENT}, "leave scale out"),
    ],
)
def test_cast_spec_refuses(fields, expected):
    with pytest.raises(ng.RecipeError, match=expected):
        ng.CastSpec(**fields)


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_refuses_a_value_of_the_wrong_kind_and_is_named(field):
    with pytest.raises(ng.RecipeError, match=field):
        ng.Recipe(**{field: object()})


@pytest.mark.parametrize("role", ROLES)
def test_roles_take_a_cast_and_only_optional_ones_none(role):
    if role == "master":
        param, master = ng.CastSpec(BF16), ng.CastSpec(INT8, scale=ng.ULP)
        assert ng.Recipe(param=param, master=master).master == master
    else:
        assert getattr(ng.Recipe(**{role: CURRENT_E4M3}), role) == CURRENT_E4M3
    if role in REQUIRED_ROLES:
        with pytest.raises(ng.RecipeError, match=f"{role}=None"):
            ng.Recipe(**{role: None})
    else:
        assert getattr(ng.Recipe(**{role: None}), role) is None


@pytest.mark.parametrize("role", ROLES)
def test_only_gemm_operands_take_delayed_scaling_or_tf32(role):
    for spec in (DELAYED_E4M3, ng.CastSpec(TF32)):
        if role in OPERAND_ROLES:
            assert getattr(ng.Recipe(**{role: spec}), role) == spec
        else:
            with pytest.raises(ng.RecipeError, match=role):
                ng.Recipe(**{role: spec})


@pytest.mark.parametrize(
    ("value", "stored"),
    [("auto", "auto"), ("bf16", BF16), ("FP16", FP16), (FP32, FP32), (torch.bfloat16, BF16), (torch.float32, FP32)],
)
def test_compute_takes_formats_their_names_and_dtypes(value, stored):
    assert ng.Recipe(compute=value).compute == stored


@pytest.mark.parametrize("value", ["fp8", E4M3FN, TF32, torch.float64, None, 16])
def test_compute_refuses_anything_else(value):
    with pytest.raises(ng.RecipeError, match="compute=.*expected 'auto', FP32, BF16 or FP16"):
        ng.Recipe(compute=value)


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ("same", Evaluation.SAME),
        ("compute", Evaluation.COMPUTE),
        ("E4M3", E4M3FN),
        ("e4m3fn", E4M3FN),
        (E5M2, E5M2),
    ],
)
def test_evaluation_takes_same_compute_or_an_fp8_format(value, stored):
    assert ng.Recipe(evaluation=value).evaluation == stored


@pytest.mark.parametrize("value", [BF16, "bf16", True, None])
def test_evaluation_refuses_anything_else(value):
    with pytest.raises(ng.RecipeError, match="evaluation=.*expected .*same.*compute.*E4M3"):
        ng.Recipe(evaluation=value)


def test_evaluation_names_the_closest():
    with pytest.raises(ng.RecipeError, match="did you mean 'compute'"):
        ng.Recipe(evaluation="computed")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("first_last", -1),
        ("first_last", (1, 2, 3)),
        ("first_last", (1, True)),
        ("first_last", 1.0),
        ("first_last", (0.5, -0.5)),
        ("first_last", float("nan")),
        ("hadamard", True),
        ("smooth", (1,)),
        ("min_size", -1),
        ("min_size", True),
        ("min_size", 16.0),
        ("include", ["*", 3]),
        ("include", ("",)),
        ("exclude", None),
        ("override_linear_precision", (True, False)),
        ("override_linear_precision", (1, 0, 0)),
        ("override_linear_precision", "yes"),
        ("emulation", "exactly"),
        ("embeddings", 1),
        ("tf32", "true"),
        ("name", ""),
    ],
)
def test_out_of_range_values_are_refused(field, value):
    with pytest.raises(ng.RecipeError, match=f"{field}=.*expected"):
        ng.Recipe(**{field: value})


def test_values_are_brought_into_one_form():
    recipe = ng.Recipe(include="*.mlp.*", exclude=["a", "b"], first_last=2, emulation="exact")
    assert recipe.include == ("*.mlp.*",)
    assert recipe.exclude == ("a", "b")
    assert recipe.first_last == (2, 2)
    assert recipe.emulation is Emulation.EXACT
    assert ng.Recipe(override_linear_precision=[True, False, True]).override_linear_precision == (True, False, True)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("inputs", "input"), ("grad_out", "grad_output"), ("exp_avg_squared", "exp_avg_sq"), ("min-size", "min_size")],
)
def test_unknown_fields_name_the_closest_in_constructor_replace_and_recipe(wrong, right):
    makers = (lambda f: ng.Recipe(**f), lambda f: ng.Recipe().replace(**f), lambda f: ng.recipe("bf16", **f))
    for make in makers:
        with pytest.raises(ng.RecipeError, match=f"unknown recipe field '{wrong}'; did you mean '{right}'"):
            make({wrong: None})


@pytest.mark.parametrize("name", ng.recipe_names())
def test_recipes_are_hashable_comparable_and_survive_copies(name):
    recipe = ng.recipe(name)
    assert hash(recipe) == hash(ng.recipe(name))
    assert recipe != recipe.replace(min_size=17)
    for again in (copy.copy(recipe), copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe)), recipe.replace()):
        assert again == recipe
        assert again.compute == recipe.compute
        assert again.param.format is recipe.param.format  # formats stay the module's own objects


def test_formats_survive_pickling_as_the_same_object():
    for fmt in ALL.values():
        assert pickle.loads(pickle.dumps(fmt)) is fmt
        assert copy.deepcopy(fmt) is fmt


def test_recipes_are_frozen():
    with pytest.raises(AttributeError):
        ng.recipe("bf16").tf32 = True


def test_auto_is_decided_by_the_device(monkeypatch):
    recipe = ng.recipe("fp8_current")
    with pytest.raises(ng.RecipeError, match="call recipe.resolve"):
        _ = recipe.compute_dtype
    with pytest.raises(ng.RecipeError, match="call recipe.resolve"):
        _ = recipe.needs_loss_scaling
    assert recipe.resolve("cpu").compute_dtype is torch.bfloat16
    assert not recipe.resolve("cpu").needs_loss_scaling
    assert recipe.replace(compute="fp32").resolve("cpu").compute == FP32

    class NoDevice:
        def __init__(self, device): ...
        def __enter__(self): ...
        def __exit__(self, *_): ...

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", NoDevice)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)  # V100, T4
    assert recipe.resolve("cuda").compute == FP16
    assert recipe.resolve("cuda").needs_loss_scaling
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert recipe.resolve("cuda").compute == BF16


def test_repr_shows_what_differs_from_the_defaults():
    assert repr(ng.recipe("bf16", tf32=True)) == "Recipe(name='bf16', compute=BF16, tf32=True)"
    assert repr(ng.CastSpec(FP16, scale=ng.TENSOR_POW2)) == "CastSpec(FP16, scale=TENSOR_POW2)"
    assert "scale=Delayed(history_length=16)" in repr(ng.DelayedScaling(amax_history_len=16))


def test_str_is_a_table_of_every_role_and_field():
    lines = str(ng.DelayedScaling(margin=2, override_linear_precision=(False, False, True))).splitlines()
    assert lines[0] == "recipe fp8_delayed"
    cells = dict(line.split(maxsplit=1) for line in lines[1:])
    assert list(cells) == [field for field in FIELDS if field != "name"]
    assert cells["input"] == "E4M3FN, delayed (max of 1024, margin 2, every 1), per tensor"
    assert cells["grad_output"].startswith("E5M2, delayed")
    assert cells["param"] == "FP32"
    assert cells["master"].startswith("none")
    assert cells["override_linear_precision"] == "grad_weight"
    assert str(ng.CastSpec(E4M3FN, scale=ng.NONE)) == "E4M3FN, unscaled"
