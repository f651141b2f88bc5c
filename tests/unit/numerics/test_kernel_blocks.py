"""The Numba kernels for tiles against their twin in torch operations, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from narrowgauge.numerics.formats import E2M1FN, E2M3FN, E3M2FN, E4M3FN, E5M2, Format
from narrowgauge.numerics.granularity import PER_COLUMN, PER_ROW, PER_TENSOR, Block
from narrowgauge.numerics.kernels import cpu_tiles, twin
from narrowgauge.numerics.scaling import CURRENT, CURRENT_POW2, E8M0_FLOOR, E8M0_UP, NVFP4, ScaleRule

FORMATS = (E4M3FN, E5M2, E2M1FN, E3M2FN, E2M3FN)
RULES = (CURRENT, CURRENT_POW2, E8M0_UP, E8M0_FLOOR)
CASTS = [*itertools.product(FORMATS, RULES), (E2M1FN, NVFP4)]
INPUTS = (torch.float32, torch.bfloat16, torch.float16)
BLOCKS = (
    Block(1, 16), Block(1, 32), Block(1, 128), Block(16, 16), Block(128, 128), Block(32, 1), Block(128, 1),
    Block(3, 5), Block(None, 4), Block(7, None), PER_ROW, PER_COLUMN, PER_TENSOR,
)  # fmt: skip
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_bits_equal(a: Tensor | None, b: Tensor | None) -> None:
    """Equal in bits, but for a NaN's payload; None equals None."""
    assert (a is None) == (b is None)
    if a is None or b is None:
        return
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    view = BITS[a.element_size()]
    same = a.contiguous().view(view) == b.contiguous().view(view)
    if a.is_floating_point():
        same |= a.float().isnan() & b.float().isnan()
    assert same.all()


def assert_equals_twin(x: Tensor, fmt: Format, block: Block, rule: ScaleRule, key: Tensor | None = None) -> None:
    for codes, carrier, count in [(True, None, False), (False, torch.bfloat16, True), (True, torch.float32, True)]:
        fast = cpu_tiles.quantize_blocks(x, fmt, block, rule, codes, carrier, count, key, 3)
        slow = twin.quantize_blocks(x, fmt, block, rule, key, 3, codes, carrier, count)
        for a, b in zip(fast, slow, strict=True):
            assert_bits_equal(a, b)


def matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Normal values, each row and column of a scale of its own, with a few zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= 2.0 ** torch.randint(-12, 12, (rows, 1), generator=generator)
    x *= 2.0 ** torch.randint(-3, 4, (1, columns), generator=generator)
    x[torch.rand(rows, columns, generator=generator) < 0.05] = 0.0
    return x


@pytest.mark.parametrize(("fmt", "rule"), CASTS, ids=lambda v: repr(v))
def test_every_tile_in_a_ragged_matrix(fmt: Format, rule: ScaleRule) -> None:
    x, key = matrix(37, 141), torch.tensor(-(3**37))
    for block in BLOCKS:
        assert_equals_twin(x, fmt, block, rule)
        assert_equals_twin(x, fmt, block, rule, key)
