"""What values of a configuration have to be, told in one form of words."""

from __future__ import annotations

import math
from typing import Any

from narrowgauge.errors import ConfigError


def require(holds: bool, key: str, value: Any, expected: str) -> None:
    """Raise ConfigError, which names the key, unless `holds`."""
    if not holds:
        raise ConfigError(f"{key}={value!r}: expected {expected}: change {key}")


def is_number(value: Any) -> bool:
    """True for integers and floats, NaN among them; not for True and False."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: float) -> bool:
    """True for numbers that are neither infinite nor NaN."""
    return isinstance(value, int) or math.isfinite(value)  # isfinite refuses integers beyond a float
