"""Numba kernels of the CPU: amax, the cast to FP8 codes, and the way back.

Each has a serial form (no thread of its own, the GIL released) and a parallel one that runs it over chunks. A loop
touches at most three arrays: beyond that LLVM gives up proving that they do not overlap, and stops vectorizing.

All arrays are flat and hold bits: `int32` those of float32, `uint16` of bfloat16, `int16` of float16, `uint8` codes. An
output that is not wanted is None, which Numba compiles away. What a kernel knows of a format comes as a `Layout`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

from narrowgauge.numerics.formats import Format

i32, f32 = np.int32, np.float32

_INFINITY = np.int32(0x7F800000)
_EXPONENT = np.int32(0x7F800000)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_SIGN = np.int32(-0x80000000)
_NAN = np.int32(0x7FC00000)
# chunks start at multiples of this, so that no two threads write one cache line
_GRAIN = 256


class Layout(NamedTuple):
    """The numbers that describe an 8-bit float format to a kernel."""

    shift: np.int32  # mantissa bits of float32 that the format drops
    align: np.int32  # shift as an exponent field: a float32 that much larger has one ulp of the format as its ulp
    least: np.int32  # exponent field of the smallest normal value
    top: np.int32  # float32 bits of the largest finite value
    top_code: np.int32  # code of the largest finite value; what is above means infinity or NaN
    unit: np.float32  # the smallest normal value


def layout(fmt: Format) -> Layout:
    """The layout of E4M3FN or E5M2."""
    shift = 23 - fmt.mantissa_bits
    return Layout(
        shift=np.int32(shift),
        align=np.int32(shift << 23),
        least=np.int32((128 - fmt.bias) << 23),
        top=np.float32(fmt.max).view(np.int32),
        top_code=np.int32(0x7B if fmt.has_inf else 0x7E),
        unit=np.float32(fmt.smallest_normal),
    )


@intrinsic
def _bits(typing_context: Any, value: Any) -> Any:
    """The bits of a float32 as an int32."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@intrinsic
def _float(typing_context: Any, bits: Any) -> Any:
    """The float32 that an int32 holds the bits of."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def _widen(typing_context: Any, element: Any) -> Any:
    """The float32 value of an element: bits of float32 (int32), bfloat16 (uint16) or float16 (int16)."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (value,) = arguments
        if element == types.uint16:
            wide = builder.zext(value, ir.IntType(32))
            return builder.bitcast(builder.shl(wide, ir.Constant(ir.IntType(32), 16)), ir.FloatType())
        if element == types.int16:
            return builder.fpext(builder.bitcast(value, ir.HalfType()), ir.FloatType())
        return builder.bitcast(value, ir.FloatType())

    return types.float32(element), codegen


@njit(nogil=True, cache=True)
def _chunk(length: int, chunks: int) -> int:
    """Elements of a chunk: a multiple of the grain."""
    return ((length + chunks - 1) // chunks + _GRAIN - 1) // _GRAIN * _GRAIN


@njit(nogil=True, cache=True)
def amax_serial(x: Any) -> int:
    """The largest magnitude of `x`, as bits: read as an integer, NaN is larger than infinity and so never lost."""
    largest = i32(0)
    if x.itemsize == 4:
        for i in range(len(x)):
            largest = max(largest, i32(x[i] & _MAGNITUDE))
    else:
        for i in range(len(x)):
            largest = max(largest, i32(i32(x[i]) & i32(0x7FFF)))
    return largest


@njit(nogil=True, cache=True, parallel=True)
def amax_parallel(x: Any, chunks: int) -> int:
    """`amax_serial` over chunks in parallel."""
    size = _chunk(len(x), chunks)
    parts = np.zeros(chunks, np.int32)
    for c in prange(chunks):
        parts[c] = amax_serial(x[c * size : (c + 1) * size])
    return parts.max()


@njit(nogil=True, cache=True)
def cast_serial(x: Any, scale: float, fmt: Layout, codes: Any, carrier: Any) -> None:
    """codes (uint8) = encode(x * scale), saturating; carrier = the values of the codes, as bits: uint16 or int32."""
    scale = f32(scale)
    shift, align, least, top = fmt.shift, fmt.align, fmt.least, fmt.top
    for i in range(len(x)):
        bits = _bits(f32(_widen(x[i]) * scale))
        magnitude = i32(bits & _MAGNITUDE)
        clamped = i32(min(magnitude, top))
        # a power of two whose ulp is the distance of the format's values here: adding it rounds, ties to even, once
        grid = i32(max(i32(clamped & _EXPONENT), least) + align)
        rounded = f32(_float(clamped) + _float(grid))
        is_nan = magnitude > _INFINITY
        if codes is not None:
            steps = i32(_bits(rounded) - grid)
            code = i32(i32(i32(grid - align - least) >> shift) + steps)
            code = i32(0x7F) if is_nan else code
            codes[i] = np.uint8(code | i32(i32(bits >> 24) & i32(0x80)))
        if carrier is not None:
            value = _bits(f32(rounded - _float(grid)))
            value = _NAN if is_nan else value
            value = i32(value | i32(bits & _SIGN))
            carrier[i] = i32(value >> 16) if carrier.itemsize == 2 else value


@njit(nogil=True, cache=True, parallel=True)
def cast_parallel(x: Any, scale: float, fmt: Layout, codes: Any, carrier: Any, chunks: int) -> None:
    """`cast_serial` over chunks in parallel."""
    size = _chunk(len(x), chunks)
    for c in prange(chunks):
        start, stop = c * size, (c + 1) * size
        cast_serial(
            x[start:stop],
            scale,
            fmt,
            None if codes is None else codes[start:stop],
            None if carrier is None else carrier[start:stop],
        )


@njit(nogil=True, cache=True)
def count_serial(x: Any, scale: float, fmt: Layout) -> tuple[int, int]:
    """How many values lie beyond the largest before the clamp, and how many that are not zero become zero."""
    scale = f32(scale)
    # the tie between zero and the smallest subnormal goes to zero
    half = i32(i32(fmt.least + fmt.align) - i32(24 << 23))
    saturated, flushed = i32(0), i32(0)
    for i in range(len(x)):
        value = f32(_widen(x[i]))
        magnitude = i32(_bits(f32(value * scale)) & _MAGNITUDE)
        saturated += i32(magnitude > fmt.top) & i32(magnitude <= _INFINITY)
        flushed += i32(magnitude <= half) & i32(value != f32(0.0))
    return saturated, flushed


@njit(nogil=True, cache=True)
def decode_serial(codes: Any, scale: float, fmt: Layout, values: Any) -> None:
    """values = codes * scale, as bits: int32 (float32), or uint16 (bfloat16, rounded once to nearest even)."""
    scale = f32(scale)
    shift, least, unit, top_code = fmt.shift, fmt.least, fmt.unit, fmt.top_code
    for i in range(len(codes)):
        code = i32(codes[i])
        field = i32(code & i32(0x7F))
        # read with the exponent field one too large, then less the implicit one: exact for subnormals
        low = _bits(f32(_float(i32(i32(field << shift) + least)) - unit))
        high = i32(i32(field << shift) + i32(least - i32(1 << 23)))
        value = low if field < i32(1 << i32(23 - shift)) else high
        if field > top_code:
            value = _INFINITY if field == i32(0x7C) else _NAN
        bits = _bits(f32(_float(i32(value | i32(i32(code & i32(0x80)) << 24))) * scale))
        if values.itemsize == 2:
            values[i] = i32(i32(bits + i32(0x7FFF) + i32(i32(bits >> 16) & i32(1))) >> 16)
        else:
            values[i] = bits


@njit(nogil=True, cache=True, parallel=True)
def decode_parallel(codes: Any, scale: float, fmt: Layout, values: Any, chunks: int) -> None:
    """`decode_serial` over chunks in parallel."""
    size = _chunk(len(codes), chunks)
    for c in prange(chunks):
        decode_serial(codes[c * size : (c + 1) * size], scale, fmt, values[c * size : (c + 1) * size])
