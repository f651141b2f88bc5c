"""Precision schedules: which recipe is in force after how many optimizer steps."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.formats import FP16, Format
from narrowgauge.recipes.roles import COMM_ROLES, STATE_ROLES

if TYPE_CHECKING:
    from narrowgauge.recipes.spec import Recipe

Switches = tuple[tuple[int, "Recipe"], ...]

# how things are kept and sent: what is there when a run begins stays so to its end
FIXED = (*STATE_ROLES, *COMM_ROLES, "embeddings", "grad_accumulation", "min_state_size")


def check_schedule(first: Recipe, value: Any) -> Switches:
    """`value` as pairs (steps, recipe) in order of steps.

    Raises RecipeError for what is no such pairs, for two recipes after the same step, and for a recipe that `first`
    cannot be followed by.
    """
    if not isinstance(value, (tuple, list)) or not all(_is_pair(pair, type(first)) for pair in value):
        raise RecipeError(
            f"schedule={value!r}: expected pairs of a number of steps, at least 1, and a Recipe; use "
            "recipe.switch_at(step, other)"
        )
    pairs = sorted(((step, other) for step, other in value), key=lambda pair: pair[0])
    for (step, _), (next_step, _) in itertools.pairwise(pairs):
        if step == next_step:
            raise RecipeError(f"schedule: expected one recipe after step {step}, found two: take one away")
    for step, other in pairs:
        _check_follows(first, step, other)
    return tuple(pairs)


def _check_follows(first: Recipe, step: int, other: Recipe) -> None:
    where = f"recipe '{other.name}' after step {step} of '{first.name}'"
    if other.schedule:
        raise RecipeError(f"{where} has a schedule of its own: chain the switches, a.switch_at(...).switch_at(...)")
    for field in FIXED:
        kept, found = getattr(first, field), getattr(other, field)
        if kept != found:
            raise RecipeError(
                f"{where}: {field}={found!r}, expected {kept!r} as before: what is stored or sent cannot change while "
                f"training; use other.replace({field}=...)"
            )
    computes = [recipe.compute for recipe in (first, other) if isinstance(recipe.compute, Format)]
    if FP16 in computes and len(set(computes)) == 2:
        raise RecipeError(
            f"{where}: compute={other.compute!r}, expected {first.compute!r} as before: FP16 trains with loss scaling "
            "from the first step to the last; use other.replace(compute=...)"
        )


def _is_pair(value: Any, kind: type) -> bool:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return False
    step, other = value
    return isinstance(step, int) and not isinstance(step, bool) and step >= 1 and isinstance(other, kind)
