"""Numba kernels of the CPU: amax, the cast to FP8 codes, and the way back.

They release the GIL, so that `cpu_threads` can run them over ranges of values at once. A loop touches at most three
arrays: beyond that LLVM gives up proving that they do not overlap, and stops vectorizing.

All arrays are flat and hold bits: `int32` those of float32, `uint16` of bfloat16, `int16` of float16, `uint8` codes. An
output that is not wanted is None, which Numba compiles away. A format is known by its number of mantissa bits, see
`_layout`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from narrowgauge.numerics.kernels.numba_bits import (
    INFINITY,
    INNER,
    MAGNITUDE,
    NAN,
    SIGN,
    bfloat16_bits,
    bits_of,
    float_of,
    shift_right,
    stream_line,
    widen,
)

i16, i32, f32 = np.int16, np.int32, np.float32

# values decoded into the first-level cache before they are streamed to memory
_BLOCK = 2048


@njit(**INNER)
def _layout(mantissa_bits: int) -> tuple[int, int, int, int]:
    """What the casts know of E4M3FN (3 mantissa bits) or E5M2 (2): shift, align, least, top.

    shift: mantissa bits of float32 that the format drops. align: shift as an exponent field, a float32 larger by that
    factor has the format's spacing as its ulp. least: exponent field of the smallest normal value. top: float32 bits of
    the largest value.
    """
    shift = 23 - mantissa_bits
    bias = (1 << (6 - mantissa_bits)) - 1
    top_code = 0x7E if mantissa_bits == 3 else 0x7B  # E5M2 keeps the highest exponent for infinity and NaN
    top = (top_code << shift) + ((127 - bias) << 23)
    return i32(shift), i32(shift << 23), i32((128 - bias) << 23), i32(top)


@njit(nogil=True, cache=True)
def amax(x: Any) -> int:
    """The largest magnitude of `x`, as bits: read as an integer, NaN is larger than infinity and so never lost."""
    largest = i32(0)
    if x.itemsize == 4:
        for i in range(len(x)):
            largest = max(largest, i32(x[i] & MAGNITUDE))
    else:
        for i in range(len(x)):
            largest = max(largest, i32(i32(x[i]) & i32(0x7FFF)))
    return largest


@njit(nogil=True, cache=True)
def cast(x: Any, scale: float, mantissa_bits: int, codes: Any, carrier: Any) -> None:
    """codes (uint8) = encode(x * scale), saturating; carrier = the values of the codes, as bits: uint16 or int32."""
    scale = f32(scale)
    shift, align, least, top = _layout(mantissa_bits)
    first = shift_right(i32(least + align), shift)
    for i in range(len(x)):
        bits = bits_of(f32(widen(x[i]) * scale))
        magnitude = i32(bits & MAGNITUDE)
        clamped = i32(min(magnitude, top))
        # a power of two whose ulp is the distance of the format's values here: adding it rounds, ties to even, once
        grid = i32(max(i32(clamped & INFINITY), least) + align)
        rounded = f32(float_of(clamped) + float_of(grid))
        is_nan = magnitude > INFINITY
        if codes is not None:
            steps = i32(bits_of(rounded) - grid)
            sign = i32(shift_right(bits, i32(24)) & i32(0x80))
            code = i32(i32(i32(shift_right(grid, shift) + steps) - first) | sign)
            codes[i] = np.uint8(i32(sign | i32(0x7F)) if is_nan else code)
        if carrier is not None:
            value = bits_of(f32(rounded - float_of(grid)))
            value = i32((NAN if is_nan else value) | i32(bits & SIGN))
            carrier[i] = i32(value >> 16) if carrier.itemsize == 2 else value


@njit(nogil=True, cache=True)
def count(x: Any, scale: float, mantissa_bits: int) -> tuple[int, int]:
    """How many values lie beyond the largest before the clamp, and how many that are not zero become zero."""
    scale = f32(scale)
    _, align, least, top = _layout(mantissa_bits)
    # the tie between zero and the smallest subnormal goes to zero
    half = i32(i32(least + align) - i32(24 << 23))
    saturated, flushed = i32(0), i32(0)
    for i in range(len(x)):
        value = f32(widen(x[i]))
        magnitude = i32(bits_of(f32(value * scale)) & MAGNITUDE)
        saturated += i32(magnitude > top) & i32(magnitude <= INFINITY)
        flushed += i32(magnitude <= half) & i32(value != f32(0.0))
    return saturated, flushed


@njit(nogil=True, cache=True)
def decode(codes: Any, scale: float, mantissa_bits: int, values: Any) -> None:
    """values = codes * scale, as bits: int32 (float32), or uint16 (bfloat16, rounded once to nearest even)."""
    scale = f32(scale)
    # Read as float16: its exponent is as wide as E5M2's or wider, so that subnormals need no case of their own. The
    # shifts are constants because Numba shifts by a variable in 64 bits; the mask takes E4M3FN's second sign bit away.
    is_e4m3 = mantissa_bits == 3
    rebias = f32(256.0) if is_e4m3 else f32(1.0)
    nan = i16(0x7F << 7) if is_e4m3 else i16(0x7F << 8)
    for i in range(len(codes)):
        code = i16(np.int8(codes[i]))
        half = i16(i16(code << 7) & i16(-0x4001)) if is_e4m3 else i16(code << 8)
        half = i16(0x7E00) if i16(half & i16(0x7FFF)) == nan else half
        bits = bits_of(f32(f32(widen(half) * rebias) * scale))
        values[i] = bfloat16_bits(bits) if values.itemsize == 2 else bits


@njit(nogil=True, cache=True)
def decode_streamed(codes: Any, scale: float, mantissa_bits: int, values: Any) -> None:
    """`decode` to float32 bits that start on a cache line, past the caches: for arrays larger than these."""
    scratch = np.empty(_BLOCK, np.int32)
    whole = len(codes) // _BLOCK * _BLOCK
    for start in range(0, whole, _BLOCK):
        decode(codes[start : start + _BLOCK], scale, mantissa_bits, scratch)
        for i in range(0, _BLOCK, 16):
            stream_line(scratch, i, values, start + i)
    decode(codes[whole:], scale, mantissa_bits, values[whole:])
