"""The scale rules of `numerics.scaling` inside Triton kernels, operation by operation.

Every division is `div_rn`: Triton's own `/` need not be correctly rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.numerics.kernels.triton_round import decode, encode_nearest

E4M3_MAX_BITS = tl.constexpr(0x43E00000)
FLT_MAX = tl.constexpr(3.4028234663852886e38)
SCALES_PRODUCT = tl.constexpr(2688.0)  # NVFP4: the maxima of E2M1 and E4M3, multiplied


@triton.jit
def divide(dividend, divisor):  # type: ignore[no-untyped-def]
    """dividend (a number) / divisor (float32), correctly rounded."""
    return tl.div_rn(tl.zeros_like(divisor) + dividend, divisor)


@triton.jit
def block_scales(  # type: ignore[no-untyped-def]
    amax, whole, RULE: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, TOP: tl.constexpr
):
    """(quant_scale, dequant_scale as it is stored: float32 or int32 bytes, the factor it stands for) of blocks.

    amax: float32, of each block; whole: float32 scalar, the amax of the tensor, for NVFP4. The factor of NVFP4 is that
    of the byte alone.
    """
    if RULE == "NVFP4":
        return _nvfp4_scales(amax, whole)
    elif RULE == "E8M0_UP":
        return _e8m0_scales(amax, _e8m0_byte_up(amax, TOP))
    elif RULE == "E8M0_FLOOR":
        return _e8m0_scales(amax, _e8m0_byte_floor(amax, TOP))
    else:
        return _float_scales(amax, RULE, EXPONENT, MANTISSA, TOP)


@triton.jit
def _float_scales(  # type: ignore[no-untyped-def]
    amax, RULE: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, TOP: tl.constexpr
):
    tl.static_assert(RULE == "CURRENT" or RULE == "CURRENT_POW2" or RULE == "TENSOR_POW2" or RULE == "NONE")
    bits = amax.to(tl.int32, bitcast=True)
    ratio = tl.zeros_like(bits) + 0x3F800000
    if RULE != "NONE":
        most = (tl.zeros_like(bits) + TOP).to(tl.float32, bitcast=True)
        found = tl.minimum(tl.div_rn(most, amax).to(tl.int32, bitcast=True), 0x7F7FFFFF)
        if RULE != "CURRENT":
            found &= 0x7F800000
        if RULE == "TENSOR_POW2":
            found = tl.minimum(found, (126 + 127) << 23)
        ratio = tl.where((bits > 0) & (bits < 0x7F800000), found, ratio)
    scale = ratio.to(tl.float32, bitcast=True)
    stored = divide(1.0, scale)
    if EXPONENT == 0 or EXPONENT + MANTISSA < 7:  # no code says NaN, so that the scale must
        stored = tl.where(bits > 0x7F800000, 0x7FC00000, stored.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    return scale, stored, stored


@triton.jit
def _e8m0_byte_up(amax, TOP: tl.constexpr):  # type: ignore[no-untyped-def]
    most = (tl.zeros_like(amax).to(tl.int32, bitcast=True) + TOP).to(tl.float32, bitcast=True)
    ratio = (amax * divide(1.0, most)).to(tl.int32, bitcast=True)
    field = ratio >> 23
    mantissa = ratio & 0x7FFFFF
    up = (mantissa > 0) & (field != 0xFE) & ((field > 0) | (mantissa > 0x400000))
    byte = tl.where(ratio == 0x7F800000, 0xFE, field + up.to(tl.int32))
    return tl.where(ratio > 0x7F800000, 0xFF, byte)


@triton.jit
def _e8m0_byte_floor(amax, TOP: tl.constexpr):  # type: ignore[no-untyped-def]
    bits = amax.to(tl.int32, bitcast=True)
    byte = tl.maximum((bits >> 23) - ((TOP >> 23) - 127), 0)
    byte = tl.where(bits == 0x7F800000, 0xFE, byte)
    return tl.where(bits > 0x7F800000, 0xFF, byte)


@triton.jit
def _e8m0_scales(amax, byte):  # type: ignore[no-untyped-def]
    inverse = tl.where(byte == 254, 0x400000, (254 - byte) << 23)  # 2^(127 - byte); 2^-127 is subnormal
    scale = tl.where(byte == 255, 0x3F800000, inverse).to(tl.float32, bitcast=True)
    return scale, byte, e8m0_factor(byte)


@triton.jit
def e8m0_factor(byte):  # type: ignore[no-untyped-def]
    """float32 values of E8M0 bytes (int32)."""
    bits = tl.where(byte == 0, 0x400000, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _at_most_flt_max(values):  # type: ignore[no-untyped-def]
    return tl.where(values > FLT_MAX, FLT_MAX, values)  # NaN stays


@triton.jit
def _nvfp4_scales(amax, whole):  # type: ignore[no-untyped-def]
    whole = tl.zeros_like(amax) + whole
    tensor_scale = _at_most_flt_max(divide(SCALES_PRODUCT, whole))
    tensor_scale = tl.where(tensor_scale == 0.0, 1.0, tensor_scale)
    sixth = divide(1.0, tl.zeros_like(amax) + 6.0)
    bits = (amax * (tensor_scale * sixth)).to(tl.int32, bitcast=True)
    byte = tl.where(bits > 0x7F800000, 0x7F, encode_nearest(tl.minimum(bits, E4M3_MAX_BITS), 4, 3))
    factor = decode(byte, 4, 3)
    inverse = factor * divide(1.0, tensor_scale)
    scale = _at_most_flt_max(divide(1.0, inverse))
    return tl.where(scale == scale, scale, 1.0), byte, factor


@triton.jit
def stored_factor(stored, whole, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """What codes are multiplied by, float32, of scales as they are stored.

    KIND: FLOAT32, the bytes (uint8) of E8M0 or E4M3, or NVFP4: E4M3 times the tensor's part, from its amax `whole`.
    """
    if KIND == "FLOAT32":
        return stored
    elif KIND == "E8M0":
        return e8m0_factor(stored.to(tl.int32))
    else:
        values = decode(stored.to(tl.int32), 4, 3)
        if KIND == "NVFP4":
            values = values * whole * divide(1.0, tl.zeros_like(values) + SCALES_PRODUCT)
        return values
