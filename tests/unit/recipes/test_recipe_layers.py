"""Layers with casts of their own: the table of a recipe, layer by layer."""

import pytest

import narrowgauge as ng
from narrowgauge.numerics.formats import E5M2
from narrowgauge.recipes.chart import chart_rows
from narrowgauge.recipes.select import Candidate, select, unmatched_globs
from narrowgauge.recipes.serialize import from_dict, to_dict

E5M2_CAST = ng.CastSpec(E5M2)


def test_the_last_match_wins_field_by_field():
    base = ng.recipe("fp8_current")
    found = base.for_layers("blocks.*", input=E5M2_CAST, weight=None).for_layers("blocks.1.*", weight=E5M2_CAST)
    assert found.for_layer("blocks.0.up") == base.replace(input=E5M2_CAST, weight=None)
    assert found.for_layer("blocks.1.up") == base.replace(input=E5M2_CAST, weight=E5M2_CAST)
    assert found.for_layer("head") == base


def test_products_of_another_recipe():
    base = ng.recipe("narrow8").for_layers("a", "fp8_block").for_layers("b", "bf16", input=E5M2_CAST)
    block, own = ng.recipe("fp8_block"), base.for_layer("a")
    assert (own.input, own.weight, own.grad_output) == (block.input, block.weight, block.grad_output)
    assert own.param == base.param and own.exp_avg == base.exp_avg and own.layers == ()
    assert base.for_layer("b").input == E5M2_CAST and base.for_layer("b").weight is None


def test_several_globs_are_one_call():
    base = ng.recipe("fp8_current")
    assert base.for_layers(["a", "b"], "bf16") == base.for_layers("a", "bf16").for_layers("b", "bf16")


def test_layers_in_the_compute_dtype_are_kept_and_no_other_layers_turn_depends_on_it():
    recipe = ng.recipe("fp8_current", first_last=(1, 0)).for_layers("b", "bf16")
    found = {s.name: s for s in select([Candidate(n, 32, 32) for n in "abcd"], recipe)}
    assert {name: s.quantized for name, s in found.items()} == {"a": False, "b": False, "c": True, "d": True}
    assert "first 1" in found["a"].reason and "'b'" in found["b"].reason
    assert found["c"].reason == "matches include glob '*'"
    at_the_end = recipe.for_layers("a", "bf16")  # among the first all the same: it makes no room there for another
    reasons = {s.name: s.reason for s in select([Candidate(n, 32, 32) for n in "acd"], at_the_end)}
    assert "first 1" in reasons["a"] and reasons["c"] == reasons["d"] == "matches include glob '*'"


def test_the_reason_names_the_glob_that_decided_and_globs_keep_their_case():
    recipe = ng.recipe("fp8_current").for_layers("*", input=E5M2_CAST).for_layers("b", "bf16").for_layers("C", "bf16")
    found = {s.name: s for s in select([Candidate(n, 32, 32) for n in "abc"], recipe)}
    assert found["b"].reason == "in the compute dtype by fields of its own, 'b'"
    assert found["a"].reason == found["c"].reason == "matches include glob '*', with fields of its own, '*'"
    assert found["c"].quantized


def test_the_transform_of_a_product_is_of_its_own_too():
    narrow, wide = ng.recipe("nvfp4"), ng.recipe("bf16")
    assert narrow.hadamard is not None and narrow.for_layers("a", wide).for_layer("a").hadamard is None
    assert wide.for_layers("a", narrow).for_layer("a").hadamard == narrow.hadamard


def test_the_order_in_which_fields_are_given_is_nothing():
    base, row = ng.recipe("fp8_current"), ng.CastSpec(E5M2, ng.PER_ROW)
    one, other = base.for_layers("a", weight=None, input=row), base.for_layers("a", input=row, weight=None)
    assert one == other and hash(one) == hash(other)


def test_a_plain_recipe_with_one_narrow_layer():
    recipe = ng.recipe("bf16").for_layers("b", "fp8_current")
    assert recipe.quantizes_gemms and not ng.recipe("bf16").for_layers("b", "bf16").quantizes_gemms
    found = {s.name: s.quantized for s in select([Candidate(n, 32, 32) for n in "ab"], recipe)}
    assert found == {"a": False, "b": True}


def test_a_layer_that_takes_no_part_does_not_join_by_its_own_fields():
    recipe = ng.recipe("bf16").for_layers("lm_head", "fp8_current")
    assert not select([Candidate("lm_head", 32, 32)], recipe)[0].quantized


def test_a_glob_that_matches_nothing_is_reported():
    recipe = ng.recipe("fp8_current").for_layers("blocsk.*", "bf16")
    assert unmatched_globs([Candidate("blocks.0", 32, 32)], recipe) == ["blocsk.*"]


def test_json_and_back():
    recipe = ng.recipe("fp8_delayed").for_layers("a", "mxfp8").for_layers("b", override_linear_precision=[True] * 3)
    assert from_dict(to_dict(recipe)) == recipe
    assert hash(from_dict(to_dict(recipe))) == hash(recipe)


def test_smoothing_ends_where_the_input_is_not_cast():
    recipe = ng.recipe("fp8_current", smooth="*.down").for_layers("0.down", "bf16")
    assert recipe.for_layer("0.down").smooth == () and recipe.for_layer("1.down").smooth == ("*.down",)


def test_the_chart_has_a_row_for_each_glob():
    rows = chart_rows([ng.recipe("fp8_current").for_layers("blocks.0.*", "bf16").for_layers("*.down", "nvfp4")])
    assert [(row.name, row.gemm) for row in rows] == [
        ("fp8_current", "FP8"),
        ("fp8_current: blocks.0.*", "BF16 or FP16"),
        ("fp8_current: *.down", "NVFP4"),
    ]


def test_the_table_of_a_recipe_names_them():
    assert "layers                       a: input E5M2" in str(ng.recipe("bf16").for_layers("a", input=E5M2_CAST))


@pytest.mark.parametrize(
    ("globs", "fields", "said"),
    [
        ("x", {"param": E5M2_CAST}, "'param' is no field that a layer has of its own"),
        ("x", {"inpt": None}, "did you mean 'input'"),
        ("x", {"input": 3}, "layers 'x': input=3: expected a CastSpec"),
        ("x", {}, "expected at least one field"),
        ("", {"input": None}, "expected globs over module names"),
        (3, {"input": None}, "expected globs over module names"),
    ],
)
def test_bad_fields(globs, fields, said):
    with pytest.raises(ng.RecipeError, match=said):
        ng.recipe("fp8_current").for_layers(globs, **fields)


@pytest.mark.parametrize("layers", ["ab", [("a",)], [("a", 3)], {"a": {}}, [(None, {"input": None})]])
def test_bad_values_of_the_field(layers):
    with pytest.raises(ng.RecipeError, match="layers"):
        ng.recipe("fp8_current", layers=layers)
