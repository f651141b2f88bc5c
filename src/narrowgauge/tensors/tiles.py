"""Casts with a scale for each tile, of tensors of any number of dimensions: the kernels take matrices.

The scales of a tensor [*batch, rows, columns] are [*batch, down, across], and those of a vector [across]: see `Block`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from narrowgauge.numerics import kernels, scaling
from narrowgauge.numerics.formats import E2M1FN, E4M3FN
from narrowgauge.numerics.granularity import Block
from narrowgauge.numerics.scaling import NVFP4, ScaleRule
from narrowgauge.recipes.spec import CastSpec


def scale_shape(shape: Sequence[int], block: Block) -> tuple[int, ...]:
    """The shape of the scales of a tensor of `shape`: one entry a tile."""
    down, across = block.grid_of(*_matrix_size(shape))
    return (*shape[:-2], down, across) if len(shape) > 1 else (across,)


def quantize(x: Tensor, spec: CastSpec, key: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Cast `x` (any shape) by a spec of tiles: codes of its shape, scales as they are stored, amax of the whole.

    key: random bits of a stochastic spec. Value i in logical order takes word i; where the rows of a batch's matrices
    are more than the tile's and no multiple of them, the padded rows count too.
    """
    matrix, block = _as_matrix(x, spec.granularity)
    done = kernels.quantize_blocks(matrix, spec.format, block, _rule_of(spec), key=key)
    assert done.codes is not None
    scales = done.dequant_scale.reshape(scale_shape(x.shape, spec.granularity))
    return _from_matrix(done.codes, x.shape), scales, done.amax


def dequantize(codes: Tensor, dequant_scale: Tensor, amax: Tensor, spec: CastSpec, dtype: torch.dtype) -> Tensor:
    """The values of codes cast by a spec of tiles, in `dtype`; a transposed matrix gives a transposed one."""
    if codes.ndim > 1 and not codes.is_contiguous() and codes.mT.is_contiguous():
        return dequantize(codes.mT, dequant_scale.mT, amax, spec.transposed, dtype).mT
    matrix, block = _as_matrix(codes, spec.granularity)
    scales = dequant_scale.reshape(block.grid_of(*matrix.shape))
    tensor_amax = _finite_amax(amax) if spec.scale is NVFP4 else None
    values = kernels.dequantize_blocks(matrix, scales, spec.format, block, dtype, tensor_amax)
    return _from_matrix(values, codes.shape)


def scales_of(amax: float, shape: Sequence[int], spec: CastSpec, device: torch.device) -> Tensor:
    """The scales, as they are stored, of a tensor of `shape` each of whose tiles has this amax."""
    amaxes = torch.full(scale_shape(shape, spec.granularity), amax, dtype=torch.float32, device=device)
    return scaling.block_scales(amaxes, spec.format, _rule_of(spec), amaxes.new_full((), amax))[1]


def infinite_values(codes: Tensor, dequant_scale: Tensor, spec: CastSpec) -> Tensor:
    """True where a value may have been infinite, given that one was: bool, of the shape of `codes`.

    Those are the codes of the format's maximum in tiles with the scale that an infinite amax gives. Where there are
    none, since a factor went into the scales, they are all of the maximum.
    """
    largest = kernels.dequantize(codes, None, spec.format, torch.float32).abs() >= spec.format.max
    factors = scaling.block_factors(dequant_scale)
    infinite = scaling.block_factors(scales_of(math.inf, (1, 1), spec, codes.device))
    likely = largest & _spread(factors == infinite.flatten(), spec.granularity, codes.shape)
    return torch.where(likely.any(), likely, largest)


def amax_of(dequant_scale: Tensor, spec: CastSpec) -> Tensor:
    """The largest magnitude that codes can have under these scales, 0-dimensional float32; not for NVFP4."""
    return scaling.tensor_amax(scaling.block_factors(dequant_scale)) * spec.format.max


def _rule_of(spec: CastSpec) -> ScaleRule:
    assert isinstance(spec.scale, ScaleRule)  # a history is kept of whole tensors only
    return spec.scale


def _finite_amax(amax: Tensor) -> Tensor:
    """NVFP4's amax of the tensor; where it is infinite, the one for which a byte is worth itself, as in the cast."""
    return torch.where(amax.isinf(), E2M1FN.max * E4M3FN.max, amax)


def _matrix_size(shape: Sequence[int]) -> tuple[int, int]:
    return (shape[-2] if len(shape) > 1 else 1), (shape[-1] if shape else 1)


def _as_matrix(x: Tensor, block: Block) -> tuple[Tensor, Block]:
    """The matrices of a batch below one another, and the tile there; padded so that no tile straddles two of them."""
    rows, columns = _matrix_size(x.shape)
    if x.ndim <= 2:
        return x.reshape(rows, columns), block
    if block.rows != 1:
        if block.rows is None or block.rows > rows:
            block = Block(int(max(rows, 1)), block.columns)
        assert block.rows is not None
        if rows % block.rows:
            x = F.pad(x, (0, 0, 0, -rows % block.rows))
    return x.reshape(math.prod(x.shape[:-1]), columns), block


def _from_matrix(matrix: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `_as_matrix`: of `shape`, without the padding, contiguous."""
    if len(shape) <= 2:
        return matrix.reshape(shape)
    batch, rows, columns = shape[:-2], shape[-2], shape[-1]
    padded = rows if not math.prod(batch) else matrix.shape[0] // math.prod(batch)
    return matrix.reshape(*batch, padded, columns)[..., :rows, :].contiguous()


def _spread(per_tile: Tensor, block: Block, shape: torch.Size) -> Tensor:
    """One value a tile, repeated over the tile's values: of `shape`."""
    rows, columns = _matrix_size(shape)
    height, width = block.size_in(rows, columns)
    grid = per_tile if len(shape) > 1 else per_tile.unsqueeze(0)
    spread = grid.repeat_interleave(height, -2)[..., :rows, :].repeat_interleave(width, -1)[..., :columns]
    return spread.reshape(shape)
