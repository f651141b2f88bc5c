"""Numba kernels of the CPU: the cast to float16 codes with one scale, which saturate, and the way back.

Arrays are flat and hold bits, as in `numba_cast`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from narrowgauge.numerics.formats import FP16
from narrowgauge.numerics.kernels.numba_bits import (
    INFINITY,
    MAGNITUDE,
    bfloat16_bits,
    bits_of,
    float_of,
    layout,
    shift_right,
    stream_line,
    widen,
)

i32, f32 = np.int32, np.float32

_SHIFT, _LEAST, _TOP = map(i32, layout(FP16)[:3])
_ALIGN, _FLOOR = i32(int(_SHIFT) << 23), i32(layout(FP16, nonzero=True)[6])
_FIRST = i32(int(_LEAST) >> int(_SHIFT))
# values decoded into the first-level cache before they are streamed to memory
_BLOCK = 2048


@njit(nogil=True, cache=True)
def encode(x: Any, scale: float, nonzero: bool, codes: Any) -> None:
    """codes (uint16) = float16 of x * scale, to nearest even, saturating. nonzero: nothing but zero goes to zero."""
    scale, floor = f32(scale), _FLOOR if nonzero else i32(0)
    for i in range(len(x)):
        value = f32(widen(x[i]))
        bits = bits_of(f32(value * scale))
        magnitude = i32(bits & MAGNITUDE)
        lifted = max(magnitude, floor) if value != f32(0.0) else magnitude
        clamped = i32(min(lifted, _TOP))
        # a power of two whose ulp is the distance of float16's values here: adding it rounds, ties to even, once
        exponent = i32(max(i32(clamped & INFINITY), _LEAST))
        grid = i32(exponent + _ALIGN)
        steps = i32(bits_of(f32(float_of(clamped) + float_of(grid))) - grid)
        code = i32(i32(steps + shift_right(exponent, _SHIFT)) - _FIRST)
        sign = i32(shift_right(bits, i32(16)) & i32(0x8000))
        codes[i] = np.uint16(i32(sign | (i32(0x7E00) if magnitude > INFINITY else code)))


@njit(nogil=True, cache=True)
def decode(codes: Any, scale: float, values: Any) -> None:
    """values = codes (int16) * scale, as bits: int32 (float32), or uint16 (bfloat16, rounded once to nearest even)."""
    scale = f32(scale)
    for i in range(len(codes)):
        bits = bits_of(f32(widen(codes[i]) * scale))
        values[i] = bfloat16_bits(bits) if values.itemsize == 2 else bits


@njit(nogil=True, cache=True)
def decode_streamed(codes: Any, scale: float, values: Any) -> None:
    """`decode` to float32 bits that start on a cache line, past the caches: for arrays larger than these."""
    scratch = np.empty(_BLOCK, np.int32)
    whole = len(codes) // _BLOCK * _BLOCK
    for start in range(0, whole, _BLOCK):
        decode(codes[start : start + _BLOCK], scale, scratch)
        for i in range(0, _BLOCK, 16):
            stream_line(scratch, i, values, start + i)
    decode(codes[whole:], scale, values[whole:])
