"""The exception family: every error a user can cause is one of these.

Each message says what was expected, what was found, and what to do about it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class NarrowgaugeError(Exception):
    """Base of all errors raised for a reason that the caller can mend.

    is_told_elsewhere: whether another process of the same run has this error, too, and tells the user.
    """

    is_told_elsewhere = False


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


class UnknownCorpusError(DataError, ConfigError):
    """The name or pattern given for a corpus leads to no text: missing text, and a wrong argument."""


class DivergenceError(NarrowgaugeError):
    """Training cannot go on: too many skipped steps, or a loss that is not finite."""


class ProcessError(NarrowgaugeError):
    """The processes of a run disagree, or one of them is gone, hangs or has failed; the message names it."""


def closest(name: str, valid: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the closest valid names, or a list of all where none is close.

    Case, and `-` or a blank for `_`, make no difference. A name that begins valid ones suggests up to three of them.
    """
    by_key = {_key(v): v for v in valid}
    key = _key(name)
    if key in by_key:
        near = [key]
    else:  # difflib scores beginnings low: "fp8" would be closer to "fp32" than to "fp8_current"
        near = [k for k in by_key if key and k.startswith(key)][:3]
    near = near or difflib.get_close_matches(key, by_key, n=1, cutoff=0.5)
    near = near or [k for k in by_key if k and key.startswith(k)][:1]
    if near:
        return f"; did you mean {' or '.join(repr(by_key[k]) for k in near)}?"
    return f"; valid: {', '.join(sorted(by_key.values())) or 'none'}"


def _key(name: str) -> str:
    return name.lower().replace("-", "_").replace(" ", "_")
