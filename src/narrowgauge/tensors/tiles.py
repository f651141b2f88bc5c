"""Casts with a scale for each tile, of tensors of any number of dimensions: the kernels take matrices.

The scales of a tensor [*batch, rows, columns] are [*batch, down, across], and those of a vector [across]: see `Block`.
RANGE_EXPANSION has an exponent beside each scale, in a last dimension of two.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from narrowgauge.numerics import kernels, scaling
from narrowgauge.numerics.companding import LINEAR, RANGE_EXPANSION, is_extreme, limit_of
from narrowgauge.numerics.formats import E2M1FN, E4M3FN
from narrowgauge.numerics.granularity import Block
from narrowgauge.numerics.rounding import NONZERO
from narrowgauge.numerics.scaling import NVFP4, ScaleRule
from narrowgauge.recipes.spec import CastSpec


def scale_shape(shape: Sequence[int], spec: CastSpec) -> tuple[int, ...]:
    """The shape of the scales of a tensor of `shape`: one entry a tile, or a pair."""
    down, across = spec.granularity.grid_of(*_matrix_size(shape))
    entry = (2,) if spec.companding is RANGE_EXPANSION else ()
    return (*shape[:-2], down, across, *entry) if len(shape) > 1 else (across, *entry)


def transposed_scales(dequant_scale: Tensor, spec: CastSpec) -> Tensor:
    """The scales of the transposed matrices."""
    return dequant_scale.transpose(-3, -2) if spec.companding is RANGE_EXPANSION else dequant_scale.mT


def quantize(x: Tensor, spec: CastSpec, key: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Cast `x` (any shape) by a spec of tiles: codes of its shape, scales as they are stored, amax of the whole.

    key: random bits of a stochastic spec. Value i in logical order takes word i; where the rows of a batch's matrices
    are more than the tile's and no multiple of them, the padded rows count too.
    """
    matrix, block = _as_matrix(x, spec.granularity)
    nonzero = spec.rounding is NONZERO
    done = kernels.quantize_blocks(
        matrix, spec.format, block, _rule_of(spec), key=key, companding=spec.companding, nonzero=nonzero
    )
    assert done.codes is not None
    scales = done.dequant_scale.reshape(scale_shape(x.shape, spec))
    return _from_matrix(done.codes, x.shape), scales, done.amax


def dequantize(codes: Tensor, dequant_scale: Tensor, amax: Tensor, spec: CastSpec, dtype: torch.dtype) -> Tensor:
    """The values of codes cast by a spec of tiles, in `dtype`; a transposed matrix gives a transposed one."""
    if codes.ndim > 1 and not codes.is_contiguous() and codes.mT.is_contiguous():
        return dequantize(codes.mT, transposed_scales(dequant_scale, spec), amax, spec.transposed, dtype).mT
    matrix, block = _as_matrix(codes, spec.granularity)
    scales = dequant_scale.reshape(scale_shape(matrix.shape, dataclasses.replace(spec, granularity=block)))
    tensor_amax = _finite_amax(amax) if spec.scale is NVFP4 else None
    values = kernels.dequantize_blocks(matrix, scales, spec.format, block, dtype, tensor_amax, spec.companding)
    return _from_matrix(values, codes.shape)


def scales_of(amax: float, shape: Sequence[int], spec: CastSpec, device: torch.device) -> Tensor:
    """The scales, as they are stored, of a tensor of `shape` each of whose tiles holds values of this magnitude."""
    plain = dataclasses.replace(spec, companding=LINEAR)
    amaxes = torch.full(scale_shape(shape, plain), amax, dtype=torch.float32, device=device)
    whole = amaxes.new_full((), amax)
    scales = scaling.block_scales(amaxes, spec.format, _rule_of(spec), whole, spec.companding)[1]
    # a tile of one magnitude is not expanded
    return torch.stack([scales, torch.ones_like(scales)], dim=-1) if spec.companding is RANGE_EXPANSION else scales


def infinite_values(codes: Tensor, dequant_scale: Tensor, spec: CastSpec) -> Tensor:
    """True where a value may have been infinite, given that one was: bool, of the shape of `codes`.

    Those are the codes of the format's extremes in tiles with the scale that an infinite amax gives. Where there are
    none, since a factor went into the scales, they are all of the extremes.
    """
    largest = is_extreme(codes, spec.format, spec.companding)
    factors = _factors(dequant_scale, spec)
    infinite = _factors(scales_of(math.inf, (1, 1), spec, codes.device), spec)
    likely = largest & _spread(factors == infinite.flatten(), spec.granularity, codes.shape)
    return torch.where(likely.any(), likely, largest)


def amax_of(dequant_scale: Tensor, spec: CastSpec) -> Tensor:
    """The largest magnitude that codes can have under these scales, 0-dimensional float32; not for NVFP4."""
    return scaling.tensor_amax(_factors(dequant_scale, spec)) * limit_of(spec.format, spec.companding)


def _factors(dequant_scale: Tensor, spec: CastSpec) -> Tensor:
    """The float32 factors of the tiles, of NVFP4 without the tensor's part."""
    return scaling.block_factors(dequant_scale[..., 0] if spec.companding is RANGE_EXPANSION else dequant_scale)


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
