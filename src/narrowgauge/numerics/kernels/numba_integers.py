"""Steps of a cast to integers, plain or on the square root, on a run of values: as `numba_rows`, which has the floats'.

Arrays and layouts are as there. Codes are bytes, in two's complement where the format is signed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from narrowgauge.numerics.kernels.numba_bits import (
    INFINITY,
    INNER,
    MAGNITUDE,
    SIGN,
    SQUARE_ROOTS,
    bits_of,
    float_of,
    widen,
)

i32, f32 = np.int32, np.float32

# the ulp here is 1: adding it rounds a smaller value to an integer, ties to even
_UNITS = np.float32(8388608.0)


@njit(**INNER)
def lifted_row(x: Any, scales: Any, least: int, scaled: Any) -> None:
    """scaled = x * scales, as bits, of a magnitude of at least `least` (bits) where x is not zero."""
    least = i32(least)
    for i in range(len(scaled)):
        value = f32(widen(x[i]))
        bits = bits_of(f32(value * scales[i]))
        magnitude = max(i32(bits & MAGNITUDE), least if value != f32(0.0) else i32(0))
        scaled[i] = i32(magnitude | i32(bits & SIGN))


@njit(**INNER)
def _code(bits: int, top: int, signed: bool, root: bool) -> int:
    """The code of a scaled value: NaN has 0, and so have negative values where there are no such codes."""
    magnitude = i32(bits & MAGNITUDE)
    value = float_of(i32(min(magnitude, top)))
    if root:
        value = f32(math.sqrt(value))
    code = i32(bits_of(f32(value + _UNITS)) - bits_of(_UNITS))
    negative = -code if signed else i32(0)
    code = negative if bits < i32(0) else code
    return i32(0) if magnitude > INFINITY else i32(code)


@njit(**INNER)
def encode_row(scaled: Any, layout: Any, codes: Any) -> None:
    """codes = encode(scaled), to nearest even, saturating."""
    top, signed = i32(layout[2]), layout[1] != 0
    if layout[5] == SQUARE_ROOTS:
        for i in range(len(codes)):
            codes[i] = np.uint8(_code(scaled[i], top, signed, True))
    else:
        for i in range(len(codes)):
            codes[i] = np.uint8(_code(scaled[i], top, signed, False))


@njit(**INNER)
def decode_row(codes: Any, layout: Any, values: Any) -> None:
    """values = decode(codes), as bits of float32."""
    if layout[5] == SQUARE_ROOTS:
        if layout[1]:
            for i in range(len(codes)):
                code = i32(np.int8(codes[i]))
                values[i] = bits_of(f32(i32(code * abs(code))))
        else:
            for i in range(len(codes)):
                code = i32(codes[i])
                values[i] = bits_of(f32(i32(code * code)))
    elif layout[1]:
        for i in range(len(codes)):
            values[i] = bits_of(f32(i32(np.int8(codes[i]))))
    else:
        for i in range(len(codes)):
            values[i] = bits_of(f32(i32(codes[i])))
