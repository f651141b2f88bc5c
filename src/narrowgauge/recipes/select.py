"""Which layers a recipe quantizes, and why: a pure function of names and sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from narrowgauge.recipes.layers import last_match
from narrowgauge.recipes.spec import Recipe

HEAD = "lm_head"  # the output layer's name in Hugging Face models and in ours


@dataclass(frozen=True)
class Candidate:
    """A linear layer that could be quantized: its module name (dotted, "" for the root) and its features."""

    name: str
    in_features: int
    out_features: int


@dataclass(frozen=True)
class Selection:
    """Whether a layer is quantized, and the reason in words."""

    name: str
    quantized: bool
    reason: str


def select(candidates: Sequence[Candidate], recipe: Recipe) -> list[Selection]:
    """Decide for each candidate, in order. First match wins:

    1. a recipe without a quantized GEMM operand or activation quantizes nothing;
    2. the layer matches no `include` glob;
    3. it is the head (`lm_head` is a part of its name) and nobody asked for it, see `head_is_asked_for`;
    4. it matches an `exclude` glob;
    5. it has fewer than `min_size` input or output features;
    6. it is among the first or last (`first_last`) of those that remain, counted in the given order;
    7. it has fields of its own (`layers`), which quantize nothing;
    8. else it is quantized.

    Globs are case-sensitive and match the whole dotted name; `*` also matches dots.
    """
    kept = {c.name: _kept_by_itself(c, recipe) for c in candidates}
    kept.update(_kept_at_the_ends([c.name for c in candidates if kept[c.name] is None], recipe))
    kept.update(_kept_by_fields_of_their_own([c.name for c in candidates if kept[c.name] is None], recipe))
    return [
        Selection(c.name, reason is None, reason if reason is not None else _reason_to_quantize(c, recipe))
        for c in candidates
        for reason in [kept[c.name]]
    ]


def head_is_asked_for(recipe: Recipe) -> bool:
    """True where `include` spells `lm_head`, e.g. ("*", "*lm_head"), or `exclude` is empty."""
    return not recipe.exclude or any(HEAD in pattern for pattern in recipe.include)


def unmatched_globs(candidates: Sequence[Candidate], recipe: Recipe) -> list[str]:
    """The globs of `include`, `exclude`, `smooth` and `layers` that match no candidate, most often a misspelling.

    Defaults are left out.
    """
    defaults = {*Recipe().include, *Recipe().exclude}
    patterns = dict.fromkeys((*recipe.include, *recipe.exclude, *recipe.smooth, *(glob for glob, _ in recipe.layers)))
    return [p for p in patterns if p not in defaults and _matching([p], candidates) == 0]


def _matching(patterns: Sequence[str], candidates: Sequence[Candidate]) -> int:
    return sum(_first_match(c.name, patterns) is not None for c in candidates)


def _first_match(name: str, patterns: Sequence[str]) -> str | None:
    return next((p for p in patterns if fnmatchcase(name, p)), None)


def _kept_by_itself(layer: Candidate, recipe: Recipe) -> str | None:
    """Why the layer stays in the compute dtype whatever its neighbours are, or None."""
    if not recipe.quantizes_gemms:
        return f"recipe '{recipe.name}' quantizes no GEMM operand"
    if _first_match(layer.name, recipe.include) is None:
        return f"matches no include glob ({', '.join(recipe.include)})"
    is_head = HEAD in layer.name.split(".")
    glob = _first_match(layer.name, recipe.exclude)
    if is_head and not head_is_asked_for(recipe):
        return f"head: kept unless asked for by include=('*', '*{HEAD}') or exclude=()"
    # the default exclusion is the head's, which an include glob that spells it takes back
    if glob is not None and not (is_head and recipe.exclude == Recipe().exclude):
        return f"matches exclude glob '{glob}'"
    for features, kind in ((layer.in_features, "inputs"), (layer.out_features, "outputs")):
        if features < recipe.min_size:
            return f"{features} {kind}: below min_size={recipe.min_size}"
    return None


def _kept_at_the_ends(names: Sequence[str], recipe: Recipe) -> dict[str, str]:
    first, last = (math.floor(n * len(names) + 0.5) if isinstance(n, float) else int(n) for n in recipe.first_last)
    reasons = {name: f"among the last {last} selected layers" for name in (names[-last:] if last else [])}
    return reasons | {name: f"among the first {first} selected layers" for name in names[:first]}


def _kept_by_fields_of_their_own(names: Sequence[str], recipe: Recipe) -> dict[str, str]:
    """Last of all, so that no other layer's turn among the first or last depends on it."""
    if not recipe.layers:
        return {}
    wide = [name for name in names if not recipe.for_layer(name).quantizes_gemms]
    return {name: f"in the compute dtype by {_own_fields(name, recipe)}" for name in wide}


def _own_fields(name: str, recipe: Recipe) -> str | None:
    glob = last_match(name, recipe.layers)
    return None if glob is None else f"fields of its own, '{glob}'"


def _reason_to_quantize(layer: Candidate, recipe: Recipe) -> str:
    reason = f"matches include glob '{_first_match(layer.name, recipe.include)}'"
    own = _own_fields(layer.name, recipe)
    return f"{reason}, with {own}" if own else reason
