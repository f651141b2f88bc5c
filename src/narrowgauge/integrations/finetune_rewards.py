"""Reward functions by import path, and what they return held to what they must."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

from narrowgauge.errors import ConfigError, DataError

Reward = Callable[..., list[float | None]]


def reward_function(path: str) -> Reward:
    """The function at `package.module:function`, checked at every call.

    It is called as TRL calls one: with `prompts`, `completions` and the other columns of the data, each a list of one
    item an answer; it returns a number for each, or None where it has no opinion.

    Raises ConfigError where there is no such function, or its module cannot be imported. Each call raises DataError
    where the function raises, or returns anything else.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"reward={path!r}: expected package.module:function, found no colon between two names")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            raise ConfigError(
                f"reward={path!r}: expected a module {module_name!r}, found none: is it in the working directory, or "
                "installed?"
            ) from None
        raise ConfigError(f"reward={path!r}: {module_name!r} cannot be imported: {error}") from error
    except Exception as error:  # a module runs anything on import
        raise ConfigError(f"reward={path!r}: {module_name!r} cannot be imported: {_said(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        found = "no such name" if function is None else f"a {type(function).__name__}"
        raise ConfigError(f"reward={path!r}: expected a function {name!r} in {module_name!r}, found {found}")
    return _checked(function, path)


def _checked(function: Callable[..., Any], path: str) -> Reward:
    @functools.wraps(function, assigned=("__doc__",), updated=())
    def call(*arguments: Any, **columns: Any) -> list[float | None]:
        answers = columns["completions"]
        try:
            returned = function(*arguments, **columns)
        except Exception as error:
            raise DataError(f"reward {path!r} raised {_said(error)}: mend it, or leave out such data") from error
        return check_rewards(returned, len(answers), path)

    call.__name__ = path.rpartition(":")[2]  # TRL logs rewards by it
    return call


def check_rewards(returned: Any, count: int, path: str) -> list[float | None]:
    """`returned` as a list of floats and None. Raises DataError where it is not `count` finite numbers or None."""
    try:
        values = [None if value is None else float(value) for value in returned]
    except (TypeError, ValueError) as error:
        raise DataError(
            f"reward {path!r}: expected a list of {count} numbers, found {returned!r:.80} ({error})"
        ) from None
    if len(values) != count:
        raise DataError(f"reward {path!r}: expected {count} numbers, one an answer, found {len(values)}")
    for at, value in enumerate(values):
        if value is not None and not math.isfinite(value):
            raise DataError(
                f"reward {path!r}: expected finite numbers, found {value} for answer {at + 1} of {count}: return None "
                "where there is no reward"
            )
    return values


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
