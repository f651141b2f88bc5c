"""Recipes as JSON-able dictionaries, for checkpoints and run folders, and back.

Every field is written, so that a stored recipe means the same when a default changes. Fields that are missing when
read take their default: an older file may lack them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from enum import Enum
from typing import Any, TypeVar

from narrowgauge.errors import RecipeError, closest
from narrowgauge.numerics import formats
from narrowgauge.numerics.companding import Companding
from narrowgauge.numerics.formats import Format
from narrowgauge.numerics.granularity import PER_COLUMN, PER_ROW, PER_TENSOR, Block
from narrowgauge.numerics.hadamard import Hadamard
from narrowgauge.numerics.rounding import Rounding
from narrowgauge.numerics.scaling import Delayed, Scale, ScaleRule
from narrowgauge.recipes.spec import FIELDS, ROLES, CastSpec, Recipe, check_fields

V = TypeVar("V")

_SPEC_KEYS = tuple(f.name for f in fields(CastSpec))
_DELAYED_KEYS = tuple(f.name for f in fields(Delayed))
_HADAMARD_KEYS = tuple(f.name for f in fields(Hadamard))


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as dictionaries, lists, strings, numbers and None.

    Raises RecipeError for a delayed scale whose algorithm is a function: JSON cannot hold it.
    """
    return {field: _plain(field, getattr(recipe, field)) for field in FIELDS}


def from_dict(data: Mapping[str, Any]) -> Recipe:
    """The recipe that `to_dict` wrote. Raises RecipeError for unknown keys, naming the closest, and for bad values."""
    _check_mapping("a recipe", data)
    check_fields(dict(data))
    return Recipe(**{field: _read(field, value) for field, value in data.items()})


def spec_to_dict(spec: CastSpec, what: str = "cast") -> dict[str, Any]:
    """One cast as `to_dict` writes it within a recipe; `what` names it in errors."""
    return {
        "format": spec.format.name,
        "granularity": spec.granularity.name,
        "scale": _plain_scale(what, spec.scale),
        "rounding": spec.rounding.name,
        "companding": spec.companding.name,
    }


def spec_from_dict(data: Mapping[str, Any], what: str = "cast") -> CastSpec:
    """The cast that `spec_to_dict` wrote. Raises RecipeError as `from_dict` does; `what` names it in errors."""
    _check_mapping(what, data)
    _check_keys(what, data, _SPEC_KEYS)
    if "format" not in data:
        raise RecipeError(f"{what}: expected a 'format', found only {', '.join(data) or 'nothing'}")
    readers: dict[str, Callable[[Any], Any]] = {
        "format": lambda value: _look_up(f"{what} format", value, formats.ALL),
        "granularity": lambda value: _granularity(f"{what} granularity", value),
        "scale": lambda value: _scale(what, value),
        "rounding": lambda value: _look_up(f"{what} rounding", value, Rounding.__members__),
        "companding": lambda value: _look_up(f"{what} companding", value, Companding.__members__),
    }
    return CastSpec(**{key: readers[key](value) for key, value in data.items()})


def _plain(field: str, value: Any) -> Any:
    if isinstance(value, CastSpec):
        return spec_to_dict(value, field)
    if isinstance(value, Format):
        return value.name
    if field == "schedule":
        return [[step, to_dict(recipe)] for step, recipe in value]
    if field == "layers":
        return [[glob, {own: _plain(own, each) for own, each in own_fields}] for glob, own_fields in value]
    if isinstance(value, Hadamard):
        return {"signs": list(value.signs)}
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Enum) else value  # the enums here are strings


def _plain_scale(what: str, scale: Scale | None) -> Any:
    if not isinstance(scale, Delayed):
        return scale.name if scale else None
    if not isinstance(scale.algorithm, str):
        raise RecipeError(
            f"{what}: an amax algorithm that is a function cannot be written; use 'max' or 'most_recent', "
            "or build the recipe in code each time"
        )
    return {key: getattr(scale, key) for key in _DELAYED_KEYS}


def _read(field: str, data: Any) -> Any:
    if data is None:
        return None
    if field in ROLES:
        return spec_from_dict(data, field)
    if field == "schedule":
        return _schedule(data)
    if field == "layers":
        return _layers(data)
    return _hadamard(data) if field == "hadamard" else data


def _schedule(data: Any) -> list[tuple[Any, Recipe]]:
    if not isinstance(data, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in data):
        raise RecipeError(f"schedule={data!r}: expected pairs [steps, recipe] as `to_dict` writes them")
    return [(step, from_dict(recipe)) for step, recipe in data]


def _layers(data: Any) -> list[tuple[Any, dict[str, Any]]]:
    if not isinstance(data, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in data):
        raise RecipeError(f"layers={data!r}: expected pairs [glob, fields] as `to_dict` writes them")
    for glob, own in data:
        _check_mapping(f"layers {glob!r}", own)
    return [(glob, {field: _read(field, value) for field, value in own.items()}) for glob, own in data]


def _hadamard(data: Any) -> Hadamard:
    _check_mapping("hadamard", data)
    _check_keys("hadamard", data, _HADAMARD_KEYS)
    return Hadamard(**data)


def _scale(what: str, data: Any) -> Scale | None:
    if data is None:
        return None
    if isinstance(data, Mapping):
        _check_keys(f"{what} scale", data, _DELAYED_KEYS)
        return Delayed(**data)
    return _look_up(f"{what} scale", data, ScaleRule.__members__)


def _granularity(what: str, name: Any) -> Block:
    found = Block.of_name(name) if isinstance(name, str) else None
    if found is None:
        known = [block.name for block in (PER_TENSOR, PER_ROW, PER_COLUMN)]
        raise RecipeError(
            f"{what}: unknown {name!r}: expected {', '.join(known)} or e.g. 1x128{closest(str(name), known)}"
        )
    return found


def _look_up(what: str, name: Any, members: Mapping[str, V]) -> V:
    if not isinstance(name, str) or name not in members:
        raise RecipeError(f"{what}: unknown {name!r}{closest(str(name), members)}")
    return members[name]


def _check_mapping(what: str, data: Any) -> None:
    if not isinstance(data, Mapping):
        raise RecipeError(f"{what}: expected a mapping as `to_dict` writes it, found {type(data).__name__}")


def _check_keys(what: str, data: Mapping[str, Any], valid: Collection[str]) -> None:
    for key in data:
        if key not in valid:
            raise RecipeError(f"{what}: unknown key '{key}'{closest(str(key), valid)}")
