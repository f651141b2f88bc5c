"""Numba kernels of the CPU: amax, the cast to FP8 codes, and the way back.

Each has a serial form (no thread of its own, the GIL released) and a parallel one that runs it over chunks. A loop
touches at most three arrays: beyond that LLVM gives up proving that they do not overlap, and stops vectorizing.

All arrays are flat and hold bits: `int32` those of float32, `uint16` of bfloat16, `int16` of float16, `uint8` codes. An
output that is not wanted is None, which Numba compiles away. A format is known by its number of mantissa bits, see
`_layout`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

i16, i32, f32 = np.int16, np.int32, np.float32

_INFINITY = np.int32(0x7F800000)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_SIGN = np.int32(-0x80000000)
_NAN = np.int32(0x7FC00000)
# chunks start at multiples of this, so that no two threads write one cache line
_GRAIN = 256
# values decoded into the first-level cache before they are streamed to memory
_BLOCK = 2048


@intrinsic
def _stream_line(typing_context: Any, source: Any, i: Any, target: Any, j: Any) -> Any:
    """target[j : j + 16] = source[i : i + 16] in int32, one cache line, written without reading it first."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        line = ir.VectorType(ir.IntType(32), 16).as_pointer()
        pointers = []
        for array_type, array, index in zip(signature.args[::2], arguments[::2], arguments[1::2], strict=True):
            data = context.make_array(array_type)(context, builder, array).data
            pointers.append(builder.bitcast(builder.gep(data, [index]), line))
        store = builder.store(builder.load(pointers[0], align=4), pointers[1], align=64)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(source, types.intp, target, types.intp), codegen


@njit(nogil=True, cache=True)
def _layout(mantissa_bits: int) -> tuple[int, int, int, int]:
    """What the casts know of E4M3FN (3 mantissa bits) or E5M2 (2): shift, align, least, top.

    shift: mantissa bits of float32 that the format drops. align: shift as an exponent field, a float32 larger by that
    factor has the format's spacing as its ulp. least: exponent field of the smallest normal value. top: float32 bits of
    the largest value.
    """
    shift = 23 - mantissa_bits
    bias = (1 << (6 - mantissa_bits)) - 1
    top_code = 0x7E if mantissa_bits == 3 else 0x7B  # E5M2 keeps the highest exponent for infinity and NaN
    top = (top_code << shift) + ((127 - bias) << 23)
    return i32(shift), i32(shift << 23), i32((128 - bias) << 23), i32(top)


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
def _shift_right(typing_context: Any, bits: Any, count: Any) -> Any:
    """A logical shift in 32 bits; Numba's own works in 64, with half the lanes."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.lshr(*arguments)

    return types.int32(types.int32, types.int32), codegen


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
def cast_serial(x: Any, scale: float, mantissa_bits: int, codes: Any, carrier: Any) -> None:
    """codes (uint8) = encode(x * scale), saturating; carrier = the values of the codes, as bits: uint16 or int32."""
    scale = f32(scale)
    shift, align, least, top = _layout(mantissa_bits)
    first = _shift_right(i32(least + align), shift)
    for i in range(len(x)):
        bits = _bits(f32(_widen(x[i]) * scale))
        magnitude = i32(bits & _MAGNITUDE)
        clamped = i32(min(magnitude, top))
        # a power of two whose ulp is the distance of the format's values here: adding it rounds, ties to even, once
        grid = i32(max(i32(clamped & _INFINITY), least) + align)
        rounded = f32(_float(clamped) + _float(grid))
        is_nan = magnitude > _INFINITY
        if codes is not None:
            steps = i32(_bits(rounded) - grid)
            sign = i32(_shift_right(bits, i32(24)) & i32(0x80))
            code = i32(i32(i32(_shift_right(grid, shift) + steps) - first) | sign)
            codes[i] = np.uint8(i32(sign | i32(0x7F)) if is_nan else code)
        if carrier is not None:
            value = _bits(f32(rounded - _float(grid)))
            value = i32((_NAN if is_nan else value) | i32(bits & _SIGN))
            carrier[i] = i32(value >> 16) if carrier.itemsize == 2 else value


@njit(nogil=True, cache=True, parallel=True)
def cast_parallel(x: Any, scale: float, mantissa_bits: int, codes: Any, carrier: Any, chunks: int) -> None:
    """`cast_serial` over chunks in parallel."""
    size = _chunk(len(x), chunks)
    for c in prange(chunks):
        start, stop = c * size, (c + 1) * size
        cast_serial(
            x[start:stop],
            scale,
            mantissa_bits,
            None if codes is None else codes[start:stop],
            None if carrier is None else carrier[start:stop],
        )


@njit(nogil=True, cache=True)
def count_serial(x: Any, scale: float, mantissa_bits: int) -> tuple[int, int]:
    """How many values lie beyond the largest before the clamp, and how many that are not zero become zero."""
    scale = f32(scale)
    _, align, least, top = _layout(mantissa_bits)
    # the tie between zero and the smallest subnormal goes to zero
    half = i32(i32(least + align) - i32(24 << 23))
    saturated, flushed = i32(0), i32(0)
    for i in range(len(x)):
        value = f32(_widen(x[i]))
        magnitude = i32(_bits(f32(value * scale)) & _MAGNITUDE)
        saturated += i32(magnitude > top) & i32(magnitude <= _INFINITY)
        flushed += i32(magnitude <= half) & i32(value != f32(0.0))
    return saturated, flushed


@njit(nogil=True, cache=True)
def decode_serial(codes: Any, scale: float, mantissa_bits: int, values: Any) -> None:
    """values = codes * scale, as bits: int32 (float32), or uint16 (bfloat16, rounded once to nearest even)."""
    scale = f32(scale)
    # Read as float16: its exponent is as wide as E5M2's or wider, so that subnormals need no case of their own. The
    # shifts are constants because Numba shifts by a variable in 64 bits; the mask takes E4M3FN's second sign bit away.
    is_e4m3 = mantissa_bits == 3
    rebias = f32(256.0) if is_e4m3 else f32(1.0)
    nan = i16(0x7F << 7) if is_e4m3 else i16(0x7F << 8)
    for i in range(len(codes)):
        code = i16(np.int8(codes[i]))
        half = i16(i16(code << 7) & i16(-0x4001)) if is_e4m3 else i16(code << 8)
        half = i16(0x7E00) if i16(half & i16(0x7FFF)) == nan else half
        bits = _bits(f32(f32(_widen(half) * rebias) * scale))
        if values.itemsize == 2:
            rounded = i32(_shift_right(i32(bits + i32(0x7FFF) + i32(_shift_right(bits, i32(16)) & i32(1))), i32(16)))
            values[i] = i32(0x7FC0) if i32(bits & _MAGNITUDE) > _INFINITY else rounded
        else:
            values[i] = bits


@njit(nogil=True, cache=True, parallel=True)
def decode_parallel(codes: Any, scale: float, mantissa_bits: int, values: Any, chunks: int) -> None:
    """`decode_serial` over chunks in parallel."""
    size = _chunk(len(codes), chunks)
    for c in prange(chunks):
        decode_serial(codes[c * size : (c + 1) * size], scale, mantissa_bits, values[c * size : (c + 1) * size])


@njit(nogil=True, cache=True)
def decode_streamed(codes: Any, scale: float, mantissa_bits: int, values: Any) -> None:
    """`decode_serial` to float32 bits that start on a cache line, past the caches: for arrays larger than these."""
    scratch = np.empty(_BLOCK, np.int32)
    whole = len(codes) // _BLOCK * _BLOCK
    for start in range(0, whole, _BLOCK):
        decode_serial(codes[start : start + _BLOCK], scale, mantissa_bits, scratch)
        for i in range(0, _BLOCK, 16):
            _stream_line(scratch, i, values, start + i)
    decode_serial(codes[whole:], scale, mantissa_bits, values[whole:])


@njit(nogil=True, cache=True, parallel=True)
def decode_streamed_parallel(codes: Any, scale: float, mantissa_bits: int, values: Any, chunks: int) -> None:
    """`decode_streamed` over chunks in parallel."""
    size = _chunk(len(codes), chunks)
    for c in prange(chunks):
        decode_streamed(codes[c * size : (c + 1) * size], scale, mantissa_bits, values[c * size : (c + 1) * size])
