"""Scales that span more than the part of a matrix which this process holds.

A matrix whose rows or columns are parted over processes is cast, on each, with the scales that the whole would have.
What that takes depends on the granularity:

- per tensor, and the tensor's factor of NVFP4: the largest magnitude of the whole;
- per row or per column, where the parting cuts what shares a scale: the largest of each row, or column, of the whole;
- tiles of a fixed size: nothing, as each lies in one part. Where a part's size is no multiple of the tile's, its tiles
  begin at its own first row and column, and are as those of a smaller matrix;
- delayed scaling: nothing here, as the scale follows from earlier steps, whose amax the roll reduces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from narrowgauge.numerics import kernels
from narrowgauge.numerics.scaling import NVFP4
from narrowgauge.recipes.spec import CastSpec

if TYPE_CHECKING:
    from narrowgauge.tensors.cast import Operand


def amax_of_part(x: Tensor, spec: CastSpec, dim: int) -> Tensor | None:
    """What of the matrix `x`, parted along `dim` (0 rows, 1 columns), decides scales of the whole: its maximum over all
    parts is the `amax` of `cast_operand`. None where the part says all, or its scale comes from elsewhere.

    Float32, 0-dimensional for a scale of the whole, else one entry for each tile of the part: [down, across].
    """
    if not spec.is_scaled or spec.is_delayed:
        return None
    if not spec.in_blocks or spec.scale is NVFP4:
        return kernels.amax(x)
    if (spec.granularity.rows, spec.granularity.columns)[dim] is not None:
        return None
    lines = x.detach().abs().float()
    shape = list(x.shape)
    shape[dim] = 1
    largest = lines.amax(dim=dim, keepdim=True) if x.shape[dim] else lines.new_zeros(shape)
    size = (spec.granularity.columns, spec.granularity.rows)[dim]
    if size in (None, 1):
        return largest
    return _pooled(largest, size or 1, 1 - dim)


def extended(x: Tensor, spec: CastSpec, amax: Tensor) -> Tensor:
    """The part `x` and, below or beside it, values that bring the amax of its tiles to what they have in the whole."""
    amax = amax.to(x.dtype)  # exact: it is one of the values of the whole
    height = spec.granularity.rows
    if spec.scale is NVFP4:
        padded = F.pad(x, (0, 0, 0, -x.shape[0] % (height or 1)))
        last = F.pad(amax.reshape(1, 1), (0, x.shape[1] - 1))
        return torch.cat([padded, last])
    if spec.granularity.columns is None:
        return torch.cat([x, amax.repeat_interleave(height or 1, 0)[: x.shape[0]]], dim=1)
    return torch.cat([x, amax.repeat_interleave(spec.granularity.columns, 1)[:, : x.shape[1]]])


def cut(done: Operand, x: Tensor, spec: CastSpec) -> Operand:
    """The cast of the part `x` alone, from that of the extended matrix."""
    rows, columns = x.shape
    down, across = spec.granularity.grid_of(rows, columns)
    codes, carrier = (None if t is None else t[:rows, :columns].contiguous() for t in (done.codes, done.carrier))
    assert done.block_scale is not None
    return done._replace(codes=codes, carrier=carrier, block_scale=done.block_scale[:down, :across].contiguous())


def _pooled(lines: Tensor, size: int, dim: int) -> Tensor:
    """The largest of every `size` neighbours along `dim`."""
    padding = -lines.shape[dim] % size
    padded = F.pad(lines, (0, padding) if dim == 1 else (0, 0, 0, padding))
    return padded.unflatten(dim, (-1, size)).amax(dim=dim + 1)
