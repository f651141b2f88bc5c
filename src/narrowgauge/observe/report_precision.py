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
_FLOAT = frozenset({float})
MOST_SHAPES = 8  # remembered: of whole samples, and of operands alone; each for the recipes that a run goes through
ALL_LAYERS = "all layers (mean)"  # of schema 1, which has means over the layers


Names = tuple[tuple[str, str, tuple[str, ...]], ...]  # layer, role and measures of each cell of a row


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


class Shape(NamedTuple):
    """What a row's numbers are. columns: of each measure the places of its numbers among all, and their cells.

    seen: the cells of the row, those without a number among them.
    """

    columns: dict[str, tuple[np.ndarray, np.ndarray]]
    seen: frozenset[Cell]


class PrecisionReader:
    """Takes in `precision` rows, in order; memory does not grow with their number."""

    def __init__(self, tallies: Mapping[str, Tally]) -> None:
        self.cells: list[Cell] = []
        self.bins = Bins()
        self.tallies = dict(tallies)
        self.steps_sampled: list[int] = []  # the first and the last two with measures: how often was sampled
        self.empty = 0  # rows in which nothing was cast
        self._index: dict[Cell, int] = {}
        self._shapes: dict[Names, Shape] = {}
        self._calm_of: tuple[Shape, np.ndarray] | None = None  # of the row before

    @property
    def samples(self) -> int:
        """Rows in which something was measured."""
        return self.bins.samples - self.empty

    def add(self, step: int, layers: Any) -> None:
        """Take in {layer: {role: {measure: number}}}; what is no number is passed over."""
        names, values = _flat(layers)
        is_plain = _FLOAT.issuperset(map(type, values))
        shape = self._shapes.get(names) if is_plain else None
        if shape is None:
            shape = self._shape(names, [_is_number(value) for value in values])
            if is_plain and len(self._shapes) < MOST_SHAPES:
                self._shapes[names] = shape
        self._take(step, np.array(values if is_plain else [v if _is_number(v) else 0.0 for v in values]), shape)

    def _shape(self, names: Names, are_numbers: Sequence[bool]) -> Shape:
        at = 0
        columns: dict[str, tuple[list[int], list[int]]] = {}
        for layer, role, measures in names:
            for measure in measures:
                if are_numbers[at]:
                    places, cells = columns.setdefault(measure, ([], []))
                    places.append(at)
                    cells.append(self._at(Cell(layer, role)))
                at += 1
        arrays = {measure: (np.array(places), np.array(cells)) for measure, (places, cells) in columns.items()}
        return Shape(arrays, frozenset(Cell(layer, role) for layer, role, _ in names))

    def _take(self, step: int, values: np.ndarray, shape: Shape) -> None:
        nothing = np.full(len(self.cells), math.nan)
        columns: dict[str, np.ndarray] = {}
        for measure, (places, cells) in shape.columns.items():
            column = columns[measure] = nothing.copy()
            column[cells] = values[places]
            if measure in ("amax", "scale"):  # NaN where a value was: beyond all, and no missing one
                column[cells[np.isnan(column[cells])]] = math.inf
        self.bins.add(step, columns)
        if columns:
            self.steps_sampled = [*self.steps_sampled[:1], *self.steps_sampled[-1:], step][-3:]
        else:
            self.empty += 1
        is_calm = self._calm(shape)
        for measure, tally in self.tallies.items():
            tally.add(step, columns.get(measure, nothing), self.cells, is_calm)

    def _calm(self, shape: Shape) -> np.ndarray:
        """Of each cell whether it was looked at, and is not cast."""
        known = self._calm_of
        if known is None or known[0] is not shape or len(known[1]) != len(self.cells):
            looked_at = OPERANDS | (STATE if any(role in STATE for _, role in shape.seen) else frozenset())
            calm = [cell.role in looked_at and cell not in shape.seen for cell in self.cells]
            self._calm_of = known = shape, np.array(calm, bool)
        return known[1]

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


def _flat(layers: Any) -> tuple[Names, list[Any]]:
    """(the names in a row, its values), in order."""
    names: list[tuple[str, str, tuple[str, ...]]] = []
    values: list[Any] = []
    for layer, roles in layers.items() if isinstance(layers, dict) else ():
        for role, measures in roles.items() if isinstance(roles, dict) else ():
            if isinstance(measures, dict):
                names.append((layer, role, tuple(measures)))
                values.extend(measures.values())
    return tuple(names), values


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < _LARGEST)
