"""Which blocks of a plan are alike, and the small model that has one of each kind: as real layers are prepared."""

from __future__ import annotations

import warnings

import pytest
import torch

import narrowgauge as ng
from narrowgauge.models.config import GPTConfig
from narrowgauge.models.gpt import GPT
from narrowgauge.observe.plan_layers import Casts, casts_of, small_model
from narrowgauge.ops.casts import LinearCasts

CONFIG = GPTConfig(vocab_size=64, layers=7, width=32, heads=2, context=32, ffn_width=64)
E5M2 = ng.CastSpec(ng.formats.E5M2)


def recipe_of(has_head: bool) -> ng.Recipe:
    """The first layer wide, and one of block 2; 3 and 5 with casts of their own; 3 and 4 smoothed.

    A glob of what is kept wide may match nothing.
    """
    plain = ng.recipe("fp8_current", first_last=(1, 0))
    exclude = ("blocks.2.mlp.down", "no.such.layer", *(() if has_head else plain.exclude))
    recipe = plain.replace(exclude=exclude, include=("*", "*lm_head"), smooth=("blocks.[34].mlp.down",))
    return recipe.for_layers("blocks.[35].*", input=E5M2).resolve("cpu")


def prepared(config: GPTConfig, recipe: ng.Recipe) -> dict[str, tuple[bool, LinearCasts]]:
    """{layer: whether it is quantized, and its casts}, of a real model."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of smoothing that concerns no layer, in a small model
        model = ng.prepare(GPT(config), None, recipe)[0]
    return {name: (m.quantized, m.training_casts) for name, m in model.named_modules() if hasattr(m, "training_casts")}  # type: ignore[misc]


def planned(casts: Casts, layers: int) -> dict[str, tuple[bool, LinearCasts]]:
    found = {each.layer.name: each for each in casts.others}
    for at in range(layers):
        for each in casts.of_blocks([at]):
            found[each.layer.name.replace("blocks.0.", f"blocks.{at}.")] = each
    return {
        name: (each.is_quantized, LinearCasts.of(each.recipe, each.is_quantized, each.is_quantized and each.is_smooth))
        for name, each in found.items()
    }


@pytest.mark.parametrize("has_head", [False, True])
def test_planned_layers_are_cast_as_real_ones(has_head: bool) -> None:
    recipe = recipe_of(has_head)
    casts = casts_of(CONFIG, recipe)
    assert casts.kind_of == (0, 1, 2, 3, 4, 5, 1)
    real = prepared(CONFIG, recipe)
    found = planned(casts, CONFIG.layers)
    assert {name: found[name] for name in real} == real
    assert real["lm_head"][0] == has_head


@pytest.mark.parametrize("has_head", [False, True])
def test_the_small_model_has_the_first_block_and_one_of_each_kind(has_head: bool) -> None:
    recipe = recipe_of(has_head)
    config, named = small_model(CONFIG, recipe, casts_of(CONFIG, recipe))
    assert config == CONFIG.replace(layers=7)
    big, small = prepared(CONFIG, recipe), prepared(config, named)
    stands_for = {f"blocks.{at}.": f"blocks.{block}." for at, block in enumerate((0, 0, 1, 2, 3, 4, 5))}
    for name, found in small.items():
        block = name[:9]
        assert found == big[stands_for.get(block, block) + name[9:]], name
