"""The 16-point Hadamard transform of `numerics.hadamard` on CUDA devices, by the same sums in the same order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.numerics.hadamard import POINTS
from narrowgauge.numerics.kernels.triton_round import widen

WIDTH = 128


@triton.jit
def _sums_and_differences(x):  # type: ignore[no-untyped-def]
    """Of the pairs in the last dimension."""
    first, second = tl.split(x)
    return tl.join(first + second, first - second)


@triton.jit(do_not_specialize=["negative"])
def hadamard_kernel(x, out, negative, rows, columns, programs_across, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """out = the transform of 16 rows of x; bit i of `negative` is set where sign i is -1."""
    program = tl.program_id(0)
    bit = tl.arange(0, 2)
    # the four bits of a row's number, a dimension each, most significant first
    point = (
        8 * bit[None, :, None, None, None]
        + 4 * bit[None, None, :, None, None]
        + 2 * bit[None, None, None, :, None]
        + bit[None, None, None, None, :]
    )
    row = (program // programs_across) * 16 + point
    column = ((program % programs_across) * WIDTH + tl.arange(0, WIDTH))[:, None, None, None, None]
    place = row.to(tl.int64) * columns + column
    values = widen(tl.load(x + place, mask=(row < rows) & (column < columns), other=0.0))
    values = values * (1 - 2 * ((negative >> point) & 1)).to(tl.float32)
    for _ in tl.static_range(4):
        # pairs in the least significant dimension; then the next one's turn, and after four all are in their places
        values = tl.permute(_sums_and_differences(values), (0, 4, 1, 2, 3))
    tl.store(out + place, values * 0.25, mask=column < columns)


def transform(x: Tensor, signs: tuple[int, ...]) -> Tensor:
    """`hadamard.transform` of a float32, bfloat16 or float16 matrix that is not empty."""
    x = x.detach().contiguous()
    rows, columns = x.shape
    groups, programs_across = triton.cdiv(rows, POINTS), triton.cdiv(columns, WIDTH)
    out = torch.empty(groups * POINTS, columns, dtype=torch.float32, device=x.device)
    negative = sum(1 << place for place, sign in enumerate(signs) if sign < 0)
    with torch.cuda.device_of(x):
        hadamard_kernel[(groups * programs_across,)](
            x, out, negative, rows, columns, programs_across, WIDTH=WIDTH, enable_fp_fusion=False
        )
    return out
