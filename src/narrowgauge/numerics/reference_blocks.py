"""The scalar twin of matrices: block scales, casts by tiles, and the Hadamard transform, in plain loops.

A matrix is a list of rows of float32 bits. Each step of a formula is rounded once, by `reference`.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from narrowgauge.numerics import reference
from narrowgauge.numerics.formats import E2M1FN, E4M3FN, E8M0FNU, Format
from narrowgauge.numerics.granularity import Block
from narrowgauge.numerics.reference import FLT_MAX, INFINITY, NAN, SIGN, bits_of, divide, multiply
from narrowgauge.numerics.scaling import ScaleRule

ONE = bits_of(1.0)
E8M0_RULES = (ScaleRule.E8M0_UP, ScaleRule.E8M0_FLOOR)

Matrix = list[list[int]]


class Blocks(NamedTuple):
    """A matrix cast by tiles: its codes, one stored scale a tile (float32 bits or a byte), the amax of the whole."""

    codes: Matrix
    scales: Matrix
    amax: int
    saturated: int
    flushed: int


def quantize(x: Matrix, fmt: Format, block: Block, rule: ScaleRule, key: int | None = None, stream: int = 0) -> Blocks:
    """Cast a matrix by tiles; key: round stochastically, value i of the logical order by `reference.random_word`.

    A NaN makes the scale of its tile NaN where the format has none (float32 scales of other formats leave it to the
    codes), and is code 0 there.
    """
    columns = len(x[0]) if x else 0
    down, across = block.grid_of(len(x), columns)
    whole = _largest(x)
    codes = [[0] * columns for _ in x]
    scales = [[0] * across for _ in range(down)]
    saturated = flushed = 0
    for i, j in product(range(down), range(across)):
        inside = _tile(i, j, block, len(x), columns)
        quant_scale, scales[i][j] = block_scales(_largest([[x[r][c] for r, c in inside]]), fmt, rule, whole)
        for r, c in inside:
            scaled = multiply(x[r][c], quant_scale)
            if scaled % SIGN > INFINITY and not fmt.has_nan:
                scaled = 0
            if key is None:
                code = reference.encode(scaled, fmt, saturating=True)
            else:
                word = reference.random_word(key, stream, r * columns + c)
                code = reference.encode_stochastically(scaled, fmt, word, saturating=True)
            codes[r][c] = code
            saturated += bits_of(fmt.max) < scaled % SIGN <= INFINITY
            flushed += x[r][c] % SIGN != 0 and reference.decode(code, fmt) % SIGN == 0
    return Blocks(codes, scales, whole, saturated, flushed)


def dequantize(
    codes: Matrix, scales: Matrix, fmt: Format, block: Block, rule: ScaleRule, tensor_amax: int | None = None
) -> Matrix:
    """The float32 bits of codes times the factor of their tile; NVFP4's lacks the tensor's part if no amax is given."""
    columns = len(codes[0]) if codes else 0
    values = [[0] * columns for _ in codes]
    for i, j in product(range(len(scales)), range(len(scales[0]) if scales else 0)):
        by = factor(scales[i][j], rule, tensor_amax)
        for r, c in _tile(i, j, block, len(codes), columns):
            values[r][c] = multiply(reference.decode(codes[r][c], fmt), by)
    return values


def block_scales(amax: int, fmt: Format, rule: ScaleRule, tensor_amax: int) -> tuple[int, int]:
    """Of one tile: bits of the multiplier before the cast, and the scale stored (float32 bits or a byte)."""
    if rule is ScaleRule.NVFP4:
        return nvfp4_scales(amax, tensor_amax)
    quant_scale = reference.quant_scale(amax, fmt, rule)
    if rule is ScaleRule.E8M0_UP:
        stored = reference.e8m0_byte_up(amax, fmt)
    elif rule is ScaleRule.E8M0_FLOOR:
        stored = reference.e8m0_byte_floor(amax, fmt)
    elif amax > INFINITY and not fmt.has_nan:
        stored = NAN
    else:
        stored = reference.dequant_scale(quant_scale)
    return ONE if quant_scale == NAN else quant_scale, stored


def nvfp4_scales(amax: int, tensor_amax: int) -> tuple[int, int]:
    """Bits of the multiplier of a tile, and its E4M3 byte, in TransformerEngine's order: each operation rounds once.

    S = min(2688 / tensor_amax, FLT_MAX), or 1 where that is 0; byte = e4m3(amax * (S * fl(1/6))); multiplier
    min(1 / (byte * fl(1/S)), FLT_MAX), which is 1 where the byte is NaN.
    """
    largest = bits_of(E2M1FN.max * E4M3FN.max)
    tensor_scale = _smaller(divide(largest, tensor_amax), FLT_MAX) or ONE
    sixth = divide(ONE, bits_of(E2M1FN.max))
    byte = reference.encode(multiply(amax, multiply(tensor_scale, sixth)), E4M3FN)
    inverse = multiply(reference.decode(byte, E4M3FN), divide(ONE, tensor_scale))
    quant_scale = _smaller(divide(ONE, inverse), FLT_MAX)
    return ONE if quant_scale > INFINITY else quant_scale, byte


def factor(stored: int, rule: ScaleRule, tensor_amax: int | None = None) -> int:
    """Bits of what a tile's codes are multiplied by; for NVFP4 (byte * tensor_amax) * fl(1/2688), or the byte alone."""
    if rule in E8M0_RULES:
        return reference.decode(stored, E8M0FNU)
    if rule is not ScaleRule.NVFP4:
        return stored
    byte = reference.decode(stored, E4M3FN)
    if tensor_amax is None:
        return byte
    return multiply(multiply(byte, tensor_amax), divide(ONE, bits_of(E2M1FN.max * E4M3FN.max)))


def hadamard(values: list[int], signs: tuple[int, ...]) -> list[int]:
    """Bits of values @ (diag(signs) H16 / 4): sums and differences of values 1, 2, 4 and 8 apart, then the quarter."""
    values = [v if sign > 0 else v ^ SIGN for v, sign in zip(values, signs, strict=True)]
    for distance in (1, 2, 4, 8):
        sums = list(values)
        for i in (i for i in range(16) if not i & distance):
            first, second = values[i], values[i + distance]
            sums[i], sums[i + distance] = reference.add(first, second), reference.add(first, second ^ SIGN)
        values = sums
    return [multiply(v, bits_of(0.25)) for v in values]


def _tile(i: int, j: int, block: Block, rows: int, columns: int) -> list[tuple[int, int]]:
    """Row and column of every value of a tile."""
    height, width = block.size_in(rows, columns)
    down = range(i * height, min((i + 1) * height, rows))
    return [(r, c) for r in down for c in range(j * width, min((j + 1) * width, columns))]


def _largest(x: Matrix) -> int:
    """Bits of the largest magnitude: NaN where there is one, 0 of nothing."""
    largest = max((bits % SIGN for row in x for bits in row), default=0)
    return NAN if largest > INFINITY else largest


def _smaller(a: int, b: int) -> int:
    """The smaller of two values that are not negative; NaN where `a` is."""
    return a if a > INFINITY else min(a, b)
