"""Triton kernels of casts with one scale for each tile of a matrix, and of the way back; `triton_blocks` runs them.

A program holds BLOCKS_DOWN x BLOCKS_ACROSS tiles of at most HEIGHT x WIDTH values each, as four dimensions. A tile of
more values is cut into pieces, each of a program of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.numerics.kernels.triton_philox import words_of, words_of_quads
from narrowgauge.numerics.kernels.triton_round import (
    decode,
    decode_integer,
    encode,
    encode_integer,
    lift,
    narrow,
    widen,
)
from narrowgauge.numerics.kernels.triton_scales import block_scales, stored_factor


@triton.jit
def _place(  # type: ignore[no-untyped-def]
    programs_across, pieces_down, pieces_across,
    BLOCKS_DOWN: tl.constexpr, HEIGHT: tl.constexpr, BLOCKS_ACROSS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Where this program's values are: first tile and piece of a tile, down and across."""
    program = tl.program_id(0)
    down = program // programs_across
    across = program % programs_across
    return (
        (down // pieces_down) * BLOCKS_DOWN,
        (down % pieces_down) * HEIGHT,
        (across // pieces_across) * BLOCKS_ACROSS,
        (across % pieces_across) * WIDTH,
    )


@triton.jit
def _axis(first, piece, size, extent, BLOCKS: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Indices along one axis [BLOCKS, SIZE] and which of them exist."""
    within = piece + tl.arange(0, SIZE)[None, :]
    index = (first + tl.arange(0, BLOCKS)[:, None]) * size + within
    return index, (within < size) & (index < extent)


@triton.jit
def _block_amax(values):  # type: ignore[no-untyped-def]
    """Bits of the largest magnitude of each tile; NaN is larger than infinity as an integer."""
    return tl.max(tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=3), axis=1)


@triton.jit
def block_amax_kernel(  # type: ignore[no-untyped-def]
    x, amax, whole, rows, columns, height, width, down, across, programs_across, pieces_down, pieces_across,
    BLOCKS_DOWN: tl.constexpr, HEIGHT: tl.constexpr, BLOCKS_ACROSS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """amax (int32 [down, across], zero before) and whole (int32): bits of the largest magnitudes."""
    first_down, piece_down, first_across, piece_across = _place(
        programs_across, pieces_down, pieces_across, BLOCKS_DOWN, HEIGHT, BLOCKS_ACROSS, WIDTH
    )
    row, has_row = _axis(first_down, piece_down, height, rows, BLOCKS_DOWN, HEIGHT)
    column, has_column = _axis(first_across, piece_across, width, columns, BLOCKS_ACROSS, WIDTH)
    place = row.to(tl.int64)[:, :, None, None] * columns + column[None, None, :, :]
    mask = has_row[:, :, None, None] & has_column[None, None, :, :]
    largest = _block_amax(widen(tl.load(x + place, mask=mask, other=0.0)))
    block_row = first_down + tl.arange(0, BLOCKS_DOWN)[:, None]
    block_column = first_across + tl.arange(0, BLOCKS_ACROSS)[None, :]
    exists = (block_row < down) & (block_column < across)
    tl.atomic_max(amax + (block_row.to(tl.int64) * across + block_column), largest, mask=exists)
    tl.atomic_max(whole, tl.max(tl.max(largest, axis=1), axis=0))


@triton.jit(do_not_specialize=["stream"])
def quantize_blocks_kernel(  # type: ignore[no-untyped-def]
    x, amax, whole, codes, carrier, stored, counts, key, stream,
    rows, columns, height, width, down, across, programs_across, pieces_down, pieces_across,
    RULE: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, TOP: tl.constexpr,
    ROOT: tl.constexpr, SIGNED: tl.constexpr, FLOOR: tl.constexpr, STOCHASTIC: tl.constexpr, QUADS: tl.constexpr,
    CODES: tl.constexpr, CARRIER: tl.constexpr, COUNT: tl.constexpr, HAS_AMAX: tl.constexpr, HAS_WHOLE: tl.constexpr,
    BLOCKS_DOWN: tl.constexpr, HEIGHT: tl.constexpr, BLOCKS_ACROSS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """codes (uint8), carrier and stored scales of a matrix [rows, columns] in tiles of height x width.

    amax: int32 [down, across], read where HAS_AMAX. whole: int32, read where HAS_WHOLE, else raised to the amax of all.
    QUADS: the columns come in fours whose random words are one counter's.
    """
    first_down, piece_down, first_across, piece_across = _place(
        programs_across, pieces_down, pieces_across, BLOCKS_DOWN, HEIGHT, BLOCKS_ACROSS, WIDTH
    )
    row, has_row = _axis(first_down, piece_down, height, rows, BLOCKS_DOWN, HEIGHT)
    column, has_column = _axis(first_across, piece_across, width, columns, BLOCKS_ACROSS, WIDTH)
    place = row.to(tl.int64)[:, :, None, None] * columns + column[None, None, :, :]
    mask = has_row[:, :, None, None] & has_column[None, None, :, :]
    values = widen(tl.load(x + place, mask=mask, other=0.0))

    block_row = first_down + tl.arange(0, BLOCKS_DOWN)[:, None]
    block_column = first_across + tl.arange(0, BLOCKS_ACROSS)[None, :]
    block = block_row.to(tl.int64) * across + block_column
    exists = (block_row < down) & (block_column < across)
    largest = tl.load(amax + block, mask=exists, other=0) if HAS_AMAX else _block_amax(values)
    of_tensor = 0.0
    if HAS_WHOLE:
        of_tensor = tl.load(whole).to(tl.float32, bitcast=True)
    else:
        tl.atomic_max(whole, tl.max(tl.max(largest, axis=1), axis=0))
    largest = largest.to(tl.float32, bitcast=True)
    scale, kept, factor = block_scales(largest, of_tensor, RULE, EXPONENT, MANTISSA, TOP)
    if (piece_down == 0) & (piece_across == 0):
        tl.store(stored + block, kept.to(stored.dtype.element_ty), mask=exists)

    words = tl.zeros_like(place).to(tl.uint32)
    if STOCHASTIC:
        if QUADS:
            quads: tl.constexpr = BLOCKS_ACROSS * WIDTH // 4
            first = first_across * width + piece_across
            quad = ((row.to(tl.int64)[:, :, None] * columns + first) >> 2) + tl.arange(0, quads)[None, None, :]
            words = words_of_quads(quad, tl.load(key), stream)
            words = tl.reshape(words, [BLOCKS_DOWN, HEIGHT, BLOCKS_ACROSS, WIDTH])
        else:
            words = words_of(place, tl.load(key), stream)
    scaled = values * scale[:, None, :, None]
    if FLOOR:
        scaled = lift(scaled, values, FLOOR)
    if EXPONENT:
        code = encode(scaled, words, EXPONENT, MANTISSA, TOP, STOCHASTIC)
    else:
        code = encode_integer(scaled, SIGNED, ROOT, TOP)
    if CODES:
        tl.store(codes + place, code.to(tl.uint8), mask=mask)
    if CARRIER:
        carried = _value(code, EXPONENT, MANTISSA, SIGNED, ROOT) * factor[:, None, :, None]
        tl.store(carrier + place, narrow(carried, carrier.dtype.element_ty), mask=mask)
    if COUNT:
        magnitude = scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        saturated = (magnitude > TOP) & (magnitude <= 0x7F800000) & mask
        flushed = ((code & ((1 << (EXPONENT + MANTISSA)) - 1)) == 0) & (values != 0.0) & mask
        tl.atomic_add(counts, _total(saturated))
        tl.atomic_add(counts + 1, _total(flushed))


@triton.jit
def _value(  # type: ignore[no-untyped-def]
    code, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, SIGNED: tl.constexpr, ROOT: tl.constexpr
):
    """float32 values of codes (int32), but for their scale."""
    if EXPONENT:
        return decode(code, EXPONENT, MANTISSA)
    else:
        return decode_integer(code, SIGNED, ROOT)


@triton.jit
def _total(flags):  # type: ignore[no-untyped-def]
    return tl.sum(tl.sum(tl.sum(tl.sum(flags.to(tl.int64), axis=3), axis=2), axis=1), axis=0)


@triton.jit
def dequantize_blocks_kernel(  # type: ignore[no-untyped-def]
    codes, stored, whole, out, rows, columns, height, width, across, programs_across,
    KIND: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, SIGNED: tl.constexpr, ROOT: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out = codes (uint8) * the factor of their tile, the product in float32; KIND: as in `stored_factor`."""
    program = tl.program_id(0)
    row = ((program // programs_across) * HEIGHT + tl.arange(0, HEIGHT))[:, None]
    column = ((program % programs_across) * WIDTH + tl.arange(0, WIDTH))[None, :]
    mask = (row < rows) & (column < columns)
    place = row.to(tl.int64) * columns + column
    block = (row // height).to(tl.int64) * across + column // width
    kept = tl.load(stored + block, mask=mask, other=0)
    factor = stored_factor(kept, tl.load(whole) if KIND == "NVFP4" else 0.0, KIND)
    code = tl.load(codes + place, mask=mask, other=0).to(tl.int32)
    values = _value(code, EXPONENT, MANTISSA, SIGNED, ROOT) * factor
    tl.store(out + place, narrow(values, out.dtype.element_ty), mask=mask)
