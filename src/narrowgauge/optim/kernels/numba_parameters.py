"""Loops over a run of a parameter or a gradient: from what is stored to float32 scratch memory, and back.

Each is one loop that LLVM vectorizes. Memory is given by address: that of the whole tensor with the run's first value
`at` in it, and that of scratch memory from its start.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from narrowgauge.numerics.kernels.numba_bits import (
    INFINITY,
    INNER,
    MAGNITUDE,
    bfloat16_bits,
    bits_of,
    float_of,
    shift_right,
    widen,
)
from narrowgauge.optim.kernels.numba_memory import load, standalone, store

i8, i16, i32, f32 = np.int8, np.int16, np.int32, np.float32
u8, u16 = np.uint8, np.uint16

# r / 127 * 2^-8, correctly rounded for every residual, without a division: the product with the upper digits is exact
_UPPER = f32(int(2**20 / 127) / 2**28)
_LOWER = f32(1 / 127 / 2**8 - float(_UPPER))
_NORMAL, _LAST_POWER = i32(0x00800000), i32(0x7F000000)
_MAGIC = f32(12582912.0)  # 1.5 * 2^23: added to a small number, it rounds it to a whole one, ties to even
_STEP = f32(16256.0)  # 127 * 2^7


@njit(**INNER)
def load_float(source: int, at: int, n: int, out: int) -> None:
    """out = float32 values."""
    standalone()
    for i in range(n):
        store(1, f32, out, i, load(0, f32, source, at + i))


@njit(**INNER)
def load_bfloat(source: int, at: int, n: int, out: int) -> None:
    """out = bfloat16 values."""
    standalone()
    for i in range(n):
        store(1, f32, out, i, widen(load(0, u16, source, at + i)))


@njit(**INNER)
def e4m3(code: int) -> float:
    """The value of an E4M3 code (int16), read as float16 of a 256th."""
    magnitude = i16(code & i16(0x7F))
    half = i16(0x7E00) if magnitude == i16(0x7F) else i16(magnitude << i16(7))
    sign = i16(i16(code & i16(0x80)) << i16(8))
    return f32(widen(i16(half | sign)) * f32(256.0))


@njit(**INNER)
def load_e4m3(source: int, at: int, n: int, scale: float, out: int) -> None:
    """out = E4M3 values * scale."""
    standalone()
    for i in range(n):
        store(1, f32, out, i, f32(e4m3(i16(load(0, u8, source, at + i))) * f32(scale)))


@njit(**INNER)
def load_e5m2(source: int, at: int, n: int, scale: float, out: int) -> None:
    """out = E5M2 values * scale, read as the upper half of float16."""
    standalone()
    for i in range(n):
        store(1, f32, out, i, f32(widen(i16(i16(load(0, u8, source, at + i)) << i16(8))) * f32(scale)))


@njit(**INNER)
def _power_of(hi: int) -> int:
    """The bits of the power of two of a bfloat16 value given as float32 bits, of subnormals the smallest normal one.

    Its ulp is 2^-7 of that.
    """
    return max(i32(hi & INFINITY), _NORMAL)


@njit(**INNER)
def joined(hi: int, r: float) -> float:
    """hi + r / 127 * half_ulp(hi), see `numerics.residual.join`. hi: float32 bits; r: the residual, float32."""
    share = f32(f32(r * _UPPER) + f32(r * _LOWER))
    power = min(_power_of(hi), _LAST_POWER)  # beside infinity the residual is 0
    return f32(float_of(hi) + f32(share * float_of(power)))


@njit(**INNER)
def residual_of(x: float, hi: int) -> int:
    """The residual of x beside its bfloat16 bits `hi`, in the low 8 bits, see `numerics.residual.split`."""
    wide = i32(hi << i32(16))
    power = _power_of(wide)
    # exact: the difference in units of 2^-16 of half_ulp(hi), and its product with 127
    steps = f32(f32(f32(x - float_of(wide)) * float_of(i32(INFINITY - power))) * _STEP)
    return i32(0) if power == INFINITY else bits_of(f32(steps + _MAGIC))


@njit(**INNER)
def load_residual(source: int, master: int, at: int, n: int, out: int) -> None:
    """out = `joined` values."""
    standalone()
    for i in range(n):
        hi = i32(i32(load(0, u16, source, at + i)) << i32(16))
        store(2, f32, out, i, joined(hi, f32(load(1, i8, master, at + i))))


@njit(**INNER)
def load_remainder(source: int, master: int, at: int, n: int, out: int) -> None:
    """out = the float32 values that `numerics.residual.split_exactly` parted."""
    standalone()
    for i in range(n):
        upper = i32(i32(load(0, u16, source, at + i)) << i32(16))
        store(2, f32, out, i, float_of(i32(upper + i32(load(1, i16, master, at + i)))))


@njit(**INNER)
def store_float(new: int, target: int, at: int, n: int) -> None:
    """target = new, in float32."""
    standalone()
    for i in range(n):
        store(1, f32, target, at + i, load(0, f32, new, i))


@njit(**INNER)
def store_bfloat(new: int, target: int, at: int, n: int) -> None:
    """target = new, in bfloat16 to nearest even."""
    standalone()
    for i in range(n):
        store(1, u16, target, at + i, u16(bfloat16_bits(bits_of(load(0, f32, new, i)))))


@njit(**INNER)
def store_stochastic(new: int, words: int, target: int, at: int, n: int) -> None:
    """target = new, in bfloat16, stochastically rounded; see `numba_rows.narrow_row`."""
    standalone()
    for i in range(n):
        bits, word = bits_of(load(0, f32, new, i)), load(1, i32, words, i)
        magnitude = i32(bits & MAGNITUDE)
        upwards = i32(i32(shift_right(word, i32(8))) < i32(i32(bits & i32(0xFFFF)) << i32(8)))
        stochastic = i32(bits + i32(upwards << i32(16)))
        nearest = i32(bits + i32(i32(0x7FFF) + i32(shift_right(bits, i32(16)) & i32(1))))
        rounded = shift_right(stochastic if magnitude <= i32(0x7F7F0000) else nearest, i32(16))
        store(2, u16, target, at + i, u16(i32(0x7FC0) if magnitude > INFINITY else rounded))


@njit(**INNER)
def store_residual(old: int, new: int, target: int, master: int, at: int, n: int) -> None:
    """target, master = `numerics.residual.split` of new; where it equals old, the bits stay."""
    standalone()
    for i in range(n):
        x = load(1, f32, new, i)
        is_same = load(0, f32, old, i) == x
        hi = bfloat16_bits(bits_of(x))
        store(2, u16, target, at + i, load(2, u16, target, at + i) if is_same else u16(hi))
        store(3, i8, master, at + i, load(3, i8, master, at + i) if is_same else i8(residual_of(x, hi)))


@njit(**INNER)
def store_remainder(old: int, new: int, target: int, master: int, at: int, n: int) -> None:
    """target, master = `numerics.residual.split_exactly` of new; where it equals old, the bits stay."""
    standalone()
    for i in range(n):
        x = load(1, f32, new, i)
        is_same = load(0, f32, old, i) == x
        bits = bits_of(x)
        upper = shift_right(i32(bits + i32(0x8000)), i32(16))
        rest = i32(bits - i32(upper << i32(16)))
        store(2, u16, target, at + i, load(2, u16, target, at + i) if is_same else u16(upper))
        store(3, i16, master, at + i, load(3, i16, master, at + i) if is_same else i16(rest))
