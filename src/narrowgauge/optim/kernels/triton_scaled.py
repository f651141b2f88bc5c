"""Values with one scale for the whole tensor in Triton kernels: E4M3, E5M2 or float16 codes.

CODE is a `table.Coding.number`; codes are read and stored as uint8, and as int16 those of float16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.numerics.kernels.triton_round import decode, encode, encode_nearest, lift


@triton.jit
def decoded(code, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 values of codes (int32), without the scale."""
    if CODE % 3 == 2:
        return code.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif CODE % 3 == 1:
        return decode(code, 5, 2)
    else:
        return decode(code, 4, 3)


@triton.jit
def encoded(values, quant_scale, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes (int32) of values * quant_scale, to nearest even, saturating; NaN stays."""
    scaled = values * quant_scale
    if CODE // 3 % 2 == 1:  # nothing but zero to zero: at least the smallest subnormal
        scaled = lift(scaled, values, 0x33800000 if CODE % 3 == 2 else (0x37800000 if CODE % 3 == 1 else 0x3B000000))
    if CODE % 3 == 2:
        bits = scaled.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        code = encode_nearest(tl.minimum(magnitude, 0x477FE000), 5, 10)
        return tl.where(magnitude > 0x7F800000, 0x7E00, code) | ((bits >> 16) & 0x8000)
    elif CODE % 3 == 1:
        return encode(scaled, 0, 5, 2, 0x47600000, False)
    else:
        return encode(scaled, 0, 4, 3, 0x43E00000, False)


@triton.jit
def read_scaled(codes, scale, place, mask, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 values of stored codes."""
    return decoded(tl.load(codes + place, mask=mask, other=0).to(tl.int32), CODE) * tl.load(scale)


@triton.jit
def write_scaled(codes, values, quant_scale, place, mask, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store values; returns their codes (int32)."""
    code = encoded(values, quant_scale, CODE)
    tl.store(codes + place, code.to(codes.dtype.element_ty), mask=mask)
    return code


@triton.jit
def raise_to(found, values, mask):  # type: ignore[no-untyped-def]
    """found (int32) = the largest magnitude of values, a matrix, as bits, where it was smaller."""
    largest = tl.where(mask, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    tl.atomic_max(found, tl.max(tl.max(largest, axis=1), axis=0))
