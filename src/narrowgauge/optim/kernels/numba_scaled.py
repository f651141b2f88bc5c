"""Loops over a run of values that are stored with one scale for the whole tensor: E4M3, E5M2 or float16 codes.

Memory is given by address, as in `numba_parameters`. A coding is `table.Coding.number`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from narrowgauge.numerics.formats import E4M3FN, E5M2, FP16
from narrowgauge.numerics.kernels.numba_bits import (
    INFINITY,
    INNER,
    MAGNITUDE,
    bits_of,
    float_of,
    layout,
    shift_right,
    widen,
)
from narrowgauge.optim.kernels import numba_parameters as parameters
from narrowgauge.optim.kernels.numba_memory import load, standalone, store

i16, i32, f32, u8, u16 = np.int16, np.int32, np.float32, np.uint8, np.uint16

_E4M3, _E5M2 = 0, 1  # of `table.CODED_FORMATS`


@njit(**INNER)
def load_half(source: int, at: int, n: int, scale: float, out: int) -> None:
    """out = float16 values * scale."""
    standalone()
    for i in range(n):
        store(1, f32, out, i, f32(widen(load(0, i16, source, at + i)) * f32(scale)))


@njit(**INNER)
def load_scaled(coding: int, source: int, at: int, n: int, scale: float, out: int) -> None:
    """out = values of codes * scale."""
    if coding % 3 == _E4M3:
        parameters.load_e4m3(source, at, n, scale, out)
    elif coding % 3 == _E5M2:
        parameters.load_e5m2(source, at, n, scale, out)
    else:
        load_half(source, at, n, scale, out)


_E4M3_SHIFT, _E4M3_LEAST, _E4M3_TOP = map(i32, layout(E4M3FN)[:3])
_E5M2_SHIFT, _E5M2_LEAST, _E5M2_TOP = map(i32, layout(E5M2)[:3])
_HALF_SHIFT, _HALF_LEAST, _HALF_TOP = map(i32, layout(FP16)[:3])
_E4M3_FLOOR, _E5M2_FLOOR, _HALF_FLOOR = (i32(layout(fmt, nonzero=True)[6]) for fmt in (E4M3FN, E5M2, FP16))
_BYTE_SIGN, _HALF_SIGN = i32(24), i32(16)


@njit(**INNER)
def code_of(x: float, scale: float, shift: int, least: int, top: int, floor: int, to_sign: int) -> int:
    """The code of a finite x * scale, to nearest even, saturating; see `numba_bits.layout` for what a format is.

    floor: bits of the least magnitude of what is not zero. to_sign: from float32's sign to the code's.
    """
    bits = bits_of(f32(x * scale))
    magnitude = i32(bits & MAGNITUDE)
    lifted = max(magnitude, floor) if x != f32(0.0) else magnitude
    clamped = i32(min(lifted, top))
    exponent = i32(max(i32(clamped & INFINITY), least))
    # a power of two whose ulp is the distance of the format's values here: adding it rounds, ties to even, once
    grid = i32(exponent + i32(shift << i32(23)))
    steps = i32(bits_of(f32(float_of(clamped) + float_of(grid))) - grid)
    code = i32(i32(steps + shift_right(exponent, shift)) - shift_right(least, shift))
    return i32(code | shift_right(i32(bits & i32(-0x80000000)), to_sign))


@njit(**INNER)
def e4m3_of(x: float, scale: float, floor: int) -> int:
    """`code_of` in E4M3."""
    return code_of(x, scale, _E4M3_SHIFT, _E4M3_LEAST, _E4M3_TOP, floor, _BYTE_SIGN)


@njit(**INNER)
def half_of(x: float, scale: float, floor: int) -> int:
    """`code_of` in float16."""
    return code_of(x, scale, _HALF_SHIFT, _HALF_LEAST, _HALF_TOP, floor, _HALF_SIGN)


@njit(**INNER)
def floor_of(coding: int) -> int:
    """What `code_of` lifts to: 0 where what is small may become zero."""
    if coding // 3 % 2 == 0:
        return i32(0)
    return _E4M3_FLOOR if coding % 3 == _E4M3 else (_E5M2_FLOOR if coding % 3 == _E5M2 else _HALF_FLOOR)


@njit(**INNER)
def _store_e4m3(values: int, n: int, scale: float, floor: int, codes: int, at: int) -> None:
    standalone()
    for i in range(n):
        store(1, u8, codes, at + i, u8(e4m3_of(load(0, f32, values, i), f32(scale), i32(floor))))


@njit(**INNER)
def _store_e5m2(values: int, n: int, scale: float, floor: int, codes: int, at: int) -> None:
    standalone()
    for i in range(n):
        x = load(0, f32, values, i)
        code = code_of(x, f32(scale), _E5M2_SHIFT, _E5M2_LEAST, _E5M2_TOP, i32(floor), _BYTE_SIGN)
        store(1, u8, codes, at + i, u8(code))


@njit(**INNER)
def _store_half(values: int, n: int, scale: float, floor: int, codes: int, at: int) -> None:
    standalone()
    for i in range(n):
        store(1, u16, codes, at + i, u16(half_of(load(0, f32, values, i), f32(scale), i32(floor))))


@njit(**INNER)
def store_scaled(coding: int, values: int, n: int, scale: float, codes: int, at: int) -> None:
    """codes = finite values * scale, to nearest even, saturating."""
    if coding % 3 == _E4M3:
        _store_e4m3(values, n, scale, floor_of(coding), codes, at)
    elif coding % 3 == _E5M2:
        _store_e5m2(values, n, scale, floor_of(coding), codes, at)
    else:
        _store_half(values, n, scale, floor_of(coding), codes, at)


@njit(**INNER)
def differs(old: int, new: int, n: int) -> bool:
    """True unless each of the float32 values equals the other's."""
    standalone()
    found = i32(0)
    for i in range(n):
        found = i32(found | i32(load(0, f32, old, i) != load(1, f32, new, i)))
    return found != i32(0)
