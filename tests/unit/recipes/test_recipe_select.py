"""Which layers a recipe quantizes, and the reason given for each."""

import pytest

import narrowgauge as ng
from narrowgauge.recipes.select import Candidate, select, unmatched_globs

LAYERS = [
    Candidate("blocks.0.attention.qkv", 96, 288),
    Candidate("blocks.0.mlp.gate_up", 96, 768),
    Candidate("blocks.0.mlp.down", 384, 96),
    Candidate("blocks.1.attention.qkv", 96, 288),
    Candidate("blocks.1.mlp.down", 384, 96),
    Candidate("router", 96, 4),
    Candidate("lm_head", 96, 256),
]
NAMES = [layer.name for layer in LAYERS]


def quantized(**fields):
    return [s.name for s in select(LAYERS, ng.recipe("fp8_current", **fields)) if s.quantized]


def reasons(**fields):
    return {s.name: s.reason for s in select(LAYERS, ng.recipe("fp8_current", **fields))}


def test_by_default_all_but_the_head_and_too_small_layers():
    assert quantized() == NAMES[:5]
    assert reasons()["router"] == "4 outputs: below min_size=16"
    assert reasons()["lm_head"].startswith("head: kept unless asked for")
    assert reasons()["blocks.0.mlp.down"] == "matches include glob '*'"


def test_order_and_names_are_the_candidates():
    assert [s.name for s in select(LAYERS, ng.recipe("fp8_current", first_last=1))] == NAMES
    assert select([], ng.recipe("fp8_current")) == []


def test_include_and_exclude_globs():
    assert quantized(include="*.mlp.*") == ["blocks.0.mlp.gate_up", "blocks.0.mlp.down", "blocks.1.mlp.down"]
    assert reasons(include=("*.mlp.*", "x"))["router"] == "matches no include glob (*.mlp.*, x)"
    assert quantized(exclude="*.down") == [n for n in NAMES[:5] if not n.endswith("down")]
    assert reasons(exclude=("a", "*.down"))["blocks.0.mlp.down"] == "matches exclude glob '*.down'"
    assert quantized(include="*.MLP.*") == []
    assert quantized(include=()) == []


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, False),
        ({"exclude": ()}, True),
        ({"exclude": ("*.qkv",)}, False),  # excluding other layers does not ask for the head
        ({"include": ("*", "*lm_head")}, True),
        ({"include": ("*", "*lm_head"), "exclude": ("*.qkv",)}, True),
        ({"include": "lm_head"}, True),
        ({"include": ("*", "*lm_head"), "exclude": ("*head", "*.qkv")}, False),
    ],
)
def test_the_head_is_kept_unless_asked_for(fields, asked):
    assert ("lm_head" in quantized(**fields)) == asked


@pytest.mark.parametrize("name", ["lm_head", "model.lm_head", "lm_head.dense", "lm_head.base_layer"])
def test_the_head_is_found_by_a_part_of_the_name(name):
    selection = select([Candidate(name, 96, 256)], ng.recipe("fp8_current"))[0]
    assert not selection.quantized and selection.reason.startswith("head")


def test_similar_names_are_no_head():
    assert select([Candidate("my_lm_heads", 96, 256)], ng.recipe("fp8_current"))[0].quantized


def test_first_and_last_count_the_layers_that_remain():
    assert quantized(first_last=(1, 0)) == NAMES[1:5]
    assert quantized(first_last=(0, 2)) == NAMES[:3]
    assert quantized(first_last=2) == [NAMES[2]]
    assert quantized(first_last=9) == []
    assert reasons(first_last=(1, 2))["blocks.0.attention.qkv"] == "among the first 1 selected layers"
    assert reasons(first_last=(1, 2))["blocks.1.mlp.down"] == "among the last 2 selected layers"
    assert reasons(first_last=9, include="*.mlp.*")["router"].startswith("matches no include glob")


def test_min_size_looks_at_both_dimensions():
    assert quantized(min_size=0) == NAMES[:6]
    assert quantized(min_size=97) == []
    assert reasons(min_size=97)["blocks.0.attention.qkv"] == "96 inputs: below min_size=97"
    assert reasons(min_size=97)["blocks.0.mlp.down"] == "96 outputs: below min_size=97"


@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "fp16", "fp16_pure"])
def test_recipes_without_quantized_operands_say_so(name):
    for selection in select(LAYERS, ng.recipe(name)):
        assert not selection.quantized
        assert selection.reason == f"recipe '{name}' quantizes no GEMM operand"


def test_a_narrow_activation_alone_makes_a_layer_quantized():
    selection = select(LAYERS, ng.recipe("bf16", activation=ng.CastSpec(ng.formats.E4M3FN)))
    assert [s.name for s in selection if s.quantized] == NAMES[:5]


def test_a_root_layer_has_the_empty_name():
    assert select([Candidate("", 64, 64)], ng.recipe("fp8_delayed"))[0].quantized


def test_shares_of_the_selected_layers_are_rounded_to_the_nearest_number():
    assert quantized(first_last=(0.2, 0.4)) == NAMES[1:3]  # of five: 1 and 2
    assert quantized(first_last=(0.29, 0.0)) == NAMES[1:5]  # 1.45
    assert quantized(first_last=(0.3, 0.0)) == NAMES[2:5]  # 1.5
    assert quantized(first_last=(1, 0.09)) == NAMES[1:5]  # 0.45
    assert reasons(first_last=(0, 0.4))["blocks.1.mlp.down"] == "among the last 2 selected layers"


def test_globs_of_smooth_that_match_nothing_are_reported():
    recipe = ng.recipe("fp8_current", smooth=("*.down", "*.dwon"))
    assert unmatched_globs(LAYERS, recipe) == ["*.dwon"]


def test_globs_that_match_nothing_are_reported_but_for_the_defaults():
    recipe = ng.recipe("fp8_current", include=("*.mlp.*", "*.mpl.*"), exclude=("*lm_head", "*.quv"))
    assert unmatched_globs(LAYERS, recipe) == ["*.mpl.*", "*.quv"]
    assert unmatched_globs(LAYERS[:2], ng.recipe("fp8_current")) == []
