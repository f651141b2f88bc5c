"""What the sampled steps of a run say of each layer and role: series, and a tally of each measure for the rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from narrowgauge.observe.report_bins import Bins
from narrowgauge.recipes.spec import MOMENT_ROLES, OPERAND_ROLES

ROLES = ("input", "weight", "grad_output", "grad", "exp_avg", "exp_avg_sq", "param", "collective")
MEASURES = ("sqnr_db", "saturated", "flushed", "zero", "lost", "amax", "scale")
OPERANDS = frozenset(OPERAND_ROLES)
STATE = frozenset({*MOMENT_ROLES, "param"})  # looked at together, and not in every sample
_LARGEST = 1 << 127  # below the end of float32
ALL_LAYERS = "all layers (mean)"  # of schema 1, which has means over the layers


class Cell(NamedTuple):
    """One role of one layer."""

    layer: str
    role: str


class Tally:
    """What one measure did in each cell, as arrays over the cells.

    first, worst, last: values, NaN where there was no sample. Of each limit, (limits, cells): beyond, samples at or
    beyond it; since and until, the first and the last such step; streak, the first of the latest such samples in a row;
    calm, samples since, those in which the cell was not cast any more among them. Steps are -1 where there is none.
    """

    def __init__(self, limits_of: Callable[[Cell], tuple[float, ...]], limits: int, worst_is_low: bool = False) -> None:
        """limits_of: so many limits for a cell; NaN: it has none."""
        self.limits_of, self.worst_is_low = limits_of, worst_is_low
        self._limits = np.zeros((limits, 0))
        self.first = self.worst = self.last = np.zeros(0)
        self.worst_step = self.samples = np.zeros(0, np.int64)
        empty = np.zeros((limits, 0), np.int64)
        self.since, self.until, self.streak, self.beyond, self.calm = (empty.copy() for _ in range(5))

    def add(self, step: int, values: np.ndarray, cells: Sequence[Cell], is_calm: np.ndarray) -> None:
        """Take in a sample, (cells,), NaN where there is none. is_calm: the cell was looked at, and is not cast."""
        self._grow(cells)
        known = ~np.isnan(values)
        sign = -1.0 if self.worst_is_low else 1.0
        self.first = np.where(np.isnan(self.first), values, self.first)
        self.last = np.where(known, values, self.last)
        self.samples = self.samples + known
        is_worse = known & ~(sign * values <= sign * self.worst)
        self.worst = np.where(is_worse, values, self.worst)
        self.worst_step = np.where(is_worse, step, self.worst_step)
        for at, limits in enumerate(self._limits):
            with np.errstate(invalid="ignore"):
                is_beyond = known & (sign * values >= sign * limits)
            self.since[at] = np.where(is_beyond & (self.since[at] < 0), step, self.since[at])
            begins = is_beyond & ((self.streak[at] < 0) | (self.calm[at] > 0))
            self.streak[at] = np.where(begins, step, self.streak[at])
            self.until[at] = np.where(is_beyond, step, self.until[at])
            self.beyond[at] += is_beyond
            self.calm[at] = np.where(is_beyond, 0, self.calm[at] + (known | is_calm))

    def _grow(self, cells: Sequence[Cell]) -> None:
        more = len(cells) - len(self.first)
        if more <= 0:
            return
        fresh = np.array([self.limits_of(cell) for cell in cells[len(self.first) :]], np.float64)
        self._limits = np.concatenate([self._limits, fresh.T], axis=1)
        for name in ("first", "worst", "last"):
            setattr(self, name, np.pad(getattr(self, name), (0, more), constant_values=math.nan))
        self.worst_step = np.pad(self.worst_step, (0, more), constant_values=-1)
        self.samples = np.pad(self.samples, (0, more))
        for name, fill in (("since", -1), ("until", -1), ("streak", -1), ("beyond", 0), ("calm", 0)):
            setattr(self, name, np.pad(getattr(self, name), ((0, 0), (0, more)), constant_values=fill))


class PrecisionReader:
    """Takes in `precision` rows, in order; memory does not grow with their number."""

    def __init__(self, tallies: Mapping[str, Tally]) -> None:
        self.cells: list[Cell] = []
        self.bins = Bins()
        self.tallies = dict(tallies)
        self.steps_sampled: list[int] = []  # the first and the last two with measures: how often was sampled
        self.empty = 0  # rows in which nothing was cast
        self._index: dict[Cell, int] = {}

    @property
    def samples(self) -> int:
        """Rows in which something was measured."""
        return self.bins.samples - self.empty

    def add(self, step: int, layers: Any) -> None:
        """Take in {layer: {role: {measure: number}}}; what is no number is passed over."""
        columns: dict[str, list[float]] = {}
        seen: set[Cell] = set()
        for layer, roles in layers.items() if isinstance(layers, dict) else ():
            for role, measures in roles.items() if isinstance(roles, dict) else ():
                if not isinstance(measures, dict):
                    continue
                cell, at = Cell(layer, role), -1
                seen.add(cell)
                for measure, value in measures.items():
                    if type(value) is not float and not (type(value) is int and abs(value) < _LARGEST):
                        continue
                    at = self._at(cell) if at < 0 else at
                    column = columns.get(measure)
                    if column is None:
                        column = columns[measure] = [math.nan] * len(self._index)
                    elif len(column) <= at:
                        column.extend([math.nan] * (at + 1 - len(column)))
                    column[at] = math.inf if measure in ("amax", "scale") and value != value else value
        for column in columns.values():
            column.extend([math.nan] * (len(self.cells) - len(column)))
        self.bins.add(step, columns)
        if columns:
            self.steps_sampled = [*self.steps_sampled[:1], *self.steps_sampled[-1:], step][-3:]
        else:
            self.empty += 1
        roles_seen = OPERANDS | (STATE if any(cell.role in STATE for cell in seen) else frozenset())
        is_calm = np.array([cell.role in roles_seen and cell not in seen for cell in self.cells], bool)
        nothing = np.full(len(self.cells), math.nan)
        for measure, tally in self.tallies.items():
            tally.add(step, np.array(columns[measure]) if measure in columns else nothing, self.cells, is_calm)

    def summary(self) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
        """{layer: {role: {measure: {"first", "worst", "worst_step", "last"}}}} of the measures that rules look at."""
        found: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
        for measure, tally in self.tallies.items():
            for at in np.flatnonzero(tally.samples).tolist():
                cell = self.cells[at]
                found.setdefault(cell.layer, {}).setdefault(cell.role, {})[measure] = {
                    "first": float(tally.first[at]),
                    "worst": float(tally.worst[at]),
                    "worst_step": int(tally.worst_step[at]),
                    "last": float(tally.last[at]),
                }
        return found

    def _at(self, cell: Cell) -> int:
        at = self._index.get(cell)
        if at is None:
            at = self._index[cell] = len(self.cells)
            self.cells.append(cell)
        return at
