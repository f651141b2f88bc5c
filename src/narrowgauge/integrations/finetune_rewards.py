"""Reward functions by import path."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from narrowgauge.errors import ConfigError

Reward = Callable[..., Any]


def reward_function(path: str) -> Reward:
    """The function at `package.module:function`.

    It is to be called as TRL calls one: with `prompts`, `completions` and the other columns of the data, each a list of
    one item an answer, for a number each, or None where it has no opinion. `rewards.checked` holds it to that.

    Raises ConfigError where there is no such function, or its module cannot be imported.
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
    return function


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
