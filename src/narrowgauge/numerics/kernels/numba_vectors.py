"""E4M3FN sixteen values at a time, in LLVM's vectors: for loops over tiles, each value of which has the tile's scale.

A loop over the values of one tile is too short for what LLVM adds around a loop that it vectorizes itself, and an array
with the scale of each value costs as much to write and read as the codes do. All accesses are unchecked. The
arithmetic is that of `numba_rows`, bit for bit.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from narrowgauge.numerics.formats import E4M3FN
from narrowgauge.numerics.kernels.numba_bits import INFINITY, MAGNITUDE, layout

LANES = 16

_SHIFT, _LEAST, _TOP = layout(E4M3FN)[:3]
_INTS, _FLOATS = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(ir.FloatType(), LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_BYTES, _SHORTS = ir.VectorType(ir.IntType(8), LANES), ir.VectorType(ir.IntType(16), LANES)


def _all(vector: Any, value: Any) -> Any:
    return ir.Constant(vector, [value] * LANES)


def _spread(builder: Any, value: Any) -> Any:
    """A float32 in all lanes."""
    one = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, ir.Constant(_FLOATS, ir.Undefined), _all(_INTS, 0))


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any, vector: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


def _extreme(builder: Any, name: str, a: Any, b: Any) -> Any:
    function = ir.FunctionType(_INTS, [_INTS, _INTS])
    return builder.call(builder.module.declare_intrinsic(f"llvm.{name}.v{LANES}i32", (), function), [a, b])


def _load(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Elements as float32: bits of float32 (int32), bfloat16 (uint16) or float16 (int16)."""
    if array_type.dtype == types.int32:
        return builder.load(_address(context, builder, array_type, array, index, _FLOATS), align=4)
    if array_type.dtype == types.int16:
        return builder.fpext(
            builder.load(_address(context, builder, array_type, array, index, _HALVES), align=2), _FLOATS
        )
    wide = builder.zext(builder.load(_address(context, builder, array_type, array, index, _SHORTS), align=2), _INTS)
    return builder.bitcast(builder.shl(wide, _all(_INTS, 16)), _FLOATS)


def _decoded(context: Any, builder: Any, codes_type: Any, codes: Any, index: Any, factor: Any) -> Any:
    """code * factor in float32: the code read as float16, as in `numba_wire_rows`."""
    code = builder.load(_address(context, builder, codes_type, codes, index, _BYTES), align=1)
    half = builder.shl(builder.sext(code, _SHORTS), _all(_SHORTS, 7))
    half = builder.and_(half, _all(_SHORTS, ~0x4000 & 0xFFFF))  # the second sign away
    magnitude = builder.and_(half, _all(_SHORTS, 0x7FFF))
    is_nan = builder.icmp_unsigned("==", magnitude, _all(_SHORTS, 0x7F << 7))
    half = builder.select(is_nan, _all(_SHORTS, 0x7E00), half)
    value = builder.fmul(builder.fpext(builder.bitcast(half, _HALVES), _FLOATS), _all(_FLOATS, 256.0))
    return builder.fmul(value, _spread(builder, factor))


@intrinsic
def encode_16(typing_context: Any, x: Any, i: Any, scale: Any, codes: Any, j: Any) -> Any:
    """codes[j : j + 16] = encode(x[i : i + 16] * scale), to nearest even, saturating; NaN is any code."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x_type, codes_type = signature.args[0], signature.args[3]
        values = _load(context, builder, x_type, arguments[0], arguments[1])
        bits = builder.bitcast(builder.fmul(values, _spread(builder, arguments[2])), _INTS)
        clamped = _extreme(builder, "smin", builder.and_(bits, _all(_INTS, int(MAGNITUDE))), _all(_INTS, _TOP))
        exponent = _extreme(builder, "smax", builder.and_(clamped, _all(_INTS, int(INFINITY))), _all(_INTS, _LEAST))
        grid = builder.add(exponent, _all(_INTS, _SHIFT << 23))
        rounded = builder.fadd(builder.bitcast(clamped, _FLOATS), builder.bitcast(grid, _FLOATS))
        steps = builder.sub(builder.bitcast(rounded, _INTS), grid)
        code = builder.add(steps, builder.lshr(exponent, _all(_INTS, _SHIFT)))
        code = builder.sub(code, _all(_INTS, _LEAST >> _SHIFT))
        sign = builder.and_(builder.lshr(bits, _all(_INTS, 24)), _all(_INTS, 0x80))
        target = _address(context, builder, codes_type, arguments[3], arguments[4], _BYTES)
        builder.store(builder.trunc(builder.or_(code, sign), _BYTES), target, align=1)
        return context.get_dummy_value()

    return types.void(x, types.intp, types.float32, codes, types.intp), codegen


@intrinsic
def prefetch(typing_context: Any, array: Any, i: Any) -> Any:
    """Have the cache line of element `i`, which may lie beyond the end, on its way from memory."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        address = _address(context, builder, signature.args[0], *arguments, ir.IntType(8))
        function = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        call = builder.module.declare_intrinsic("llvm.prefetch", (pointer,), function)
        builder.call(call, [address, *(ir.Constant(number, flag) for flag in (0, 2, 1))])  # a read, into L2, of data
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


def _decoder(align: int, adds: bool) -> Any:
    """out[i : i + 16] = codes[j : j + 16] * factor, or that added to it; of whole cache lines past the caches."""

    @intrinsic
    def decode(typing_context: Any, codes: Any, j: Any, factor: Any, out: Any, i: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            values = _decoded(context, builder, signature.args[0], *arguments[:3])
            target = _address(context, builder, signature.args[3], arguments[3], arguments[4], _FLOATS)
            if adds:
                values = builder.fadd(builder.load(target, align=align), values)
            store = builder.store(values, target, align=align)
            if align == 64:
                store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
            return context.get_dummy_value()

        return types.void(codes, types.intp, types.float32, out, types.intp), codegen

    return decode


decode_16, accumulate_16, stream_16 = _decoder(4, False), _decoder(4, True), _decoder(64, False)
