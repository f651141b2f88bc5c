"""Long series in few bins that keep their extremes, and arrays as short text."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

CAPACITY = 512  # bins: more than a chart has pixels for them
FEWEST = 32
BUDGET_BYTES = 256 << 20  # of all bins while a journal is read
# codes of 16 bits beside the values
MISSING, INFINITE, ZERO, LARGEST_CODE = 65535, 65534, 65533, 65500


class Bins:
    """Extremes of many series, sampled at the same steps, in at most `CAPACITY` bins of equally many samples.

    When all bins are full, neighbours are merged: any number of samples takes the same memory, and no extreme is lost.
    A missing value is NaN. New series and new measures may come at any time.
    """

    def __init__(self, capacity: int = CAPACITY, budget_bytes: int = BUDGET_BYTES) -> None:
        self.capacity, self.budget_bytes = capacity, budget_bytes
        self.series = 0
        self.samples = 0
        self.first = np.zeros(capacity, np.int64)  # the first and the last step of each bin
        self.last = np.zeros(capacity, np.int64)
        self._low: dict[str, np.ndarray] = {}
        self._high: dict[str, np.ndarray] = {}
        self._per_bin = 1
        self._in_last = 0
        self.count = 0  # bins in use

    def measures(self) -> list[str]:
        """In order of their first sample."""
        return list(self._low)

    def low(self, measure: str) -> np.ndarray:
        """float32 (series, bins): the least value of each bin."""
        return self._low[measure][: self.series, : self.count]

    def high(self, measure: str) -> np.ndarray:
        """float32 (series, bins): the greatest value of each bin."""
        return self._high[measure][: self.series, : self.count]

    def add(self, step: int, values: Mapping[str, Sequence[float] | np.ndarray]) -> None:
        """One sample: of each measure a value for each series, in the caller's order; new ones at the end."""
        self._make_room(max((len(column) for column in values.values()), default=0), values)
        if self.count == 0 or self._in_last == self._per_bin:
            if self.count == self.capacity:
                self.fold()
            if self.count == 0 or self._in_last == self._per_bin:
                self.first[self.count] = step
                self.count += 1
                self._in_last = 0
        at = self.count - 1
        self.last[at] = step
        self._in_last += 1
        self.samples += 1
        for measure, column in values.items():
            with np.errstate(over="ignore"):  # infinite, as float32 has it
                new = np.asarray(column, np.float32)
            for table, choose in ((self._low, np.fmin), (self._high, np.fmax)):
                held = table[measure][: len(new), at]
                choose(held, new, out=held)

    def fold(self) -> None:
        """Merge neighbouring bins."""
        count, odd = self.count, self.count % 2
        half = count // 2 + odd
        for table, choose in ((self._low, np.fmin), (self._high, np.fmax)):
            for measure, held in table.items():
                merged = choose(held[:, 0 : count - odd : 2], held[:, 1 : count - odd : 2])
                held[:, : half - odd] = merged
                if odd:
                    held[:, half - 1] = held[:, count - 1]
                held[:, half:] = np.nan
                table[measure] = held
        lasts = self.last[1:count:2].copy()
        self.first[:half] = self.first[0:count:2].copy()
        self.last[: len(lasts)] = lasts
        if odd:
            self.last[half - 1] = self.last[count - 1]
        else:
            self._in_last += self._per_bin
        self.count = half
        self._per_bin *= 2

    def _make_room(self, series: int, measures: Mapping[str, Any]) -> None:
        fresh = [measure for measure in measures if measure not in self._low]
        if series <= self.series and not fresh:
            return
        self.series = max(self.series, series)
        held = len(next(iter(self._low.values()))) if self._low else 0
        rows = held if held >= self.series else max(self.series, 2 * held)
        for table in (self._low, self._high):
            for measure in (*table, *fresh):
                old = table.get(measure)
                if old is None or len(old) < rows:
                    table[measure] = np.full((rows, self.capacity), np.nan, np.float32)
                    if old is not None:
                        table[measure][: len(old)] = old
        while self.capacity > FEWEST and rows * len(self._low) * self.capacity * 8 > self.budget_bytes:
            self._halve_capacity()

    def _halve_capacity(self) -> None:
        self.capacity //= 2
        while self.count > self.capacity:
            self.fold()
        self.first, self.last = self.first[: self.capacity].copy(), self.last[: self.capacity].copy()
        for table in (self._low, self._high):
            for measure, held in table.items():
                table[measure] = held[:, : self.capacity].copy()


def shrunk(low: np.ndarray, high: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """The same extremes in at most so many bins, by merging neighbours. low, high: (series, bins)."""
    while low.shape[1] > bins:
        if low.shape[1] % 2:
            low, high = (np.pad(each, ((0, 0), (0, 1)), constant_values=np.nan) for each in (low, high))
        low, high = np.fmin(low[:, ::2], low[:, 1::2]), np.fmax(high[:, ::2], high[:, 1::2])
    return low, high


def shrunk_steps(first: np.ndarray, last: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """First and last steps of the bins that `shrunk` makes."""
    while len(first) > bins:
        first, last = first[::2], np.append(last[1::2], last[-1:]) if len(last) % 2 else last[1::2]
    return first, last


def coded(low: np.ndarray, high: np.ndarray, is_log: bool) -> dict[str, Any]:
    """Extremes as 16-bit codes, (series, bins, 2), each series from its own least to its greatest value.

    value = least + code / 65500 * (greatest - least), of log2 |value| where is_log; 65535: missing, 65534: infinite,
    65533: zero of a log series, or minus infinity.
    """
    values = np.stack([low, high], axis=2).astype(np.float64)
    codes = np.full(values.shape, MISSING, np.uint16)
    codes[np.isposinf(values)] = INFINITE
    codes[np.isneginf(values) | ((values <= 0) if is_log else np.zeros(values.shape, bool))] = ZERO
    is_plain = np.isfinite(values) & ((values > 0) | (not is_log))
    scaled = np.log2(np.where(is_plain, values, 1.0)) if is_log else values
    least = np.where(is_plain, scaled, np.inf).min(axis=(1, 2), initial=np.inf)
    greatest = np.where(is_plain, scaled, -np.inf).max(axis=(1, 2), initial=-np.inf)
    least, greatest = (np.where(np.isfinite(each), each, 0.0) for each in (least, greatest))
    width = np.where(greatest > least, greatest - least, 1.0)
    with np.errstate(invalid="ignore"):
        plain = np.rint((scaled - least[:, None, None]) / width[:, None, None] * LARGEST_CODE)
    codes[is_plain] = plain[is_plain].astype(np.uint16)
    return {
        "log": is_log,
        "least": packed(least.astype(np.float32)),
        "width": packed(width.astype(np.float32)),
        "codes": packed(codes),
    }


def packed(values: np.ndarray) -> dict[str, str]:
    """An array of little-endian numbers as base64, with its type: "u16", "u32", "f32"."""
    kinds = {"uint16": "u16", "uint32": "u32", "float32": "f32"}
    data = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"))
    return {"type": kinds[values.dtype.name], "base64": base64.b64encode(data.tobytes()).decode()}
