"""What was asked of a measured figure, and whether it was found: {"measured": x, "at_least": a, "at_most": b}."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def is_met(figure: Mapping[str, Any]) -> bool:
    """True where what was measured lies inside its goals; NaN never does, nor null, as older files have it."""
    least, most, measured = figure.get("at_least", -math.inf), figure.get("at_most", math.inf), figure["measured"]
    return measured is not None and least <= measured <= most


def goal(figure: Mapping[str, Any]) -> str:
    """The goals in words: ">= 1", "<= 2", "1 to 2"."""
    if "at_least" in figure and "at_most" in figure:
        return f"{figure['at_least']:g} to {figure['at_most']:g}"
    return f"<= {figure['at_most']:g}" if "at_most" in figure else f">= {figure['at_least']:g}"
