"""Numba kernels of the CPU that a linear layer needs beside casts: a transposed copy, and the sum of every column."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

i32, f32, u64 = np.int32, np.float32, np.uint64

_BLOCK = 64  # rows added up before they join the total, so that rounding errors do not pile up over all rows
_TILE = 16  # quads of rows: a tile of rows of the source stays in the cache until its lines are used up

_LOW_16 = u64(0x0000FFFF0000FFFF)
_LOW_32 = u64(0x00000000FFFFFFFF)


@njit(nogil=True, cache=True)
def column_sum(x: Any, first: int, last: int, total: Any) -> None:
    """total[first:last] = float32 sums of these columns of `x` [rows, columns]: float32, or uint16 bits of bfloat16."""
    part = np.zeros(last - first, np.float32)
    bits = np.zeros(last - first, np.int32)
    values = bits.view(np.float32)
    total[first:last] = f32(0)
    for block in range(0, x.shape[0], _BLOCK):
        part[:] = f32(0)
        for r in range(block, min(block + _BLOCK, x.shape[0])):
            row = x[r, first:last]
            if x.itemsize == 2:
                for c in range(len(part)):
                    bits[c] = i32(row[c]) << i32(16)
                for c in range(len(part)):
                    part[c] += values[c]
            else:
                for c in range(len(part)):
                    part[c] += row[c]
        for c in range(len(part)):
            total[first + c] += part[c]


@njit(nogil=True, cache=True)
def transpose(x: Any, first: int, last: int, out: Any) -> None:
    """out = x.T for 16-bit elements, four to a `uint64`: x [rows, columns / 4], out [columns, rows / 4].

    Takes the quads of columns first to last. Every step turns a square of four by four elements.
    """
    quads = x.shape[0] // 4
    for tile in range(0, quads, _TILE):
        for c in range(first, last):
            for r in range(tile, min(tile + _TILE, quads)):
                row_0, row_1, row_2, row_3 = x[4 * r, c], x[4 * r + 1, c], x[4 * r + 2, c], x[4 * r + 3, c]
                # pairs: elements 0 and 2 of two rows side by side, then 1 and 3
                even_01 = (row_0 & _LOW_16) | ((row_1 & _LOW_16) << u64(16))
                odd_01 = ((row_0 >> u64(16)) & _LOW_16) | (row_1 & ~_LOW_16)
                even_23 = (row_2 & _LOW_16) | ((row_3 & _LOW_16) << u64(16))
                odd_23 = ((row_2 >> u64(16)) & _LOW_16) | (row_3 & ~_LOW_16)
                out[4 * c, r] = (even_01 & _LOW_32) | (even_23 << u64(32))
                out[4 * c + 1, r] = (odd_01 & _LOW_32) | (odd_23 << u64(32))
                out[4 * c + 2, r] = (even_01 >> u64(32)) | (even_23 & ~_LOW_32)
                out[4 * c + 3, r] = (odd_01 >> u64(32)) | (odd_23 & ~_LOW_32)
