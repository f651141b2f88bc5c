"""Loops over the tiles of a run of a moment: from square-root codes to float32 scratch memory, and back.

Memory is given by address, as in `numba_parameters`. A run is whole tiles of one row, the last of which may be ragged.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from narrowgauge.numerics.kernels.numba_bits import INFINITY, MAGNITUDE, bits_of, float_of
from narrowgauge.optim.kernels.numba_memory import load, standalone, store

i8, i32, f32, u8 = np.int8, np.int32, np.float32, np.uint8

_LARGEST = f32(np.finfo(np.float32).max)
_NAN = f32(np.nan)
_MAGIC = f32(12582912.0)  # 1.5 * 2^23: added to a small number, it rounds it to a whole one, ties to even
INT8_MAX, UINT8_MAX = f32(127.0), f32(255.0)


@njit(nogil=True, cache=True, error_model="numpy")
def _expand_signed(codes: int, at: int, n: int, scale: float, out: int, to: int) -> None:
    for i in range(n):
        c = f32(load(0, i8, codes, at + i))
        store(1, f32, out, to + i, f32(f32(c * abs(c)) * scale))


@njit(nogil=True, cache=True, error_model="numpy")
def _expand_unsigned(codes: int, at: int, n: int, scale: float, out: int, to: int) -> None:
    for i in range(n):
        c = f32(load(0, u8, codes, at + i))
        store(1, f32, out, to + i, f32(f32(c * c) * scale))


@njit(nogil=True, cache=True, error_model="numpy")
def load_signed(codes: int, scales: int, at: int, n: int, tile: int, width: int, out: int) -> None:
    """out = code * |code| * scale of int8 codes; tile: number of the run's first one."""
    standalone()
    for t in range((n + width - 1) // width):
        start = t * width
        _expand_signed(codes, at + start, min(width, n - start), load(0, f32, scales, tile + t), out, start)


@njit(nogil=True, cache=True, error_model="numpy")
def load_unsigned(codes: int, scales: int, at: int, n: int, tile: int, width: int, out: int) -> None:
    """out = code * code * scale of uint8 codes; tile: number of the run's first one."""
    standalone()
    for t in range((n + width - 1) // width):
        start = t * width
        _expand_unsigned(codes, at + start, min(width, n - start), load(0, f32, scales, tile + t), out, start)


@njit(nogil=True, cache=True, error_model="numpy")
def _largest(values: int, at: int, n: int) -> int:
    """The largest magnitude as bits: NaN is larger than infinity."""
    largest = i32(0)
    for i in range(n):
        largest = max(largest, i32(bits_of(load(0, f32, values, at + i)) & MAGNITUDE))
    return largest


@njit(nogil=True, cache=True, error_model="numpy")
def _compress_signed(values: int, start: int, n: int, scale: float, codes: int, at: int) -> None:
    for i in range(n):
        x = load(0, f32, values, start + i)
        scaled = f32(abs(x) * scale)
        root = f32(np.sqrt(scaled if scaled > f32(0.0) else f32(0.0)))
        code = bits_of(f32((root if root < INT8_MAX else INT8_MAX) + _MAGIC))
        store(1, i8, codes, at + i, i8(i32(-code) if bits_of(x) < i32(0) else code))


@njit(nogil=True, cache=True, error_model="numpy")
def _compress_unsigned(values: int, start: int, n: int, scale: float, codes: int, at: int) -> None:
    for i in range(n):
        x = load(0, f32, values, start + i)
        scaled = f32(x * scale)
        root = f32(np.sqrt(scaled if scaled > f32(0.0) else f32(0.0)))
        least = f32(1.0) if x > f32(0.0) else f32(0.0)
        root = root if root > least else least
        store(1, u8, codes, at + i, u8(bits_of(f32((root if root < UINT8_MAX else UINT8_MAX) + _MAGIC))))


@njit(nogil=True, cache=True, error_model="numpy")
def _scale_of(largest: int, limit: float) -> float:
    """quant_scale of a tile by `scaling.quant_scale_of`."""
    if largest == i32(0) or largest >= INFINITY:
        return f32(1.0)
    scale = f32(limit / float_of(largest))
    return scale if scale <= _LARGEST else _LARGEST


@njit(nogil=True, cache=True, error_model="numpy")
def _stored(largest: int, scale: float) -> float:
    """The tile's dequant_scale: NaN says what the codes cannot."""
    return _NAN if largest > INFINITY else f32(f32(1.0) / scale)


@njit(nogil=True, cache=True, error_model="numpy")
def store_signed(values: int, n: int, width: int, codes: int, scales: int, at: int, tile: int) -> int:
    """codes, scales = values on the square-root curve in INT8; returns the bits of the largest magnitude."""
    standalone()
    most = i32(0)
    for t in range((n + width - 1) // width):
        start = t * width
        count = min(width, n - start)
        largest = _largest(values, start, count)
        scale = _scale_of(largest, f32(INT8_MAX * INT8_MAX))
        store(1, f32, scales, tile + t, _stored(largest, scale))
        _compress_signed(values, start, count, scale, codes, at + start)
        most = max(most, largest)
    return most


@njit(nogil=True, cache=True, error_model="numpy")
def store_unsigned(values: int, n: int, width: int, codes: int, scales: int, at: int, tile: int) -> int:
    """codes, scales = values on the square-root curve in UINT8, none but zero to zero; returns as `store_signed`."""
    standalone()
    most = i32(0)
    for t in range((n + width - 1) // width):
        start = t * width
        count = min(width, n - start)
        largest = _largest(values, start, count)
        scale = _scale_of(largest, f32(UINT8_MAX * UINT8_MAX))
        store(1, f32, scales, tile + t, _stored(largest, scale))
        _compress_unsigned(values, start, count, scale, codes, at + start)
        most = max(most, largest)
    return most
