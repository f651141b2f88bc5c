"""Fields of a recipe that single layers have of their own: how their products are cast."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from narrowgauge.errors import RecipeError, closest
from narrowgauge.recipes import fields as check
from narrowgauge.recipes.roles import PRODUCT_ROLES

if TYPE_CHECKING:
    from narrowgauge.recipes.spec import Recipe

LayerFieldValues = tuple[tuple[str, Any], ...]
LayerFields = tuple[str, LayerFieldValues]  # a glob over names of layers, and their fields

PRODUCT_FIELDS = (*PRODUCT_ROLES, "override_linear_precision", "hadamard")


def check_layers(recipe: Recipe, value: Any) -> tuple[LayerFields, ...]:
    """`value` in its one form: pairs of a glob and (field, value) pairs in the fields' order.

    Raises RecipeError for what is no such pairs, for a field that is not about products, and for fields that do not go
    with the rest of the recipe.
    """
    if not isinstance(value, (tuple, list)) or not all(
        isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in value
    ):
        raise RecipeError(
            f"layers={value!r}: expected pairs of a glob and the fields of its layers; use recipe.for_layers(glob, ...)"
        )
    found = []
    for glob, given in value:
        (pattern,) = check.globs("layers", glob if isinstance(glob, str) else (glob,))
        own = _fields(pattern, given)
        try:
            checked = recipe.replace(layers=(), schedule=()).with_own(tuple(own.items()))
        except RecipeError as error:
            raise RecipeError(f"layers '{pattern}': {error}") from None
        found.append((pattern, tuple((field, getattr(checked, field)) for field in PRODUCT_FIELDS if field in own)))
    return tuple(found)


def _fields(pattern: str, given: Any) -> dict[str, Any]:
    try:
        own = dict(given)
    except (TypeError, ValueError):
        raise RecipeError(f"layers '{pattern}': expected fields and their values, found {given!r}") from None
    if not own:
        raise RecipeError(f"layers '{pattern}': expected at least one field of {', '.join(PRODUCT_FIELDS)}, found none")
    for field in own:
        if field not in PRODUCT_FIELDS:
            raise RecipeError(
                f"layers '{pattern}': '{field}' is no field that a layer has of its own"
                f"{closest(str(field), PRODUCT_FIELDS)}"
            )
    return own


def matching(name: str, layers: Sequence[LayerFields]) -> LayerFieldValues:
    """The fields that the layer called `name` has of its own: of those that match, field by field, the last."""
    return tuple({field: value for glob, own in layers if fnmatchcase(name, glob) for field, value in own}.items())


def last_match(name: str, layers: Sequence[LayerFields]) -> str | None:
    """The last glob that matches `name`, or None."""
    return next((glob for glob, _ in reversed(layers) if fnmatchcase(name, glob)), None)


def products_of(recipe: Recipe) -> dict[str, Any]:
    """The fields of a recipe that are about products."""
    return {field: getattr(recipe, field) for field in PRODUCT_FIELDS}


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2
