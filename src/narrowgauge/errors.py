"""The exception family: every error a user can cause is one of these.

Each message says what was expected, what was found, and what to do about it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class NarrowgaugeError(Exception):
    """Base of all errors raised for a reason that the caller can mend."""


class RecipeError(NarrowgaugeError):
    """A recipe, a field of one, or a cast specification is unknown or contradictory."""


class ConversionError(NarrowgaugeError):
    """A model cannot be converted as asked."""


class CheckpointError(NarrowgaugeError):
    """A checkpoint is missing, truncated, corrupt, or does not fit the model."""


class DataError(NarrowgaugeError):
    """Training text is missing, empty, binary, or does not fit the model."""


class ConfigError(NarrowgaugeError):
    """A configuration key or value is unknown or out of range."""


class DivergenceError(NarrowgaugeError):
    """Training cannot go on: too many skipped steps, or a loss that is not finite."""


def closest(name: str, valid: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the closest valid name, or a list of all where none is close."""
    valid = list(valid)
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    if not near:  # prefixes such as "fp8" score low against "fp8_current"
        near = [v for v in valid if v.startswith(name) or name.startswith(v)][:1]
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; valid: {', '.join(sorted(valid))}"
