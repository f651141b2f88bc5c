"""`train`'s configuration from YAML files and the command line, in the order given: later ones win.

A key on the command line is a path into the dataclasses of `train.config`: `--optimizer.lr 1e-3`. Values are read as
YAML, so lists, mappings, `true` and `null` can be given. Keys are never abbreviated; an unknown one names the closest.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from narrowgauge.errors import ConfigError
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.parse import read_yaml


def parse_config(argv: Sequence[str]) -> TrainConfig:
    """Read `--config FILE` and `--KEY VALUE` words into a checked configuration; ConfigError names what is wrong."""
    keys = {key.name: key for key in _keys(TrainConfig, "")}
    values: dict[str, Any] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"expected --KEY VALUE, found '{word}' (see `narrowgauge train --help`)")
        name, has_value, text = word[2:].partition("=")
        name = name.replace("-", "_")
        key = keys.get(name)
        if not has_value:
            if words and not words[0].startswith("--"):
                text = words.pop(0)
            elif key is not None and key.type == "bool":
                text = "true"
            elif key is not None or name == "config":
                raise ConfigError(f"--{name}: expected a value after it, found {words[0] if words else 'the end'}")
        if name == "config":
            _merge(values, _read_file(text))
        else:
            is_text = key is not None and key.type.startswith("str")  # YAML would read 2024-01-01 as a date
            _merge(values, _nested(name, text if is_text else _read_value(name, text)))
    config = TrainConfig.from_dict(values)
    config.check()
    return config


def help_text() -> str:
    """All keys with their defaults, from the dataclasses' own docstrings."""
    lines = []
    for key in sorted(_keys(TrainConfig, ""), key=lambda key: "." in key.name):  # the run's own keys before its parts'
        default = yaml.safe_dump(key.default, default_flow_style=True).removesuffix("...\n").strip()
        lines.append(f"  --{key.name} {default}\n      {key.description}")
    return "\n".join(lines)


class _Key(NamedTuple):
    """One value of the configuration: its dotted name, its type as written, its default and what it does."""

    name: str
    type: str
    default: Any
    description: str


def _keys(section: type, prefix: str) -> Iterator[_Key]:
    described = dict(re.findall(r"^\s+(\w+): (.+?)\s*$", inspect.getdoc(section) or "", flags=re.MULTILINE))
    defaults = section()
    for field in dataclasses.fields(section):
        value = getattr(defaults, field.name)
        if dataclasses.is_dataclass(value):
            yield from _keys(type(value), f"{prefix}{field.name}.")
        else:
            yield _Key(f"{prefix}{field.name}", str(field.type), value, described.get(field.name, ""))


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _merge(into: dict[str, Any], new: dict[str, Any]) -> None:
    for key, value in new.items():
        old = into.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            _merge(old, value)
        elif isinstance(value, dict) and old is not None:  # else the one before would be lost silently
            raise ConfigError(f"{key}: expected keys and values, found {old!r} before {value!r}: give only one of them")
        else:
            into[key] = value


def _read_value(key: str, text: str) -> Any:
    try:
        return read_yaml(text)
    except ValueError:
        raise ConfigError(f"--{key}: expected a YAML value, found '{text}': quote it") from None


def _read_file(name: str) -> dict[str, Any]:
    try:
        values = read_yaml(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: expected a readable YAML file, found {name}: {error.strerror}") from None
    except ValueError as error:  # of YAML, or of bytes that are no UTF-8
        raise ConfigError(f"--config: expected YAML in {name}, found: {error}: mend the file") from None
    if not isinstance(values, dict | None):
        raise ConfigError(f"--config: expected keys and values in {name}, found {type(values).__name__}")
    return values or {}
