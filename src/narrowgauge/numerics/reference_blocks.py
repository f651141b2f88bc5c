"""The scalar twin of matrices: block scales, casts by tiles, and the Hadamard transform, in plain loops.

A matrix is a list of rows of float32 bits. Each step of a formula is rounded once, by `reference`.
"""

from __future__ import annotations

from itertools import pairwise, product
from typing import NamedTuple

from narrowgauge.numerics import code_book, reference
from narrowgauge.numerics.companding import DYNAMIC, LINEAR, SQUARE_ROOT, Companding, limit_of
from narrowgauge.numerics.formats import E2M1FN, E4M3FN, E8M0FNU, Format
from narrowgauge.numerics.granularity import Block
from narrowgauge.numerics.reference import FLT_MAX, INFINITY, NAN, SIGN, bits_of, divide, float_of, multiply
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


def quantize(
    x: Matrix,
    fmt: Format,
    block: Block,
    rule: ScaleRule,
    key: int | None = None,
    stream: int = 0,
    companding: Companding = LINEAR,
    nonzero: bool = False,
) -> Blocks:
    """Cast a matrix by tiles; key: round stochastically, value i of the logical order by `reference.random_word`.

    companding: any but RANGE_EXPANSION, whose logarithms and powers are rounded otherwise on every device.

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
        quant_scale, scales[i][j] = block_scales(_largest([[x[r][c] for r, c in inside]]), fmt, rule, whole, companding)
        for r, c in inside:
            scaled = multiply(x[r][c], quant_scale)
            word = None if key is None else reference.random_word(key, stream, r * columns + c)
            code = _encode(scaled, fmt, companding, word)
            if nonzero and _value(code, fmt, companding) % SIGN == 0 and 0 < x[r][c] % SIGN <= INFINITY:
                code = _least_code(x[r][c] >= SIGN, fmt, companding)
            codes[r][c] = code
            saturated += bits_of(limit_of(fmt, companding)) < scaled % SIGN <= INFINITY
            flushed += x[r][c] % SIGN != 0 and _value(code, fmt, companding) % SIGN == 0
    return Blocks(codes, scales, whole, saturated, flushed)


def dequantize(
    codes: Matrix,
    scales: Matrix,
    fmt: Format,
    block: Block,
    rule: ScaleRule,
    tensor_amax: int | None = None,
    companding: Companding = LINEAR,
) -> Matrix:
    """The float32 bits of codes times the factor of their tile; NVFP4's lacks the tensor's part if no amax is given."""
    columns = len(codes[0]) if codes else 0
    values = [[0] * columns for _ in codes]
    for i, j in product(range(len(scales)), range(len(scales[0]) if scales else 0)):
        by = factor(scales[i][j], rule, tensor_amax)
        for r, c in _tile(i, j, block, len(codes), columns):
            values[r][c] = multiply(_value(codes[r][c], fmt, companding), by)
    return values


def _encode(scaled: int, fmt: Format, companding: Companding, word: int | None) -> int:
    """The code of a scaled value, given as its bits."""
    if scaled % SIGN > INFINITY and not fmt.has_nan:
        return 0
    if companding is DYNAMIC:
        values = code_book.values(fmt.signed)
        middles = [float_of(bits_of((a + b) / 2)) for a, b in pairwise(values)]
        return (sum(middle < float_of(scaled) for middle in middles) - code_book.zero_index(fmt.signed)) % 256
    if companding is SQUARE_ROOT:
        scaled = (scaled & SIGN) | reference.square_root(scaled % SIGN)
    if word is None:
        return reference.encode(scaled, fmt, saturating=True)
    return reference.encode_stochastically(scaled, fmt, word, saturating=True)


def _value(code: int, fmt: Format, companding: Companding) -> int:
    """Bits of what a code stands for, but for the scale."""
    if companding is DYNAMIC:
        values = code_book.values(fmt.signed)
        return bits_of(values[(code + code_book.zero_index(fmt.signed)) % 256])
    value = reference.decode(code, fmt)
    return multiply(value, value % SIGN) if companding is SQUARE_ROOT else value


def _least_code(negative: bool, fmt: Format, companding: Companding) -> int:
    """The code of the least value of a sign that is not zero; zero where a format has no negative ones."""
    if negative and not fmt.signed:
        return 0
    if companding is DYNAMIC or fmt.is_integer:
        return 255 if negative else 1
    return 1 | (negative << (fmt.bits - 1))


def block_scales(
    amax: int, fmt: Format, rule: ScaleRule, tensor_amax: int, companding: Companding = LINEAR
) -> tuple[int, int]:
    """Of one tile: bits of the multiplier before the cast, and the scale stored (float32 bits or a byte)."""
    if rule is ScaleRule.NVFP4:
        return nvfp4_scales(amax, tensor_amax)
    quant_scale = reference.quant_scale(amax, fmt, rule, companding)
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
