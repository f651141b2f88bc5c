"""Steps of `numba_wire` on a run of values that fits the first-level cache, each one loop that LLVM vectorizes.

Arrays are as in `numba_rows`. E4M3FN, which nearly all traffic is in, goes in vectors where tiles are whole ones, and
E5M2 has loops of its own, with constants for shifts, and code and value in one pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from narrowgauge.numerics.formats import E4M3FN, E5M2
from narrowgauge.numerics.kernels import numba_integers, numba_packing, numba_rows, numba_scales, numba_tiles
from narrowgauge.numerics.kernels.numba_bits import (
    INFINITY,
    INNER,
    MAGNITUDE,
    NAN,
    bfloat16_bits,
    bits_of,
    float_of,
    layout,
    shift_right,
    widen,
)
from narrowgauge.numerics.kernels.numba_vectors import LANES, accumulate_16, decode_16, encode_16, prefetch, stream_16

i16, i32, f32, u8 = np.int16, np.int32, np.float32, np.uint8

_E4M3, _E5M2 = layout(E4M3FN), layout(E5M2)
# values of the next part, which are on their way from memory while those of this one are encoded
_AHEAD = 2 * numba_tiles.RUN

_LEAST, _TOP = i32(_E4M3[1]), i32(_E4M3[2])
_ALIGN, _FIRST = i32(_E4M3[0] << 23), i32(_E4M3[1] >> _E4M3[0])


@njit(**INNER)
def widen_row(x: Any, out: Any) -> None:
    """out = x in float32, then zeros."""
    for i in range(len(x)):
        out[i] = bits_of(widen(x[i]))
    out[len(x) :] = 0


@njit(**INNER)
def add_row(x: Any, residual: Any, out: Any) -> None:
    """out = x + residual in float32."""
    for i in range(len(x)):
        out[i] = bits_of(f32(widen(x[i]) + float_of(residual[i])))


@njit(**INNER, error_model="numpy")
def divide_row(total: Any, divisor: float) -> None:
    """total = total / divisor."""
    inverse = f32(f32(1.0) / divisor)
    if f32(inverse * divisor) == f32(1.0) and i32(bits_of(divisor) & i32(0x7FFFFF)) == i32(0):  # a power of two
        for i in range(len(total)):
            total[i] = bits_of(f32(float_of(total[i]) * inverse))
    else:
        for i in range(len(total)):
            total[i] = bits_of(f32(float_of(total[i]) / divisor))


@njit(**INNER)
def subtract_row(source: Any, sent: Any, residual: Any) -> None:
    """residual = source - sent."""
    for i in range(len(residual)):
        residual[i] = bits_of(f32(float_of(source[i]) - float_of(sent[i])))


@njit(**INNER)
def encode_e4m3_tiles(x: Any, scales: Any, width: int, codes: Any) -> None:
    """codes = encode(x * scale of its tile) in E4M3FN, to nearest even, saturating; NaN is any code, see `clear_codes`.

    Tiles have `width` values, a multiple of 16; the last may be ragged.
    """
    for t in range(len(scales)):
        scale, start, stop = scales[t], t * width, min(t * width + width, len(codes))
        whole = start + (stop - start) // LANES * LANES
        for i in range(start, whole, LANES):
            prefetch(x, i + _AHEAD)
            encode_16(x, i, scale, codes, i)
        for i in range(whole, stop):
            codes[i] = _e4m3_code(bits_of(f32(widen(x[i]) * scale)))


@njit(**INNER)
def decode_e4m3_tiles(codes: Any, factors: Any, width: int, streamed: bool, out: Any) -> None:
    """out (float32) = codes * factor of its tile; tiles as above. streamed: `out` begins on a cache line."""
    for t in range(len(factors)):
        factor, start, stop = factors[t], t * width, min(t * width + width, len(out))
        whole = start + (stop - start) // LANES * LANES
        if streamed:
            for i in range(start, whole, LANES):
                stream_16(codes, i, factor, out, i)
        else:
            for i in range(start, whole, LANES):
                decode_16(codes, i, factor, out, i)
        for i in range(whole, stop):
            out[i] = bits_of(f32(_e4m3_value(codes[i]) * factor))


@njit(**INNER)
def accumulate_e4m3_tiles(codes: Any, factors: Any, width: int, total: Any) -> None:
    """total = total + codes * factor of its tile, in float32, both operations rounded; tiles as above."""
    for t in range(len(factors)):
        factor, start, stop = factors[t], t * width, min(t * width + width, len(total))
        whole = start + (stop - start) // LANES * LANES
        for i in range(start, whole, LANES):
            accumulate_16(codes, i, factor, total, i)
        for i in range(whole, stop):
            total[i] = bits_of(f32(float_of(total[i]) + f32(_e4m3_value(codes[i]) * factor)))


@njit(**INNER)
def _e4m3_code(bits: int) -> int:
    clamped = i32(min(i32(bits & MAGNITUDE), _TOP))
    exponent = i32(max(i32(clamped & INFINITY), _LEAST))
    grid = i32(exponent + _ALIGN)  # see `numba_rows.encode_row`
    steps = i32(bits_of(f32(float_of(clamped) + float_of(grid))) - grid)
    code = i32(i32(steps + shift_right(exponent, i32(20))) - _FIRST)
    return u8(i32(code | i32(shift_right(bits, i32(24)) & i32(0x80))))


@njit(**INNER)
def _e4m3_value(code: int) -> float:
    """The value of a code: by float16, whose subnormals hold E4M3FN's; the mask takes the second sign away."""
    half = i16(i16(i16(np.int8(code)) << 7) & i16(-0x4001))
    half = i16(0x7E00) if i16(half & i16(0x7FFF)) == i16(0x7F << 7) else half
    return f32(widen(half) * f32(256.0))


@njit(**INNER)
def _e5m2_value(code: int) -> float:
    return widen(i16(i16(code) << 8))


@njit(**INNER)
def decode_row(codes: Any, factors: Any, layout: Any, scratch: Any, out: Any) -> None:
    """out = codes * factors: int32 (float32), or uint16 (bfloat16, rounded once)."""
    if out.itemsize == 4 and layout[0] == _E5M2[0]:
        for i in range(len(out)):
            out[i] = bits_of(f32(_e5m2_value(codes[i]) * factors[i]))
    else:
        decode_plain_row(codes, layout, scratch)
        numba_rows.multiply_row(scratch, factors, out)


@njit(**INNER)
def accumulate_row(codes: Any, factors: Any, layout: Any, scratch: Any, total: Any) -> None:
    """total = total + codes * factors, in float32, both operations rounded."""
    if layout[0] == _E5M2[0]:
        for i in range(len(total)):
            total[i] = bits_of(f32(float_of(total[i]) + f32(_e5m2_value(codes[i]) * factors[i])))
    else:
        decode_plain_row(codes, layout, scratch)
        for i in range(len(total)):
            total[i] = bits_of(f32(float_of(total[i]) + f32(float_of(scratch[i]) * factors[i])))


@njit(**INNER)
def narrow_row(values: Any, out: Any) -> None:
    """out = values, bits of float32, in bfloat16, rounded once."""
    for i in range(len(out)):
        out[i] = bfloat16_bits(values[i])


@njit(**INNER)
def decode_plain_row(codes: Any, layout: Any, values: Any) -> None:
    """values = decode(codes), as bits of float32."""
    if layout[5]:
        numba_integers.decode_row(codes, layout, values)
    else:
        numba_rows.decode_row(codes, layout, values)


@njit(**INNER)
def unpack4(packed: Any, codes: Any, are_integers: bool) -> None:
    """Codes of 4 bits, one a byte: those of integers in two's complement of the byte."""
    numba_packing.unpack4(packed, len(codes), codes)
    if are_integers:
        for i in range(len(codes)):
            codes[i] = u8((codes[i] ^ u8(8)) - u8(8))


@njit(**INNER)
def clear_codes(largest: Any, width: int, codes: Any) -> None:
    """Code 0 in tiles that hold what is not finite: the sign of a NaN is not the same on every machine."""
    for t in range(len(largest)):
        if largest[t] >= INFINITY:
            codes[t * width : t * width + width] = 0


@njit(**INNER)
def store_scales(largest: Any, words: Any, stored: Any, size: int, out: Any) -> None:
    """The scales of tiles as bytes; NaN where a tile holds what is not finite."""
    for t in range(len(largest)):
        finite = largest[t] < INFINITY
        if size == 1:
            out[t] = stored[t] if finite else u8(0xFF)
        else:
            word = words[t] if finite else NAN
            for k in range(4):
                out[4 * t + k] = u8(shift_right(word, i32(8 * k)) & i32(0xFF))


@njit(**INNER)
def load_scales(raw: Any, size: int, words: Any, factor: Any) -> None:
    """The factors of tiles from the bytes of their scales."""
    if size == 1:
        numba_scales.factors_of(raw, words, factor, numba_scales.E8M0_UP)
        return
    for t in range(len(factor)):
        low, high = i32(raw[4 * t]) | i32(raw[4 * t + 1]) << 8, i32(raw[4 * t + 2]) | i32(raw[4 * t + 3]) << 8
        words[t] = i32(low | high << 16)
    numba_scales.factors_of(raw, words, factor, numba_scales.CURRENT)
