"""Options of other libraries' configurations, and how they are read: by name, none passed over.

A configuration is an object of theirs, read by its attributes (none of these libraries is imported), or a mapping.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from narrowgauge.errors import RecipeError, closest


@dataclass(frozen=True)
class Option:
    """One option of a peer.

    default: the peer's own. ours: what becomes of it here, as the documentation says it. only: the values that are
    taken; None: those that the field of the recipe takes. remedy: what to do about others. aliases: its other names.
    """

    default: Any
    ours: str
    only: tuple[Any, ...] | None = None
    remedy: str = ""
    aliases: tuple[str, ...] = ()

    def takes(self, value: Any) -> bool:
        """True unless the value is outside `only`; 1 is not True here."""
        return self.only is None or any(type(value) is type(v) and value == v for v in self.only)


Options = Mapping[str, Option]


def read(what: str, given: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """The value of every option: the one that is given, else the peer's default. Enum members as `plain` gives them.

    Raises RecipeError for a name that is no option, with the closest; for two names of one option that differ; and for
    a value that cannot be honoured.
    """
    names = {name: option for option, entry in options.items() for name in (option, *entry.aliases)}
    values = {option: entry.default for option, entry in options.items()}
    source: dict[str, str] = {}
    for name, value in given.items():
        if name not in names:
            raise RecipeError(f"{what}: unknown option '{name}'{closest(str(name), names)}")
        option, value = names[name], plain(value)
        if option in source and values[option] != value:
            raise RecipeError(
                f"{what}: '{source[option]}' and '{name}' are two names of one option, and differ: {values[option]!r} "
                f"and {value!r}; leave one of them out"
            )
        if not options[option].takes(value):
            raise refusal(what, name, value, options[option])
        values[option], source[option] = value, name
    return values


def refusal(what: str, name: str, value: Any, option: Option) -> RecipeError:
    """The error for a value that cannot be honoured."""
    wanted = " or ".join(repr(v) for v in option.only or ())
    remedy = f"; {option.remedy}" if option.remedy else ""
    return RecipeError(f"{what}: {name}={value!r} cannot be honoured: expected {wanted}{remedy}")


def plain(value: Any) -> Any:
    """An enum member as its value where that is a string, else as its name; anything else as it is."""
    if isinstance(value, Enum):
        return value.value if isinstance(value.value, str) else value.name
    return value


def fields_of(config: Any) -> dict[str, Any]:
    """The public attributes of a configuration that hold values, those of its class included; a mapping's items.

    Raises RecipeError for keys that are no strings.
    """
    if isinstance(config, Mapping):
        for key in config:
            if not isinstance(key, str):
                raise RecipeError(f"expected names of options as keys, found {key!r}")
        return dict(config)
    names = dict.fromkeys([*_declared(config), *_of_class(type(config)), *getattr(config, "__dict__", ())])
    return {name: getattr(config, name) for name in names if not name.startswith("_") and hasattr(config, name)}


def _declared(config: Any) -> Iterator[str]:
    if dataclasses.is_dataclass(config):
        yield from (field.name for field in dataclasses.fields(config))


def _of_class(kind: type) -> Iterator[str]:
    """Names of values that stand in a class or its bases: a dataclass hides those without an annotation."""
    for base in reversed(kind.__mro__[:-1]):
        for name, value in vars(base).items():
            described = isinstance(value, property | staticmethod | classmethod)
            if not (name.startswith("_") or callable(value) or described):
                yield name


def unknown_kind(peer: str, config: Any, kinds: Mapping[str, Any], others: str) -> RecipeError:
    """The error for a configuration of a class that is not known."""
    kind = type(config).__name__
    return RecipeError(f"{peer}: expected {others} or one of its configurations, found {kind}{closest(kind, kinds)}")
