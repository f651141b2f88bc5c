"""YAML to plain values, and those to dataclasses: nothing is lost silently, unknown keys name the nearest one."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from narrowgauge.errors import ConfigError, closest

T = TypeVar("T")


class _Loader(yaml.SafeLoader):
    """YAML of plain values, in which a key that stands twice is an error: YAML's own rule, which PyYAML leaves out.

    `mode: off` is the word, which YAML 1.1 reads as false.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        for key, value in node.value:
            if key.value == "mode" and isinstance(value, yaml.ScalarNode) and value.value == "off":
                value.tag = "tag:yaml.org,2002:str"
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key '{key.value}' twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> Any:
    """The plain values of a YAML document. Raises ValueError, saying in one line what is wrong and where."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 (a SafeLoader)
    except RecursionError:
        raise ValueError("brackets nested too deep") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def build(kind: type[T], values: Any, where: str) -> T:
    """A dataclass from nested plain values; `where` is the dotted key that leads here. Raises ConfigError."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected keys and values, found {values!r}: give {where}.KEY, or leave it out")
    hints = get_type_hints(kind)
    for key in values:
        if key not in hints:
            known = [f"{where}.{name}" if where else name for name in hints]
            full = f"{where}.{key}" if where else str(key)
            raise ConfigError(f"unknown configuration key '{full}'{closest(full, known)}")
    for each in dataclasses.fields(kind):  # type: ignore[arg-type]
        needed = each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
        if needed and each.name not in values:
            raise ConfigError(f"{where}: expected {each.name}, found only {', '.join(values) or 'nothing'}: add it")
    return kind(**{key: _convert(hints[key], value, f"{where}.{key}".lstrip(".")) for key, value in values.items()})


def _convert(hint: Any, value: Any, key: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return build(hint, value, key)  # type: ignore[arg-type]
    if get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    if get_origin(hint) is list:
        if not isinstance(value, list):
            raise ConfigError(f"{key}={value!r}: expected list, found {type(value).__name__}")
        return [_convert(get_args(hint)[0], item, f"{key}.{at}") for at, item in enumerate(value)]
    if get_origin(hint) is dict:
        hint = dict
        odd = [name for name in value if not isinstance(name, str)] if isinstance(value, dict) else []
        if odd:
            raise ConfigError(f"{key}: expected names as its keys, found {odd[0]!r}: quote it if it is one")
    if hint is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 reads 1e-3 as a string
        except (ValueError, OverflowError):
            pass
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{key}={value!r}: expected {hint.__name__}, found {type(value).__name__}")
    return value
