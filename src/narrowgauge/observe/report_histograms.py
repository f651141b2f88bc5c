"""Exponent histograms of a run: those of a few steps, the first and the last among them."""

from __future__ import annotations

from typing import Any

import numpy as np

from narrowgauge.observe.report_precision import Cell

KEPT = 8
LOWEST, HIGHEST = -160, 140  # float32's exponents lie between


class HistogramReader:
    """Takes in `histograms` rows; keeps at most 2 * `KEPT` of them, evenly spread, and the last."""

    def __init__(self) -> None:
        self.rows = 0
        self._every = 1
        self._kept: list[tuple[int, dict[Cell, tuple[int, np.ndarray]]]] = []
        self._last: tuple[int, dict[Cell, tuple[int, np.ndarray]]] | None = None

    @property
    def keeps_next(self) -> bool:
        """Whether the next row is kept, wherever it stands; else it is only where it is the last."""
        return self.rows % self._every == 0

    def skip(self) -> None:
        """Pass a row over that is not kept, nor the last."""
        self.rows += 1

    def add(self, step: int, layers: Any) -> None:
        """Take in {layer: {role: {"low": exponent, "counts": [...], "zeros": n}}}; what is damaged is passed over."""
        found: dict[Cell, tuple[int, np.ndarray]] = {}
        for layer, roles in layers.items() if isinstance(layers, dict) else ():
            for role, histogram in roles.items() if isinstance(roles, dict) else ():
                counted = _counted(histogram)
                if counted is not None:
                    found[Cell(layer, role)] = counted
        self._last = step, found
        if self.keeps_next:
            self._kept.append(self._last)
            if len(self._kept) > 2 * KEPT:
                self._kept = self._kept[::2]
                self._every *= 2
        self.rows += 1

    def kept(self) -> list[tuple[int, dict[Cell, tuple[int, np.ndarray]]]]:
        """(step, {cell: (lowest exponent, shares of the values)}), at most `KEPT`, in order; exact zeros left out."""
        rows = self._kept
        if self._last is not None and (not rows or rows[-1] is not self._last):
            rows = [*rows, self._last]
        if len(rows) <= KEPT:
            return rows
        chosen = np.unique(np.linspace(0, len(rows) - 1, KEPT).round().astype(int))
        return [rows[at] for at in chosen]


def _counted(histogram: Any) -> tuple[int, np.ndarray] | None:
    """(lowest exponent, float32 shares); None where it is no histogram."""
    if not isinstance(histogram, dict):
        return None
    low, counts, zeros = histogram.get("low"), histogram.get("counts"), histogram.get("zeros", 0)
    if not isinstance(low, int) or not isinstance(counts, list) or not LOWEST <= low <= HIGHEST:
        return None
    try:
        values = np.array(counts, np.float64)
    except (ValueError, TypeError):
        return None
    if values.ndim != 1 or len(values) > HIGHEST - LOWEST or not (values >= 0).all():
        return None
    total = values.sum() + (zeros if isinstance(zeros, int | float) else 0)
    return low, (values / (total or 1)).astype(np.float32)
