"""Runs of several processes."""

from __future__ import annotations

import math
from typing import Any


def ranks_of(parallel: dict[str, Any]) -> int:
    """Processes of a layout."""
    return math.prod(value for value in parallel.values() if value is not True)
