"""Floats as bits inside Numba: what its own operators do not say, or say in 64 bits with half the lanes."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from narrowgauge.numerics.companding import LINEAR, SQUARE_ROOT, Companding, limit_of
from narrowgauge.numerics.formats import Format

i32 = np.int32

INFINITY = i32(0x7F800000)
MAGNITUDE = i32(0x7FFFFFFF)
SIGN = i32(-0x80000000)
NAN = i32(0x7FC00000)

# options of what only other kernels call: without entries for Python and for C it compiles in four fifths of the time
INNER = {"cache": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

# what a layout's codes are: floats, integers, or integers on the square root
FLOATS, INTEGERS, SQUARE_ROOTS = range(3)

# (shift, least, top, sign shift, NaN mask, kind, floor): what the casts know of a format, see `layout`
Layout = tuple[int, int, int, int, int, int, int]


def layout(fmt: Format, companding: Companding = LINEAR, nonzero: bool = False) -> Layout:
    """What the casts know of a format of at most 8 bits, and of its curve (LINEAR; of integers also SQUARE_ROOT).

    shift: mantissa bits of float32 that the format drops. least: exponent field of the smallest normal value; of
    integers whether they are signed. top: float32 bits of what the largest code stands for. sign shift: from float32's
    sign to the code's, or past it where that is no bit of its own. NaN mask: 0xFF, or 0 where the format has no NaN,
    which then has code 0. floor: float32 bits of the smallest scaled magnitude of what is not zero, 0 for any.
    """
    top = int(np.float32(limit_of(fmt, companding)).view(np.int32))
    floor = fmt.smallest_subnormal**2 if companding is SQUARE_ROOT else fmt.smallest_subnormal
    floor_bits = int(np.float32(floor).view(np.int32)) if nonzero else 0
    if fmt.is_integer:
        kind = SQUARE_ROOTS if companding is SQUARE_ROOT else INTEGERS
        return 0, int(fmt.signed), top, 23, 0, kind, floor_bits
    nan_mask = 0xFF if fmt.has_nan else 0
    return 23 - fmt.mantissa_bits, (128 - fmt.bias) << 23, top, 32 - fmt.bits, nan_mask, FLOATS, floor_bits


@intrinsic
def bits_of(typing_context: Any, value: Any) -> Any:
    """The bits of a float32 as an int32."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@intrinsic
def float_of(typing_context: Any, bits: Any) -> Any:
    """The float32 that an int32 holds the bits of."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def shift_right(typing_context: Any, bits: Any, count: Any) -> Any:
    """A logical shift in 32 bits; Numba's own works in 64, with half the lanes."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.lshr(*arguments)

    return types.int32(types.int32, types.int32), codegen


@intrinsic
def widen(typing_context: Any, element: Any) -> Any:
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


@intrinsic
def stream_line(typing_context: Any, source: Any, i: Any, target: Any, j: Any) -> Any:
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


@intrinsic
def borrow(typing_context: Any, array: Any) -> Any:
    """The same array without its reference count, whose atomic updates would cost more than a short loop.

    Good for as long as its owner is: an argument until the function returns, a local array until `hold(array)`.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        view = context.make_array(array)(context, builder, arguments[0])
        view.meminfo = ir.Constant(view.meminfo.type, None)
        view.parent = ir.Constant(view.parent.type, None)
        return view._getvalue()

    return array(array), codegen


@intrinsic
def hold(typing_context: Any, owner: Any) -> Any:
    """Does nothing: Numba frees a local array after its last use, which a call to this is."""
    return types.void(owner), lambda context, builder, signature, arguments: context.get_dummy_value()


def _maximum_of(count: int) -> Any:
    """An intrinsic for the largest magnitude among `count` elements from number `i` on, unchecked: their type, as bits.

    The loop over a slice has no length that LLVM knows, and spends more on its ends than on 16 values.
    """

    @intrinsic
    def largest(typing_context: Any, array: Any, i: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = context.make_array(array)(context, builder, arguments[0]).data
            element = data.type.pointee
            vector = ir.VectorType(element, count)
            values = builder.load(builder.bitcast(builder.gep(data, [arguments[1]]), vector.as_pointer()), align=1)
            magnitude = ir.Constant(element, (1 << element.width - 1) - 1)
            values = builder.and_(values, ir.Constant(vector, [magnitude] * count))
            name = f"llvm.vector.reduce.smax.v{count}i{element.width}"
            reduce = builder.module.declare_intrinsic(name, (), ir.FunctionType(element, [vector]))
            return builder.call(reduce, [values])

        return array.dtype(array, types.intp), codegen

    return largest


largest_of_16, largest_of_32, largest_of_128 = (_maximum_of(count) for count in (16, 32, 128))


@intrinsic
def fill_16(typing_context: Any, array: Any, i: Any, value: Any) -> Any:
    """array[i : i + 16] = value, in float32, unchecked."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(array)(context, builder, arguments[0]).data
        vector = ir.VectorType(data.type.pointee, 16)
        target = builder.bitcast(builder.gep(data, [arguments[1]]), vector.as_pointer())
        one = builder.insert_element(ir.Constant(vector, ir.Undefined), arguments[2], ir.Constant(ir.IntType(32), 0))
        everywhere = ir.Constant(ir.VectorType(ir.IntType(32), 16), [ir.Constant(ir.IntType(32), 0)] * 16)
        builder.store(builder.shuffle_vector(one, one, everywhere), target, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), codegen


@njit(**INNER)
def bfloat16_bits(bits: int) -> int:
    """Bits of bfloat16, rounded to nearest even from those of a float32."""
    rounded = i32(shift_right(i32(bits + i32(0x7FFF) + i32(shift_right(bits, i32(16)) & i32(1))), i32(16)))
    return i32(0x7FC0) if i32(bits & MAGNITUDE) > INFINITY else rounded
