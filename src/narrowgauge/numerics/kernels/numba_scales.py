"""The scales of a run of tiles from their largest magnitudes, equal in bits to `scaling.block_scales`, and back.

All arrays are flat: `int32` holds bits of float32, `uint8` scale bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from narrowgauge.numerics import scaling
from narrowgauge.numerics.formats import E2M1FN, E4M3FN
from narrowgauge.numerics.kernels import numba_rows
from narrowgauge.numerics.kernels.numba_bits import (
    INFINITY,
    INNER,
    MAGNITUDE,
    NAN,
    bits_of,
    float_of,
    layout,
    shift_right,
)
from narrowgauge.numerics.scaling import ScaleRule

i32, f32 = np.int32, np.float32

# the rules as the kernels know them
CURRENT, CURRENT_POW2, E8M0_UP, E8M0_FLOOR, NVFP4 = range(5)
RULES = {
    ScaleRule.CURRENT: CURRENT,
    ScaleRule.CURRENT_POW2: CURRENT_POW2,
    ScaleRule.E8M0_UP: E8M0_UP,
    ScaleRule.E8M0_FLOOR: E8M0_FLOOR,
    ScaleRule.NVFP4: NVFP4,
}

_E4M3 = layout(E4M3FN)
_LARGEST = np.float32(scaling.FLT_MAX)
_NVFP4_MAX = np.float32(E2M1FN.max * E4M3FN.max)
_SIXTH = np.float32(1.0) / np.float32(E2M1FN.max)
_NVFP4_INVERSE = np.float32(1.0) / _NVFP4_MAX


@njit(**INNER, error_model="numpy")
def scales_of(
    amax: Any, rule: int, layout: Any, tensor_amax: int, quant_scale: Any, factor: Any, words: Any, stored: Any
) -> None:
    """quant_scale, factor (float32) and the stored scales of tiles.

    amax: bits of the tiles' largest magnitudes; tensor_amax: those of the whole, for NVFP4. words (int32) takes the
    bits of stored float32 scales, stored (uint8) the bytes of others.
    """
    if rule == NVFP4:
        _nvfp4_scales(amax, tensor_amax, quant_scale, factor, words, stored)
    elif rule == E8M0_UP or rule == E8M0_FLOOR:
        if rule == E8M0_UP:
            _e8m0_up(amax, layout, words)
        else:
            _e8m0_floor(amax, layout, words)
        for t in range(len(amax)):
            byte = words[t]
            bits = i32(0x400000) if byte == i32(254) else i32(i32(i32(254) - byte) << 23)  # 2^-127 is subnormal
            quant_scale[t] = f32(1.0) if byte == i32(255) else float_of(bits)
        for t in range(len(amax)):
            stored[t] = np.uint8(words[t])
        factors_of(stored, words, factor, E8M0_UP)
    else:
        _current_scales(amax, rule == CURRENT_POW2, layout, quant_scale)
        for t in range(len(amax)):
            # where codes cannot say NaN, the scale does
            bits = bits_of(f32(f32(1.0) / quant_scale[t]))
            words[t] = NAN if amax[t] > INFINITY and not layout[4] else bits
        factors_of(stored, words, factor, CURRENT)


@njit(**INNER)
def factors_of(stored: Any, words: Any, factor: Any, rule: int) -> None:
    """The float32 values of stored scales: words for the CURRENT rules, else bytes."""
    if rule == NVFP4:
        _decode_e4m3(stored, words, factor)
    elif rule == E8M0_UP or rule == E8M0_FLOOR:
        for t in range(len(factor)):
            byte = i32(stored[t])
            bits = i32(0x400000) if byte == i32(0) else i32(byte << 23)
            factor[t] = float_of(NAN if byte == i32(255) else bits)
    else:
        for t in range(len(factor)):
            factor[t] = float_of(words[t])


@njit(**INNER)
def with_tensor_factor(factor: Any, tensor_amax: float) -> None:
    """factor = factor * tensor_amax * fl(1/2688), in place: the whole scale of NVFP4's blocks."""
    for t in range(len(factor)):
        factor[t] = f32(f32(factor[t] * f32(tensor_amax)) * _NVFP4_INVERSE)


@njit(**INNER, error_model="numpy")
def _current_scales(amax: Any, pow2: bool, layout: Any, quant_scale: Any) -> None:
    largest = float_of(i32(layout[2]))
    kept = INFINITY if pow2 else i32(-1)
    for t in range(len(amax)):
        scale = f32(largest / float_of(amax[t]))
        scale = min(scale, _LARGEST)
        scale = scale if amax[t] > i32(0) and amax[t] < INFINITY else f32(1.0)
        quant_scale[t] = float_of(i32(bits_of(scale) & kept))


@njit(**INNER, error_model="numpy")
def _e8m0_up(amax: Any, layout: Any, bytes: Any) -> None:
    inverse = f32(f32(1.0) / float_of(i32(layout[2])))
    for t in range(len(amax)):
        ratio = bits_of(f32(float_of(amax[t]) * inverse))
        exponent, mantissa = shift_right(ratio, i32(23)), i32(ratio & i32(0x7FFFFF))
        # a subnormal ratio of at most 2^-127 keeps byte 0, which already means 2^-127
        least = i32(0x400000) if exponent == i32(0) else i32(0)
        byte = i32(exponent + i32(1)) if mantissa > least and exponent != i32(0xFE) else exponent
        byte = i32(0xFE) if ratio == INFINITY else byte
        bytes[t] = i32(0xFF) if i32(ratio & MAGNITUDE) > INFINITY else byte


@njit(**INNER)
def _e8m0_floor(amax: Any, layout: Any, bytes: Any) -> None:
    emax = i32(shift_right(i32(layout[2]), i32(23)) - i32(127))
    for t in range(len(amax)):
        byte = i32(max(i32(shift_right(amax[t], i32(23)) - emax), i32(0)))  # subnormal: below byte 0
        byte = i32(0xFE) if amax[t] == INFINITY else byte
        bytes[t] = i32(0xFF) if amax[t] > INFINITY else byte


@njit(**INNER, error_model="numpy")
def _nvfp4_scales(amax: Any, tensor_amax: int, quant_scale: Any, factor: Any, words: Any, stored: Any) -> None:
    tensor_scale = f32(_NVFP4_MAX / float_of(i32(tensor_amax)))
    tensor_scale = _LARGEST if tensor_scale > _LARGEST else tensor_scale
    tensor_scale = f32(1.0) if tensor_scale == f32(0.0) else tensor_scale  # of an infinite amax
    sixth = f32(tensor_scale * _SIXTH)
    inverse_scale = f32(f32(1.0) / tensor_scale)
    for t in range(len(amax)):
        words[t] = bits_of(f32(float_of(amax[t]) * sixth))
    numba_rows.encode_row(words, _E4M3, stored)
    _decode_e4m3(stored, words, factor)
    for t in range(len(amax)):
        scale = f32(f32(1.0) / f32(factor[t] * inverse_scale))
        scale = _LARGEST if scale > _LARGEST else scale
        quant_scale[t] = scale if scale == scale else f32(1.0)


@njit(**INNER)
def _decode_e4m3(stored: Any, words: Any, factor: Any) -> None:
    numba_rows.decode_row(stored, _E4M3, words)
    for t in range(len(factor)):
        factor[t] = float_of(words[t])
