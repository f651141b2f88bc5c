"""Numba kernels of the CPU for the 16-point Hadamard transform, equal in bits to `hadamard.transform`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from narrowgauge.numerics.hadamard import POINTS
from narrowgauge.numerics.kernels.numba_bits import INNER, borrow, hold, widen

f32 = np.float32

# columns of a panel: 16 rows of it lie in the first-level cache
PANEL = 256


@njit(**INNER)
def _signed(x: Any, sign: float, out: Any) -> None:
    for j in range(len(x)):
        out[j] = f32(widen(x[j]) * f32(sign))


@njit(**INNER)
def _butterfly(first: Any, second: Any) -> None:
    for j in range(len(first)):
        a, b = first[j], second[j]
        first[j], second[j] = f32(a + b), f32(a - b)


@njit(**INNER)
def _quarter(x: Any, out: Any) -> None:
    for j in range(len(out)):
        out[j] = f32(x[j] * f32(0.25))


@njit(nogil=True, cache=True)
def transform(x: Any, shape: Any, signs: Any, first: int, last: int, out: Any) -> None:
    """Groups of 16 rows `first` to `last` of a matrix into `out`, float32; rows beyond the last count as zeros."""
    rows, columns = shape
    scratch = np.empty((POINTS, PANEL), np.float32)
    x, out, panel = borrow(x), borrow(out), borrow(scratch)
    for group in range(first, last):
        for left in range(0, columns, PANEL):
            n = min(PANEL, columns - left)
            for k in range(POINTS):
                row = group * POINTS + k
                if row < rows:
                    at = row * columns + left
                    _signed(x[at : at + n], signs[k], panel[k])
                else:
                    panel[k, :n] = f32(f32(0.0) * signs[k])
            distance = 1
            while distance < POINTS:
                for k in range(POINTS):
                    if k & distance == 0:
                        _butterfly(panel[k, :n], panel[k + distance, :n])
                distance *= 2
            for k in range(POINTS):
                at = (group * POINTS + k) * columns + left
                _quarter(panel[k], out[at : at + n])
    hold(scratch)
