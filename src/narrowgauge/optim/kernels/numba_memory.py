"""Memory by address inside Numba: one call takes tensors of any number and kind, known by a table of integers.

A function reads and writes up to sixteen blocks of memory, of which the compiler is told that they do not overlap, so
that it vectorizes loops over more of them than it would compare at run time.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

BLOCKS = 16


@intrinsic(prefer_literal=True)
def load(typing_context: Any, block: Any, dtype: Any, address: Any, index: Any) -> Any:
    """Element `index` of the `dtype` values at `address`.

    block: a literal, 0 to 15. Within one function, memory of different numbers must not overlap.
    """
    if not isinstance(block, types.IntegerLiteral):
        return None
    element, number = dtype.dtype, block.literal_value

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(context, builder, element, *arguments[2:])
        access = builder.load(pointer, align=element.bitwidth // 8)
        _mark(builder, access, number)
        return access

    return element(block, dtype, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def store(typing_context: Any, block: Any, dtype: Any, address: Any, index: Any, value: Any) -> Any:
    """Set element `index` of the `dtype` values at `address`, see `load`."""
    if not isinstance(block, types.IntegerLiteral):
        return None
    element, number = dtype.dtype, block.literal_value

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(context, builder, element, *arguments[2:4])
        access = builder.store(arguments[4], pointer, align=element.bitwidth // 8)
        _mark(builder, access, number)
        return context.get_dummy_value()

    return types.void(block, dtype, types.int64, types.int64, element), codegen


def _pointer(context: Any, builder: Any, element: Any, address: Any, index: Any) -> Any:
    return builder.gep(builder.inttoptr(address, context.get_data_type(element).as_pointer()), [index])


def _mark(builder: Any, access: Any, block: int) -> None:
    """Say of a load or a store that it touches its own block and no other."""
    domain = builder.module.add_metadata(["narrowgauge blocks"])
    scopes = [builder.module.add_metadata([f"block {k}", domain]) for k in range(BLOCKS)]
    access.set_metadata("alias.scope", builder.module.add_metadata([scopes[block]]))
    others = [scope for k, scope in enumerate(scopes) if k != block]
    access.set_metadata("noalias", builder.module.add_metadata(others))


@intrinsic
def widest(typing_context: Any) -> Any:
    """Does nothing: the function that calls it is compiled for the widest vectors there are.

    LLVM by default takes half of what AVX-512 has, for the sake of code around it. Divisions and roots come no sooner
    from wider vectors, but everything else does.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _widen(builder)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def standalone(typing_context: Any) -> Any:
    """As `widest`, and the function is not compiled into those that call it, which would take long and lose that."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.function.attributes.add("noinline")
        _widen(builder)
        return context.get_dummy_value()

    return types.void(), codegen


def _widen(builder: Any) -> None:
    # llvmlite's own `add` knows no attribute with a value
    set.add(builder.function.attributes, '"prefer-vector-width"="512"')


@intrinsic
def fused(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c in float32, rounded once."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        f32 = ir.FloatType()
        fma = builder.module.declare_intrinsic("llvm.fma", (f32,), ir.FunctionType(f32, [f32] * 3))
        return builder.call(fma, arguments)

    return types.float32(types.float32, types.float32, types.float32), codegen
