"""Rounding to narrow formats and back, in the integer arithmetic of Triton kernels.

A format is its field widths: EXPONENT and MANTISSA bits give the bias, and TOP is the float32 bits of its maximum.
Float formats of 8 bits have a NaN, whose code is all ones; all others have none. Integers have no EXPONENT bits; on the
square root (ROOT) their TOP is the square of the maximum. Triton's own casts to float8 and bfloat16
are not used: its interpreter, which the tests run on a CPU, does not round them as the hardware does.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from narrowgauge.numerics.companding import SQUARE_ROOT, Companding, limit_of
from narrowgauge.numerics.formats import Format


def fields_of(fmt: Format) -> dict[str, int]:
    """EXPONENT, MANTISSA and TOP of a narrow format, as the kernels take them."""
    return {"EXPONENT": fmt.exponent_bits, "MANTISSA": fmt.mantissa_bits, "TOP": _bits_of(fmt.max)}


def bent_fields_of(fmt: Format, companding: Companding, nonzero: bool) -> dict[str, int | bool]:
    """`fields_of` under a curve, with ROOT, SIGNED, and FLOOR: bits of the least magnitude that is not zero, or 0."""
    root = companding is SQUARE_ROOT
    floor = _bits_of(fmt.smallest_subnormal ** (2 if root else 1)) if nonzero else 0
    top = _bits_of(limit_of(fmt, companding))
    return {**fields_of(fmt), "TOP": top, "ROOT": root, "SIGNED": fmt.signed, "FLOOR": floor}


def _bits_of(value: float) -> int:
    return struct.unpack("<i", struct.pack("<f", value))[0]


@triton.jit
def widen(values):  # type: ignore[no-untyped-def]
    """float32 of float32, bfloat16 or float16 values."""
    if values.dtype == tl.bfloat16:
        return (values.to(tl.uint16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return values.to(tl.float32)


@triton.jit
def narrow(values, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 values in `dtype`, float32 or bfloat16; ties to even, NaN the canonical one."""
    if dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(values == values, rounded, 0x7FC0).to(tl.int16).to(dtype, bitcast=True)
    else:
        return values


@triton.jit
def encode_nearest(magnitude, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes without sign (int32) of float32 bits without sign, at most the format's maximum; ties to even."""
    shift: tl.constexpr = 23 - MANTISSA
    align: tl.constexpr = (23 - MANTISSA) << 23
    least: tl.constexpr = (129 - (1 << (EXPONENT - 1))) << 23  # exponent field of the smallest normal value
    # a power of two whose ulp is the distance of the format's values here: adding it rounds, ties to even, once
    grid = tl.maximum(magnitude & 0x7F800000, least) + align
    rounded = magnitude.to(tl.float32, bitcast=True) + grid.to(tl.float32, bitcast=True)
    return ((grid - align - least) >> shift) + (rounded.to(tl.int32, bitcast=True) - grid)


@triton.jit
def encode_stochastically(  # type: ignore[no-untyped-def]
    magnitude, words, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr
):
    """The same by `rounding.round_stochastically`; words: uint32, one for each value."""
    least: tl.constexpr = 129 - (1 << (EXPONENT - 1))
    field = magnitude >> 23
    significand = (magnitude & 0x7FFFFF) | tl.where(field > 0, 0x800000, 0)
    field = tl.maximum(field, 1)
    base = tl.maximum(field, least)
    shift = base - field + (23 - MANTISSA)
    lower = significand >> tl.minimum(shift, 31)
    rest = significand - (lower << tl.minimum(shift, 31))
    # ceil(rest / 2^shift * 2^24): an integer is below a number where it is below the number rounded up
    down = tl.minimum(tl.maximum(shift - 24, 0), 24)
    threshold = ((rest << tl.maximum(24 - shift, 0)) + (1 << down) - 1) >> down
    upwards = (words >> 8).to(tl.int32) < threshold
    return ((base - least) << MANTISSA) + lower + upwards.to(tl.int32)


@triton.jit
def encode(  # type: ignore[no-untyped-def]
    values, words, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, TOP: tl.constexpr, STOCHASTIC: tl.constexpr
):
    """Codes (int32) of float32 values, saturating; NaN is the format's, or code 0 where it has none."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    if STOCHASTIC:
        code = encode_stochastically(tl.minimum(magnitude, TOP), words, EXPONENT, MANTISSA)
    else:
        code = encode_nearest(tl.minimum(magnitude, TOP), EXPONENT, MANTISSA)
    is_nan = magnitude > 0x7F800000
    if EXPONENT + MANTISSA == 7:
        code = tl.where(is_nan, 0x7F, code)
    code |= (bits >> (31 - EXPONENT - MANTISSA)) & (1 << (EXPONENT + MANTISSA))
    if EXPONENT + MANTISSA == 7:
        return code
    else:
        return tl.where(is_nan, 0, code)


@triton.jit
def decode(code, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 values of codes (int32)."""
    shift: tl.constexpr = 23 - MANTISSA
    least: tl.constexpr = (129 - (1 << (EXPONENT - 1))) << 23
    smallest_normal: tl.constexpr = 2.0 ** (2 - (1 << (EXPONENT - 1)))
    sign: tl.constexpr = 1 << (EXPONENT + MANTISSA)
    field = code & (sign - 1)
    # read with the exponent one too large, less the implicit one: a subnormal's value, exactly
    low = ((field << shift) + least).to(tl.float32, bitcast=True) - smallest_normal
    high = (field << shift) + (least - 0x800000)
    value = tl.where(field < (1 << MANTISSA), low.to(tl.int32, bitcast=True), high)
    if EXPONENT == 5:  # E5M2: infinity, then NaN
        value = tl.where(field > 0x7C, 0x7FC00000, tl.where(field == 0x7C, 0x7F800000, value))
    elif EXPONENT + MANTISSA == 7:
        value = tl.where(field == 0x7F, 0x7FC00000, value)
    return (value | ((code & sign) << (31 - EXPONENT - MANTISSA))).to(tl.float32, bitcast=True)


@triton.jit
def lift(scaled, values, FLOOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scaled values, float32, of a magnitude of at least FLOOR (bits) where the value itself is not zero."""
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = tl.maximum(bits & 0x7FFFFFFF, tl.where(values != 0.0, FLOOR, 0))
    return (magnitude | (bits & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def encode_integer(values, SIGNED: tl.constexpr, ROOT: tl.constexpr, TOP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes (int32) of float32 values, to nearest even, saturating; NaN is 0, and what has no code of its sign."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    value = tl.minimum(magnitude, TOP).to(tl.float32, bitcast=True)
    if ROOT:
        value = tl.sqrt_rn(value)
    code = (value + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000  # 2^23, whose ulp is 1
    code = tl.where(bits < 0, -code if SIGNED else 0, code)
    return tl.where(magnitude > 0x7F800000, 0, code)


@triton.jit
def decode_integer(code, SIGNED: tl.constexpr, ROOT: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 values of codes (int32), of which the low byte counts."""
    low = code & 0xFF
    if SIGNED:
        low = tl.where(low > 127, low - 256, low)
    return (low * tl.abs(low) if ROOT else low).to(tl.float32)


@triton.jit
def stochastic_integer(values, words, TOP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes (int32) of float32 values by `rounding.round_stochastically`, saturating; NaN is 0."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    value = tl.minimum(magnitude, TOP).to(tl.float32, bitcast=True)
    lower = value.to(tl.int32)
    # exact: the difference of neighbours, and its product with a power of two
    share = (value - lower.to(tl.float32)) * 16777216.0
    code = lower + ((words >> 8).to(tl.float32) < share).to(tl.int32)
    return tl.where(magnitude > 0x7F800000, 0, tl.where(bits < 0, -code, code))
