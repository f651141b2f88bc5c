"""Dataclasses from nested plain values, as YAML and the command line give them; unknown keys name the nearest one."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from narrowgauge.errors import ConfigError, closest

T = TypeVar("T")


def build(kind: type[T], values: Any, where: str) -> T:
    """A dataclass from nested plain values; `where` is the dotted key that leads here. Raises ConfigError."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected keys and values, found {values!r}")
    hints = get_type_hints(kind)
    for key in values:
        if key not in hints:
            known = [f"{where}.{name}" if where else name for name in hints]
            full = f"{where}.{key}" if where else str(key)
            raise ConfigError(f"unknown configuration key '{full}'{closest(full, known)}")
    return kind(**{key: _convert(hints[key], value, f"{where}.{key}".lstrip(".")) for key, value in values.items()})


def _convert(hint: Any, value: Any, key: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return build(hint, value, key)  # type: ignore[arg-type]
    if get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    if get_origin(hint) is dict:
        hint = dict
    if hint is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 reads 1e-3 as a string
        except ValueError:
            pass
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{key}={value!r}: expected {hint.__name__}, found {type(value).__name__}")
    return value
