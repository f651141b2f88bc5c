"""JSON that every reader takes: the numbers that it has no digits for are the texts "NaN", "Infinity", "-Infinity".

Everything that this project writes as JSON has them so: journals, results of benchmarks, what commands print.
"""

from __future__ import annotations

import json
import math
from typing import Any

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def dumps(value: Any, **options: Any) -> str:
    """`json.dumps` in that form. options: its own, but for allow_nan."""
    return json.dumps(_written(value), allow_nan=False, **options)


def loads(text: str | bytes) -> Any:
    """`json.loads`, with those texts as numbers again. Raises ValueError."""
    return restored(json.loads(text))


def restored(value: Any) -> Any:
    """`value` with floats in place of those texts, keys left alone."""
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [restored(item) for item in value]
    return value


def _written(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {str(key): _written(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_written(item) for item in value]
    return value
