"""Numba kernels of the CPU that pack 4-bit and 6-bit codes into bytes and back, see `numerics.packing`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

u8 = np.uint8


@njit(nogil=True, cache=True)
def pack4(codes: Any, columns: int, out: Any) -> None:
    """Rows of `columns` 4-bit codes: two a byte, the even column in the low nibble."""
    width = (columns + 1) // 2
    for row in range(len(codes) // columns):
        source = codes[row * columns : row * columns + columns]
        target = out[row * width : row * width + width]
        for j in range(columns // 2):
            target[j] = u8((source[2 * j] & 0xF) | (source[2 * j + 1] << 4))
        if columns % 2:
            target[width - 1] = u8(source[columns - 1] & 0xF)


@njit(nogil=True, cache=True)
def unpack4(packed: Any, columns: int, out: Any) -> None:
    """The way back of `pack4`."""
    width = (columns + 1) // 2
    for row in range(len(out) // columns):
        source = packed[row * width : row * width + width]
        target = out[row * columns : row * columns + columns]
        for j in range(columns // 2):
            target[2 * j] = u8(source[j] & 0xF)
            target[2 * j + 1] = u8(source[j] >> 4)
        if columns % 2:
            target[columns - 1] = u8(source[width - 1] & 0xF)


@njit(nogil=True, cache=True)
def pack6(codes: Any, columns: int, out: Any) -> None:
    """Rows of `columns` 6-bit codes: four in three bytes, the first code in the lowest bits."""
    width = (6 * columns + 7) // 8
    last = np.zeros(4, np.uint8)
    for row in range(len(codes) // columns):
        source = codes[row * columns : row * columns + columns]
        target = out[row * width : row * width + width]
        whole = columns // 4
        for j in range(whole):
            a, b, c, d = source[4 * j], source[4 * j + 1], source[4 * j + 2], source[4 * j + 3]
            target[3 * j] = u8((a & 0x3F) | (b << 6))
            target[3 * j + 1] = u8(((b & 0x3F) >> 2) | (c << 4))
            target[3 * j + 2] = u8(((c & 0x3F) >> 4) | (d << 2))
        if columns % 4:
            last[:] = 0
            for k in range(columns % 4):
                last[k] = u8(source[4 * whole + k] & 0x3F)
            bits = last[0] | (last[1] << 6) | (last[2] << 12)
            for k in range(width - 3 * whole):
                target[3 * whole + k] = u8(bits >> (8 * k))


@njit(nogil=True, cache=True)
def unpack6(packed: Any, columns: int, out: Any) -> None:
    """The way back of `pack6`."""
    width = (6 * columns + 7) // 8
    for row in range(len(out) // columns):
        source = packed[row * width : row * width + width]
        target = out[row * columns : row * columns + columns]
        whole = columns // 4
        for j in range(whole):
            a, b, c = source[3 * j], source[3 * j + 1], source[3 * j + 2]
            target[4 * j] = u8(a & 0x3F)
            target[4 * j + 1] = u8(((a >> 6) | (b << 2)) & 0x3F)
            target[4 * j + 2] = u8(((b >> 4) | (c << 4)) & 0x3F)
            target[4 * j + 3] = u8(c >> 2)
        if columns % 4:
            bits = 0
            for k in range(width - 3 * whole):
                bits |= int(source[3 * whole + k]) << (8 * k)
            for k in range(columns % 4):
                target[4 * whole + k] = u8((bits >> (6 * k)) & 0x3F)
