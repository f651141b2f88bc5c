"""The 128 x 4 layout of the scales of small blocks."""

from __future__ import annotations

import pytest
import torch
from torchao.prototype.mx_formats.utils import to_blocked

from narrowgauge.ops.cuda.swizzle import swizzle, unswizzle

SIZES = [(1, 1), (128, 4), (129, 5), (16, 3), (130, 70), (300, 9), (256, 8)]


@pytest.mark.parametrize("rows, columns", SIZES)
def test_it_is_the_layout_of_torchaos_helper(rows, columns):
    scales = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows))
    assert torch.equal(swizzle(scales), to_blocked(scales, use_triton_kernel=False).flatten())
    assert torch.equal(unswizzle(swizzle(scales), rows, columns), scales)


def test_strides_make_no_difference():
    scales = torch.arange(60, dtype=torch.uint8).reshape(5, 12)
    assert torch.equal(swizzle(scales.t()), swizzle(scales.t().contiguous()))
    assert torch.equal(swizzle(scales[:, ::3]), swizzle(scales[:, ::3].contiguous()))


def test_the_place_of_one_scale():
    scales = torch.zeros(256, 8, dtype=torch.uint8)
    scales[128 + 70, 6] = 7  # tile (1, 1) of 2 x 2; within it row 70 = 2 * 32 + 6, column 2
    assert swizzle(scales).nonzero().item() == 3 * 512 + 6 * 16 + 2 * 4 + 2
