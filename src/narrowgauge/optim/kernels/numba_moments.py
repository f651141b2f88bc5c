"""Loops over the tiles of a run of a moment: from square-root codes to float32 scratch memory, and back.

Memory is given by address, as in `numba_parameters`. A run is whole tiles of one row, the last of which may be ragged.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from narrowgauge.numerics.kernels.numba_bits import INFINITY, INNER, MAGNITUDE, bits_of, float_of
from narrowgauge.optim.kernels.numba_memory import load, standalone, store, widest

i8, i32, f32, u8 = np.int8, np.int32, np.float32, np.uint8

_LARGEST = f32(np.finfo(np.float32).max)
_NAN = f32(np.nan)
MAGIC = f32(12582912.0)  # 1.5 * 2^23: added to a small number, it rounds it to a whole one, ties to even
# sqrt(x) * sqrt(scale) is off from sqrt(x * scale), at most 255, by at most 5 * 2^-24 of it: 8e-5
TRUSTED = f32(0.5 - 1e-4)
INT8_MAX, UINT8_MAX = f32(127.0), f32(255.0)


@njit(**INNER, error_model="numpy")
def _expand_signed(codes: int, at: int, n: int, scale: float, out: int, to: int) -> None:
    widest()
    for i in range(n):
        c = f32(load(0, i8, codes, at + i))
        store(1, f32, out, to + i, f32(f32(c * abs(c)) * scale))


@njit(**INNER, error_model="numpy")
def _expand_unsigned(codes: int, at: int, n: int, scale: float, out: int, to: int) -> None:
    widest()
    for i in range(n):
        c = f32(load(0, u8, codes, at + i))
        store(1, f32, out, to + i, f32(f32(c * c) * scale))


@njit(**INNER, error_model="numpy")
def load_signed(codes: int, scales: int, at: int, n: int, tile: int, width: int, out: int) -> None:
    """out = code * |code| * scale of int8 codes; tile: number of the run's first one."""
    standalone()
    for t in range((n + width - 1) // width):
        start = t * width
        _expand_signed(codes, at + start, min(width, n - start), load(0, f32, scales, tile + t), out, start)


@njit(**INNER, error_model="numpy")
def load_unsigned(codes: int, scales: int, at: int, n: int, tile: int, width: int, out: int) -> None:
    """out = code * code * scale of uint8 codes; tile: number of the run's first one."""
    standalone()
    for t in range((n + width - 1) // width):
        start = t * width
        _expand_unsigned(codes, at + start, min(width, n - start), load(0, f32, scales, tile + t), out, start)


@njit(**INNER, error_model="numpy")
def largest_of(values: int, at: int, n: int) -> int:
    """The largest magnitude as bits: NaN is larger than infinity."""
    widest()
    largest = i32(0)
    for i in range(n):
        largest = max(largest, i32(bits_of(load(0, f32, values, at + i)) & MAGNITUDE))
    return largest


@njit(**INNER, error_model="numpy")
def _compress_signed(values: int, start: int, n: int, scale: float, codes: int, at: int) -> None:
    widest()
    for i in range(n):
        x = load(0, f32, values, start + i)
        scaled = f32(abs(x) * scale)
        root = f32(np.sqrt(scaled if scaled > f32(0.0) else f32(0.0)))
        code = bits_of(f32((root if root < INT8_MAX else INT8_MAX) + MAGIC))
        store(1, i8, codes, at + i, i8(i32(-code) if bits_of(x) < i32(0) else code))


@njit(**INNER, error_model="numpy")
def compress_unsigned(values: int, start: int, n: int, scale: float, codes: int, at: int) -> None:
    widest()
    for i in range(n):
        x = load(0, f32, values, start + i)
        scaled = f32(x * scale)
        root = f32(np.sqrt(scaled if scaled > f32(0.0) else f32(0.0)))
        root = root if root < UINT8_MAX else UINT8_MAX
        least = f32(1.0) if x > f32(0.0) else f32(0.0)
        store(1, u8, codes, at + i, u8(bits_of(f32((root if root > least else least) + MAGIC))))


@njit(**INNER, error_model="numpy")
def scale_of(largest: int, limit: float) -> float:
    """quant_scale of a tile by `scaling.quantscale_of`."""
    if largest == i32(0) or largest >= INFINITY:
        return f32(1.0)
    scale = f32(limit / float_of(largest))
    return scale if scale <= _LARGEST else _LARGEST


@njit(**INNER, error_model="numpy")
def stored(largest: int, scale: float) -> float:
    """The tile's dequant_scale: NaN says what the codes cannot."""
    return _NAN if largest > INFINITY else f32(f32(1.0) / scale)


@njit(**INNER, error_model="numpy")
def store_signed(values: int, n: int, width: int, codes: int, scales: int, at: int, tile: int) -> int:
    """codes, scales = values on the square-root curve in INT8; returns the bits of the largest magnitude."""
    standalone()
    most = i32(0)
    for t in range((n + width - 1) // width):
        start = t * width
        count = min(width, n - start)
        largest = largest_of(values, start, count)
        scale = scale_of(largest, f32(INT8_MAX * INT8_MAX))
        store(1, f32, scales, tile + t, stored(largest, scale))
        _compress_signed(values, start, count, scale, codes, at + start)
        most = max(most, largest)
    return most


@njit(**INNER, error_model="numpy")
def _compress_roots(roots: int, start: int, n: int, factor: float, codes: int, at: int) -> bool:
    """`compress_unsigned` of finite values by their square roots; factor: the root of the scale.

    Returns whether the codes can be trusted: whether no value came closer to a tie than its rounding error.
    """
    widest()
    farthest = i32(0)
    for i in range(n):
        size = load(0, f32, roots, start + i)
        root = f32(size * factor)  # at most 255 and its rounding error, which rounding takes away
        least = f32(1.0) if size > f32(0.0) else f32(0.0)
        root = root if root > least else least
        rounded = f32(root + MAGIC)
        farthest = max(farthest, bits_of(abs(f32(root - f32(rounded - MAGIC)))))
        store(1, u8, codes, at + i, u8(bits_of(rounded)))
    return float_of(farthest) < TRUSTED


@njit(**INNER, error_model="numpy")
def store_unsigned(values: int, roots: int, n: int, width: int, codes: int, scales: int, at: int, tile: int) -> int:
    """codes, scales = values on the square-root curve in UINT8, none but zero to zero; returns as `store_signed`.

    roots: of the values, correctly rounded.
    """
    standalone()
    most = i32(0)
    for t in range((n + width - 1) // width):
        start = t * width
        count = min(width, n - start)
        largest = largest_of(values, start, count)
        scale = scale_of(largest, f32(UINT8_MAX * UINT8_MAX))
        store(1, f32, scales, tile + t, stored(largest, scale))
        if largest >= INFINITY or not _compress_roots(roots, start, count, f32(np.sqrt(scale)), codes, at + start):
            compress_unsigned(values, start, count, scale, codes, at + start)
        most = max(most, largest)
    return most
