"""What the tests of block casts share: matrices of every class of float32, and the comparison with the scalar twin."""

from __future__ import annotations

import functools
import itertools

import hypothesis.extra.numpy as hnp
import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from narrowgauge.numerics import kernels, reference, reference_blocks
from narrowgauge.numerics.companding import LINEAR, Companding
from narrowgauge.numerics.formats import (
    E2M1FN,
    E2M3FN,
    E3M2FN,
    E4M3FN,
    E5M2,
    FP16,
    INT4,
    INT8,
    INT16,
    UINT4,
    UINT8,
    Format,
)
from narrowgauge.numerics.granularity import PER_COLUMN, PER_ROW, PER_TENSOR, Block
from narrowgauge.numerics.kernels import twin
from narrowgauge.numerics.reference import INFINITY, NAN, SIGN
from narrowgauge.numerics.scaling import CURRENT, CURRENT_POW2, E8M0_FLOOR, E8M0_UP, NVFP4, ScaleRule

NARROW = (E4M3FN, E5M2, E2M1FN, E3M2FN, E2M3FN, INT8, UINT8, INT4, UINT4)
FLOATS = (E4M3FN, E5M2, E2M1FN, E3M2FN, E2M3FN)
# every format with every rule that it takes
CASTS = [
    *itertools.product(NARROW, (CURRENT, CURRENT_POW2, E8M0_UP, E8M0_FLOOR)),
    *itertools.product((FP16, INT16), (CURRENT, CURRENT_POW2)),
    (E2M1FN, NVFP4),
]
# the tiles that recipes use, and small ones of which a small matrix has several, ragged at its edges
BLOCKS = [
    PER_TENSOR, PER_ROW, PER_COLUMN, Block(1, 16), Block(16, 1), Block(1, 32), Block(32, 1), Block(16, 16),
    Block(1, 128), Block(128, 1), Block(128, 128), Block(32, 32), Block(1, 3), Block(3, 1), Block(2, 5),
]  # fmt: skip
TILES = [block for block in BLOCKS if None not in (block.rows, block.columns)]

SPECIAL = [0, 1, 2, 0x7FFFFF, 0x800000, 0x3F800000, 0x7F7FFFFF, INFINITY, NAN, 0x7F800001]


def to_bits(x: Tensor) -> reference_blocks.Matrix:
    """The float32 bits of a matrix."""
    return [[bits & 0xFFFFFFFF for bits in row] for row in x.float().contiguous().view(torch.int32).tolist()]


def from_bits(bits: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits, np.uint32).view(np.float32))


def stored_bits(x: Tensor) -> list[list[int]]:
    """Codes or scales of a matrix as unsigned ints: float32 bits, or bytes."""
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    return [[v % (1 << 8 * x.element_size()) for v in row] for row in x.contiguous().view(dtype).tolist()]


@functools.cache
def ties_of(fmt: Format) -> list[int]:
    """Float32 bits of the midpoints between neighbouring values of a format, and of their neighbours."""
    codes = range(1 << min(fmt.bits, 8))
    values = sorted({reference.float_of(reference.decode(code, fmt) % SIGN) for code in codes if fmt.bits <= 8})
    finite = [value for value in values if value <= fmt.max]
    middles = [reference.bits_of((a + b) / 2) for a, b in itertools.pairwise(finite)]
    return [bits + step for bits in middles for step in (-1, 0, 1)]


@functools.cache
def matrices(fmt: Format, rows: int = 4, columns: int = 20, finite: bool = False) -> st.SearchStrategy[np.ndarray]:
    """Float32 bits of matrices of up to that size: any bits, values near ties, special values; many entries repeat."""
    magnitudes = st.sampled_from([b for b in SPECIAL if b < INFINITY or not finite] + ties_of(fmt))
    usual = st.integers(0x33000000, 0x47800000)  # 2^-25 to 2^16
    anything = st.integers(0, 0x7F7FFFFF if finite else 0x7FFFFFFF)
    bits = st.builds(
        lambda magnitude, sign: magnitude | sign, magnitudes | usual | anything, st.sampled_from([0, SIGN])
    )
    shape = st.tuples(st.integers(0, rows), st.integers(0, columns))
    return shape.flatmap(lambda shape: hnp.arrays(np.uint32, shape, elements=bits, fill=bits))


def assert_equals_scalar_twin(
    x: Tensor,
    fmt: Format,
    block: Block,
    rule: ScaleRule,
    key: int | None = None,
    stream: int = 0,
    companding: Companding = LINEAR,
    nonzero: bool = False,
) -> None:
    """Codes, scales, amax, counts, carrier and values equal those of `reference_blocks`, on every path there is."""
    expected = reference_blocks.quantize(to_bits(x), fmt, block, rule, key, stream, companding, nonzero)
    values, carried = (
        reference_blocks.dequantize(expected.codes, expected.scales, fmt, block, rule, amax, companding)
        for amax in (expected.amax, None)
    )
    key_tensor = None if key is None else torch.tensor(key)
    wide, bend = torch.float32, (companding, nonzero)
    for quantized in (
        kernels.quantize_blocks(
            x, fmt, block, rule, carrier=wide, count=True, key=key_tensor, stream=stream, companding=companding,
            nonzero=nonzero,
        ),
        kernels.BlockQuantized(
            *twin.quantize_blocks(x.contiguous(), fmt, block, rule, key_tensor, stream, True, wide, True, *bend)
        ),
    ):  # fmt: skip
        assert quantized.codes is not None and quantized.carrier is not None
        assert_same(stored_bits(quantized.codes), expected.codes, _nan_codes(fmt))
        assert_same(stored_bits(quantized.dequant_scale), expected.scales, nan_scales(rule))
        assert_same([[reference_bits(quantized.amax)]], [[expected.amax]], is_nan)
        assert (int(quantized.saturated), int(quantized.flushed)) == (expected.saturated, expected.flushed)
        found = kernels.dequantize_blocks(
            quantized.codes, quantized.dequant_scale, fmt, block, torch.float32, quantized.amax, companding
        )
        assert_same(stored_bits(found), values, is_nan)
        assert_same(stored_bits(quantized.carrier), carried, is_nan)


def reference_bits(value: Tensor) -> int:
    """The float32 bits of a 0-dimensional tensor."""
    return int(value.view(torch.int32)) & 0xFFFFFFFF


def is_nan(bits: int) -> bool:
    return bits % SIGN > INFINITY


def _nan_codes(fmt: Format):
    if fmt is FP16:
        return lambda code: code % 0x8000 > 0x7C00
    return lambda code: fmt.has_nan and is_nan(reference.decode(code, fmt))


def nan_scales(rule: ScaleRule):
    if rule is NVFP4:
        return lambda byte: byte % 0x80 == 0x7F
    return (lambda byte: byte == 0xFF) if rule in (E8M0_UP, E8M0_FLOOR) else is_nan


def assert_same(found: list[list[int]], expected: list[list[int]], is_nan) -> None:
    """Equal but for the sign and payload of NaN, which nothing defines."""
    assert [[-1 if is_nan(v) else v for v in row] for row in found] == [
        [-1 if is_nan(v) else v for v in row] for row in expected
    ]
