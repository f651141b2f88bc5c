"""How the layers of a GPT multiply by a recipe, which blocks are alike in that, and a small model of all kinds."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from narrowgauge.errors import ConfigError
from narrowgauge.models.config import GPTConfig
from narrowgauge.observe.plan_layout import BLOCK, outline
from narrowgauge.observe.plan_state import Layer, quantized
from narrowgauge.recipes.layers import LayerFieldValues, matching
from narrowgauge.recipes.select import HEAD, Candidate, unmatched_globs
from narrowgauge.recipes.spec import Recipe


@dataclass(frozen=True)
class LayerCast:
    """A linear layer, named as in the first block, and the recipe as it follows it.

    fields: those that it has of its own. is_smooth: whether its channels are smoothed.
    """

    layer: Layer
    recipe: Recipe
    fields: LayerFieldValues
    is_quantized: bool
    is_smooth: bool


@dataclass(frozen=True)
class Casts:
    """kinds: the layers of a block of each kind. kind_of: of each block, by number. others: layers in no block."""

    kinds: tuple[tuple[LayerCast, ...], ...]
    kind_of: tuple[int, ...]
    others: tuple[LayerCast, ...]

    def of_blocks(self, blocks: Sequence[int]) -> list[LayerCast]:
        """The layers of these blocks."""
        return [each for at in blocks for each in self.kinds[self.kind_of[at]]]

    @property
    def own(self) -> tuple[int, int]:
        """How many layers have fields of their own, and of how many."""
        layers = [*self.of_blocks(range(len(self.kind_of))), *self.others]
        return sum(bool(each.fields) for each in layers), len(layers)


@functools.lru_cache(maxsize=64)
def casts_of(config: GPTConfig, recipe: Recipe) -> Casts:
    """By a resolved recipe. Raises ConfigError for fields of layers that the model has not."""
    layers = outline(config).all_layers
    missing = set(unmatched_globs([_candidate(each) for each in layers], recipe)) & {glob for glob, _ in recipe.layers}
    if missing:
        raise ConfigError(
            f"recipe '{recipe.name}' has casts for '{sorted(missing)[0]}', and a GPT of {config.layers} blocks has no "
            "such layer: expected the recipe of this model; change the recipe, or the model"
        )
    chosen = quantized(layers, recipe)
    recipes: dict[LayerFieldValues, Recipe] = {}

    def cast(name: str, layer: Layer) -> LayerCast:
        fields = matching(name, recipe.layers)
        if fields not in recipes:
            recipes[fields] = recipe.for_layer(name)
        is_smooth = any(fnmatchcase(name, glob) for glob in recipe.smooth)
        return LayerCast(layer, recipes[fields], fields, chosen[name], is_smooth)

    inside = [each for each in outline(config).layers if each.name.startswith(BLOCK)]
    kinds: dict[tuple[LayerCast, ...], int] = {}
    kind_of = []
    for at in range(config.layers):
        block = tuple(cast(in_block(at, each.name), each) for each in inside)
        kind_of.append(kinds.setdefault(block, len(kinds)))
    others = tuple(cast(each.name, each) for each in outline(config).layers if each not in inside)
    return Casts(tuple(kinds), tuple(kind_of), others)


def in_block(at: int, name: str) -> str:
    """The name, in a block, of a layer that is called `name` in the first one."""
    return f"blocks.{at}.{name.removeprefix(BLOCK)}"


def small_model(config: GPTConfig, recipe: Recipe, casts: Casts) -> tuple[GPTConfig, Recipe]:
    """A model whose first block is as the first one, followed by one of each kind; and its recipe, which names layers
    one by one."""
    blocks = [casts.kinds[casts.kind_of[0]], *casts.kinds]
    named = [(in_block(at, each.layer.name), each) for at, block in enumerate(blocks) for each in block]
    named += [(each.layer.name, each) for each in casts.others]
    has_head = any(each.is_quantized for each in casts.others)
    return config.replace(layers=len(blocks)), recipe.replace(
        first_last=(0, 0), schedule=(), include=("*", f"*{HEAD}") if has_head else ("*",),
        exclude=tuple(name for name, each in named if not each.is_quantized),
        smooth=tuple(name for name, each in named if each.is_smooth),
        layers=tuple((name, each.fields) for name, each in named if each.fields),
    )  # fmt: skip


def _candidate(layer: Layer) -> Candidate:
    return Candidate(layer.name, layer.in_features, layer.out_features)
