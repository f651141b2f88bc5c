"""Versions of the libraries that the parts of this package are for."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from narrowgauge.errors import ConfigError


def require(package: str, least: str, install: str) -> None:
    """Raise ConfigError where `package` is missing or older than version `least`.

    install: what to give pip, e.g. "narrowgauge[hf]".
    """
    try:
        found = version(package)
    except PackageNotFoundError as error:
        raise ConfigError(f"{package} is not installed: pip install '{install}'") from error
    if numbers(found) < numbers(least):
        raise ConfigError(
            f"expected {package} {least} or newer, found {found}: pip install --upgrade '{package}>={least}'"
        )


def numbers(text: str) -> tuple[int, ...]:
    """(1, 15, 0) of "1.15.0.dev0"."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()
