"""Steps of a cast on a run of values that fits the first-level cache, each one loop that LLVM vectorizes.

A loop touches at most three arrays: beyond that LLVM gives up proving that they do not overlap. All arrays are flat and
hold bits: `int32` those of float32, `uint16` of bfloat16, `int16` of float16, `uint8` codes. Scales are `float32`. A
format is known by its `numba_bits.Layout`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from narrowgauge.numerics import philox
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
    widen,
)

i16, i32, f32, u64 = np.int16, np.int32, np.float32, np.uint64

_MASK = np.uint64(0xFFFFFFFF)
_MULTIPLIER_0, _MULTIPLIER_1 = (np.uint64(m) for m in philox.MULTIPLIERS)
_KEY_STEP_0, _KEY_STEP_1 = (np.uint64(step) for step in philox.KEY_STEPS)


@njit(**INNER)
def largest_of(x: Any) -> int:
    """The largest magnitude, as bits: read as an integer, NaN is larger than infinity and so never lost."""
    largest = i32(0)
    for i in range(len(x)):
        largest = max(largest, i32(bits_of(widen(x[i])) & MAGNITUDE))
    return largest


@njit(**INNER)
def raise_to(x: Any, largest: Any) -> None:
    """largest = max(largest, |x|), as bits."""
    for i in range(len(x)):
        largest[i] = max(largest[i], i32(bits_of(widen(x[i])) & MAGNITUDE))


@njit(**INNER)
def copy_row(values: Any, out: Any) -> None:
    """out = values; Numba's own assignment of arrays comes with half a second of code for its error message."""
    for i in range(len(out)):
        out[i] = values[i]


@njit(**INNER)
def scale_row(x: Any, scales: Any, scaled: Any) -> None:
    """scaled = x * scales, as bits."""
    for i in range(len(x)):
        scaled[i] = bits_of(f32(widen(x[i]) * scales[i]))


@njit(**INNER)
def _fields(layout: Any) -> tuple[int, int, int, int, int, int, int]:
    """What encoding takes of a layout: shift, align, least, top, code of the smallest normal, sign shift, sign bit."""
    shift, least, top = i32(layout[0]), i32(layout[1]), i32(layout[2])
    align = i32(shift << 23)
    first = shift_right(i32(least + align), shift)
    return shift, align, least, top, first, i32(layout[3]), shift_right(SIGN, i32(layout[3]))


@njit(**INNER)
def _encode(bits: int, nan_mask: int, fields: Any) -> int:
    shift, align, least, top, first, sign_shift, sign_bit = fields
    magnitude = i32(bits & MAGNITUDE)
    clamped = i32(min(magnitude, top))
    # a power of two whose ulp is the distance of the format's values here: adding it rounds, ties to even, once
    grid = i32(max(i32(clamped & INFINITY), least) + align)
    steps = i32(bits_of(f32(float_of(clamped) + float_of(grid))) - grid)
    sign = i32(shift_right(bits, sign_shift) & sign_bit)
    code = i32(i32(i32(shift_right(grid, shift) + steps) - first) | sign)
    return i32(i32(sign | i32(0x7F)) & nan_mask) if magnitude > INFINITY else code


@njit(**INNER)
def encode_row(scaled: Any, layout: Any, codes: Any) -> None:
    """codes = encode(scaled), to nearest even, saturating."""
    nan_mask, fields = i32(layout[4]), _fields(layout)
    for i in range(len(codes)):
        codes[i] = np.uint8(_encode(scaled[i], nan_mask, fields))


@njit(**INNER)
def scale_and_encode_row(x: Any, scales: Any, layout: Any, codes: Any) -> None:
    """codes = encode(x * scales), to nearest even, saturating."""
    nan_mask, fields = i32(layout[4]), _fields(layout)
    for i in range(len(codes)):
        codes[i] = np.uint8(_encode(bits_of(f32(widen(x[i]) * scales[i])), nan_mask, fields))


@njit(**INNER)
def carry_row(scaled: Any, layout: Any, factors: Any, carrier: Any) -> None:
    """carrier = decode(encode(scaled)) * factors, as bits: see `multiply_row`."""
    shift, least, top = i32(layout[0]), i32(layout[1]), i32(layout[2])
    align = i32(shift << 23)
    for i in range(len(carrier)):
        bits = scaled[i]
        magnitude = i32(bits & MAGNITUDE)
        clamped = i32(min(magnitude, top))
        grid = float_of(i32(max(i32(clamped & INFINITY), least) + align))
        value = bits_of(f32(f32(float_of(clamped) + grid) - grid))
        value = i32((NAN if magnitude > INFINITY else value) | i32(bits & SIGN))
        product = bits_of(f32(float_of(value) * factors[i]))
        carrier[i] = bfloat16_bits(product) if carrier.itemsize == 2 else product


@njit(**INNER)
def multiply_row(values: Any, factors: Any, out: Any) -> None:
    """out = values * factors, as bits: int32 (float32), or uint16 (bfloat16, rounded once to nearest even)."""
    for i in range(len(out)):
        product = bits_of(f32(float_of(values[i]) * factors[i]))
        out[i] = bfloat16_bits(product) if out.itemsize == 2 else product


@njit(**INNER)
def decode_row(codes: Any, layout: Any, values: Any) -> None:
    """values = decode(codes), as bits of float32."""
    # read as float16, whose exponent is as wide as E5M2's or wider: subnormals need no case of their own
    shift, sign_bit = i32(layout[0]), i16(shift_right(SIGN, i32(layout[3])))
    widening = i16(1 << (shift - 13))
    sign_widening = i16(1 << (layout[3] - 16))
    rebias = float_of(i32(layout[1] + (14 << 23)))  # 2^(15 - bias)
    nan = i16(0x7F) if layout[4] else i16(-1)
    for i in range(len(codes)):
        code = i16(codes[i])
        magnitude = i16(code & i16(sign_bit - i16(1)))
        half = i16(magnitude * widening) if magnitude != nan else i16(0x7E00)
        sign = i16(i16(code & sign_bit) * sign_widening)
        values[i] = bits_of(f32(widen(i16(half | sign)) * rebias))


@njit(**INNER)
def stochastic_row(scaled: Any, words: Any, layout: Any) -> None:
    """scaled = `rounding.round_stochastically(scaled, words)`, in place; beyond the maximum: the maximum."""
    shift, least, top = i32(layout[0]), i32(layout[1]), i32(layout[2])
    mantissa = i32((23 - shift) << 23)
    inverse = i32(i32(254 << 23) + mantissa)
    for i in range(len(scaled)):
        bits = scaled[i]
        magnitude = i32(bits & MAGNITUDE)
        clamped = i32(min(magnitude, top))
        exponent = i32(max(i32(clamped & INFINITY), least))
        # all exact: a product with a power of two that only raises exponents, and the difference of neighbours
        steps = f32(float_of(clamped) * float_of(i32(inverse - exponent)))
        lower = i32(steps)
        share = f32(f32(steps - f32(lower)) * f32(16777216.0))
        upper = i32(lower + i32(f32(shift_right(words[i], i32(8))) < share))
        value = bits_of(f32(f32(upper) * float_of(i32(exponent - mantissa))))
        scaled[i] = bits if magnitude > INFINITY else i32(value | i32(bits & SIGN))


@njit(**INNER)
def narrow_row(scaled: Any, words: Any, out: Any) -> None:
    """out (uint16) = scaled in bfloat16, stochastically rounded; beyond its maximum to nearest even, NaN stays."""
    top, dropped = i32(0x7F7F0000), i32(0xFFFF)
    for i in range(len(out)):
        bits = scaled[i]
        magnitude = i32(bits & MAGNITUDE)
        upwards = i32(i32(shift_right(words[i], i32(8))) < i32(i32(bits & dropped) << 8))
        stochastic = i32(bits + i32(upwards << 16))
        nearest = i32(bits + i32(i32(0x7FFF) + i32(shift_right(bits, i32(16)) & i32(1))))
        rounded = shift_right(stochastic if magnitude <= top else nearest, i32(16))
        out[i] = i32(0x7FC0) if magnitude > INFINITY else rounded


@njit(**INNER)
def _philox_round(c0: int, c1: int, c2: int, c3: int, low: int, high: int) -> tuple[int, int, int, int]:
    product_0, product_1 = u64(c0 * _MULTIPLIER_0), u64(c2 * _MULTIPLIER_1)
    return (
        u64(u64(product_1 >> u64(32)) ^ c1 ^ low),
        u64(product_1 & _MASK),
        u64(u64(product_0 >> u64(32)) ^ c3 ^ high),
        u64(product_0 & _MASK),
    )


@njit(nogil=True, cache=True)
def draw_row(key: int, stream: int, first: int, words: Any) -> None:
    """words = those of `philox.random_words` from number 4 * first on; as many whole blocks of 4 as fit."""
    key_low, key_high = u64(u64(key) & _MASK), u64(u64(key) >> u64(32))
    for block in range(len(words) // 4):
        number = u64(u64(first) + u64(block))
        c0, c1, c2, c3 = u64(number & _MASK), u64(number >> u64(32)), u64(stream), u64(0)
        low, high = key_low, key_high
        for _ in range(philox.ROUNDS):
            c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, low, high)
            low, high = u64(u64(low + _KEY_STEP_0) & _MASK), u64(u64(high + _KEY_STEP_1) & _MASK)
        words[4 * block] = i32(c0)
        words[4 * block + 1] = i32(c1)
        words[4 * block + 2] = i32(c2)
        words[4 * block + 3] = i32(c3)


@njit(**INNER)
def count_saturated(scaled: Any, top: int) -> int:
    """How many values lie beyond the largest: infinities do, NaN does not."""
    top, saturated = i32(top), i32(0)
    for i in range(len(scaled)):
        magnitude = i32(scaled[i] & MAGNITUDE)
        saturated += i32(magnitude > top) & i32(magnitude <= INFINITY)
    return saturated


@njit(**INNER)
def count_flushed(x: Any, codes: Any, sign_shift: int) -> int:
    """How many values that are not zero have a code that is."""
    rest = i32(shift_right(SIGN, i32(sign_shift)) - i32(1))
    flushed = i32(0)
    for i in range(len(x)):
        flushed += i32(i32(codes[i] & rest) == i32(0)) & i32(widen(x[i]) != f32(0.0))
    return flushed
