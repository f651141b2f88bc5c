"""Formats of single parameters' state, asked for before an optimizer is built or after."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.optim.formats import StateFormats

# a tuple of fields of StateFormats, on the parameter itself, so that every optimizer built later finds it
ATTRIBUTE = "_narrowgauge_formats"
_NOTHING: tuple[Mapping[str, Any], ...] = ()


def override(parameter: Tensor, **fields: Any) -> None:
    """Keep the state of `parameter` in other formats, in any optimizer that holds it, now or later.

    fields: those of `StateFormats`. Later overrides go over earlier ones, and an optimizer's own over these. What is
    asked for holds whatever the parameter's size, unless min_state_size is among the fields. `prepare` hands the
    override on to what it puts in the parameter's place, and a copy of an optimizer has it; `copy.deepcopy` of a model
    does not copy it, as torch copies no attributes of a Parameter.
    Raises NarrowgaugeError for anything but a tensor, RecipeError for an unknown field or a format that cannot play
    the role.
    """
    if not isinstance(parameter, Tensor):
        raise NarrowgaugeError(
            f"override: expected a parameter, found {parameter!r}; an optimizer's own override takes globs over names"
        )
    StateFormats().replace(**fields)  # checked before anything changes
    setattr(parameter, ATTRIBUTE, (*overrides_of(parameter), dict(fields)))


def overrides_of(parameter: Tensor) -> tuple[Mapping[str, Any], ...]:
    """What `override` was given for a parameter: the same object until it is called again."""
    return getattr(parameter, ATTRIBUTE, _NOTHING)


def applied(formats: StateFormats, fields: Mapping[str, Any]) -> StateFormats:
    """`formats` with the fields of one override."""
    return formats.replace(**{"min_state_size": 0, **fields})


def is_meant(p: Tensor, name: str, which: str | Tensor) -> bool:
    """True where `which`, a parameter or a glob over names, means `p` of that name."""
    return fnmatchcase(name, which) if isinstance(which, str) else p is which
