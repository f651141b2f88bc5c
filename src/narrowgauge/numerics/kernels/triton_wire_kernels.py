"""Triton kernels for rows of values on the wire; `triton_wire` runs them.

A program holds BLOCKS blocks of a row, WIDTH (a power of two) places each, of which `width` are values. PACKED: two
codes share a byte. SCALE_BYTES: 1 (E8M0) or 4 (float32, the lowest byte first: rows begin at any address).
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.numerics.kernels.triton_philox import words_of
from narrowgauge.numerics.kernels.triton_round import (
    decode,
    decode_integer,
    encode,
    encode_integer,
    narrow,
    stochastic_integer,
    widen,
)
from narrowgauge.numerics.kernels.triton_scales import block_scales, e8m0_factor


@triton.jit
def _place(n, width, programs_across, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row, the blocks of this program [BLOCKS] and its places in the row [BLOCKS, WIDTH], and which of these exist."""
    program = tl.program_id(0)
    block = (program % programs_across) * BLOCKS + tl.arange(0, BLOCKS)
    within = tl.arange(0, WIDTH)[None, :]
    place = block.to(tl.int64)[:, None] * width + within
    return (program // programs_across).to(tl.int64), block.to(tl.int64), place, (within < width) & (place < n)


@triton.jit
def _store_row(  # type: ignore[no-untyped-def]
    values, words, row, codes, code_bytes, block, blocks, place, mask, residual, residual_mask,
    RULE: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, TOP: tl.constexpr, STOCHASTIC: tl.constexpr,
    SCALE_BYTES: tl.constexpr, PACKED: tl.constexpr, FEEDBACK: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Codes and scales of `values` (float32 [BLOCKS, WIDTH], 0 where masked) into a row that begins at `row`."""
    largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    finite = largest < 0x7F800000
    scale, stored, factor = block_scales(largest.to(tl.float32, bitcast=True), 0.0, RULE, EXPONENT, MANTISSA, TOP)
    scaled = values * scale[:, None]
    if EXPONENT:
        code = encode(scaled, words, EXPONENT, MANTISSA, TOP, STOCHASTIC)
    elif STOCHASTIC:
        code = stochastic_integer(scaled, words, TOP)
    else:
        code = encode_integer(scaled, True, False, TOP)
    code = tl.where(finite[:, None], code, 0)
    if FEEDBACK:
        sent = _value(code, EXPONENT, MANTISSA) * factor[:, None]
        tl.store(residual, values - sent, mask=residual_mask & finite[:, None])
    if PACKED:
        low, high = tl.split(tl.reshape(code, [BLOCKS, WIDTH // 2, 2]))
        first, _ = tl.split(tl.reshape(place, [BLOCKS, WIDTH // 2, 2]))
        exists, _ = tl.split(tl.reshape(mask.to(tl.int32), [BLOCKS, WIDTH // 2, 2]))
        tl.store(codes + row + first // 2, ((low & 0xF) | ((high & 0xF) << 4)).to(tl.uint8), mask=exists != 0)
    else:
        tl.store(codes + row + place, code.to(tl.uint8), mask=mask)
    scales = codes + row + code_bytes + block * SCALE_BYTES
    if SCALE_BYTES == 1:
        tl.store(scales, tl.where(finite, stored, 0xFF).to(tl.uint8), mask=block < blocks)
    else:
        word = tl.where(finite, stored.to(tl.int32, bitcast=True), 0x7FC00000)
        for k in tl.static_range(4):
            tl.store(scales + k, ((word >> (8 * k)) & 0xFF).to(tl.uint8), mask=block < blocks)


@triton.jit
def _value(code, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 values of codes (int32)."""
    if EXPONENT:
        return decode(code, EXPONENT, MANTISSA)
    else:
        return decode_integer(code, True, False)


@triton.jit
def _load_values(  # type: ignore[no-untyped-def]
    row, codes, code_bytes, block, blocks, place, mask,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, SCALE_BYTES: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The float32 values [BLOCKS, WIDTH] of a row that begins at `row`."""
    if PACKED:
        byte = tl.load(codes + row + place // 2, mask=mask, other=0).to(tl.int32)
        code = (byte >> ((place & 1) * 4).to(tl.int32)) & 0xF
        if EXPONENT == 0:
            code = (code ^ 8) - 8
    else:
        code = tl.load(codes + row + place, mask=mask, other=0).to(tl.int32)
    scales = codes + row + code_bytes + block * SCALE_BYTES
    if SCALE_BYTES == 1:
        factor = e8m0_factor(tl.load(scales, mask=block < blocks, other=0).to(tl.int32))
    else:
        word = tl.zeros_like(block).to(tl.int32)
        for k in tl.static_range(4):
            word |= tl.load(scales + k, mask=block < blocks, other=0).to(tl.int32) << (8 * k)
        factor = word.to(tl.float32, bitcast=True)
    return _value(code, EXPONENT, MANTISSA) * factor[:, None]


@triton.jit(do_not_specialize=["stream"])
def encode_kernel(  # type: ignore[no-untyped-def]
    x, numel, n, width, blocks, programs_across, codes, code_bytes, row_bytes, residual, key, stream,
    RULE: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, TOP: tl.constexpr, STOCHASTIC: tl.constexpr,
    SCALE_BYTES: tl.constexpr, PACKED: tl.constexpr, FEEDBACK: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """codes (uint8) = the values of `x` in rows of `n`, filled up with zeros. residual: float32, as `x`."""
    row, block, place, mask = _place(n, width, programs_across, BLOCKS, WIDTH)
    at = row * n + place
    there = mask & (at < numel)
    values = widen(tl.load(x + at, mask=there, other=0.0))
    if FEEDBACK:
        values += tl.load(residual + at, mask=there, other=0.0)
    words = tl.zeros_like(at).to(tl.uint32)
    if STOCHASTIC:
        words = words_of(at, tl.load(key), stream)
    _store_row(
        values, words, row * row_bytes, codes, code_bytes, block, blocks, place, mask, residual + at, there,
        RULE, EXPONENT, MANTISSA, TOP, STOCHASTIC, SCALE_BYTES, PACKED, FEEDBACK, BLOCKS, WIDTH,
    )  # fmt: skip


@triton.jit
def decode_kernel(  # type: ignore[no-untyped-def]
    codes, numel, n, width, blocks, programs_across, code_bytes, row_bytes, out,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, SCALE_BYTES: tl.constexpr, PACKED: tl.constexpr,
    BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out = the first `numel` values of rows of `n`."""
    row, block, place, mask = _place(n, width, programs_across, BLOCKS, WIDTH)
    at = row * n + place
    values = _load_values(
        row * row_bytes, codes, code_bytes, block, blocks, place, mask, EXPONENT, MANTISSA, SCALE_BYTES, PACKED
    )
    tl.store(out + at, narrow(values, out.dtype.element_ty), mask=mask & (at < numel))


@triton.jit(do_not_specialize=["rows", "stream"])
def reduce_kernel(  # type: ignore[no-untyped-def]
    rows_of_codes, rows, n, width, blocks, programs_across, code_bytes, row_bytes, divisor, total, codes, residual, key,
    stream, RULE: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, TOP: tl.constexpr,
    STOCHASTIC: tl.constexpr, SCALE_BYTES: tl.constexpr, PACKED: tl.constexpr, FEEDBACK: tl.constexpr,
    TOTAL: tl.constexpr, CODES: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The sum of rows over `divisor` (float32): into total (float32) where TOTAL, encoded into codes where CODES."""
    _, block, place, mask = _place(n, width, programs_across, BLOCKS, WIDTH)
    row = tl.program_id(0).to(tl.int64) * 0  # where a row begins, in bytes: they may be more than 2^31
    values = _load_values(
        row, rows_of_codes, code_bytes, block, blocks, place, mask, EXPONENT, MANTISSA, SCALE_BYTES, PACKED
    )
    for _ in range(1, rows):
        row += row_bytes
        values += _load_values(
            row, rows_of_codes, code_bytes, block, blocks, place, mask, EXPONENT, MANTISSA, SCALE_BYTES, PACKED
        )
    values = tl.div_rn(values, tl.zeros_like(values) + divisor)
    if TOTAL:
        tl.store(total + place, values, mask=mask)
    if CODES:
        if FEEDBACK:
            values += tl.load(residual + place, mask=mask, other=0.0)
        values = tl.where(mask, values, 0.0)
        words = tl.zeros_like(place).to(tl.uint32)
        if STOCHASTIC:
            words = words_of(place, tl.load(key), stream)
        _store_row(
            values, words, 0, codes, code_bytes, block, blocks, place, mask, residual + place, mask,
            RULE, EXPONENT, MANTISSA, TOP, STOCHASTIC, SCALE_BYTES, PACKED, FEEDBACK, BLOCKS, WIDTH,
        )  # fmt: skip
