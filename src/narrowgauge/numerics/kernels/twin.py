"""The casts in plain torch operations: the slow twin of the kernels, for every format and device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from narrowgauge.numerics import companding as curves
from narrowgauge.numerics import philox, rounding, scaling
from narrowgauge.numerics.companding import LINEAR, RANGE_EXPANSION, Companding
from narrowgauge.numerics.formats import Format
from narrowgauge.numerics.granularity import Block
from narrowgauge.numerics.scaling import ScaleRule


def quantize(
    x: Tensor,
    quant_scale: Tensor | None,
    fmt: Format,
    saturating: bool | None,
    codes: bool,
    carrier: torch.dtype | None,
    count: bool,
    key: Tensor | None = None,
    stream: int = 0,
    nonzero: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Codes, carrier, number saturated, number flushed: each None where not asked for."""
    x = x.float()
    scaled = x if quant_scale is None else x * quant_scale
    if nonzero:
        scaled = rounding.lifted(scaled, x != 0, fmt.smallest_subnormal)
    words = None if key is None else philox.random_words(key, stream, x.numel()).view(x.shape)
    encoded = rounding.encode(scaled, fmt, saturating=saturating, words=words)
    decoded = rounding.decode(encoded, fmt, carrier or torch.float32) if carrier or count else None
    saturated = flushed = None
    if count:
        assert decoded is not None
        saturated = (scaled.abs() > fmt.max).sum()
        flushed = ((x != 0) & (decoded == 0)).sum()
    return encoded if codes else None, decoded if carrier else None, saturated, flushed


def dequantize(codes: Tensor, dequant_scale: Tensor | None, fmt: Format, dtype: torch.dtype) -> Tensor:
    """The values of the codes, times the scale, in float32; then one rounding to `dtype`."""
    values = rounding.decode(codes, fmt)
    return (values if dequant_scale is None else values * dequant_scale).to(dtype)


def quantize_blocks(
    x: Tensor,
    fmt: Format,
    block: Block,
    rule: ScaleRule,
    key: Tensor | None,
    stream: int,
    codes: bool,
    carrier: torch.dtype | None,
    count: bool,
    companding: Companding = LINEAR,
    nonzero: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Codes, carrier, stored scales, amax of the whole, number saturated, number flushed, of a matrix."""
    x = x.float()
    amax = block_amax(x, block)
    tensor_amax = scaling.tensor_amax(amax)
    quant_scale, stored = scaling.block_scales(amax, fmt, rule, tensor_amax, companding)
    exponents = None
    if companding is RANGE_EXPANSION:
        per_tile = curves.expansion_exponents(amax, _block_least(x, block), fmt)
        stored, exponents = torch.stack([stored, per_tile], dim=-1), spread(per_tile, block, x.shape)
    scaled = x * spread(quant_scale, block, x.shape)
    words = None if key is None else philox.random_words(key, stream, x.numel()).view(x.shape)
    encoded = curves.encode(scaled, fmt, companding, exponents, nonzero=x != 0 if nonzero else None, words=words)
    carried = dequantize_blocks(encoded, stored, fmt, block, None, carrier, companding) if carrier is not None else None
    saturated = flushed = None
    if count:
        saturated = (scaled.abs() > curves.limit_of(fmt, companding)).sum()
        flushed = ((x != 0) & (curves.decode(encoded, fmt, companding, exponents) == 0)).sum()
    return encoded if codes else None, carried, stored, tensor_amax, saturated, flushed


def dequantize_blocks(
    codes: Tensor,
    dequant_scale: Tensor,
    fmt: Format,
    block: Block,
    tensor_amax: Tensor | None,
    dtype: torch.dtype,
    companding: Companding = LINEAR,
) -> Tensor:
    """The values of a matrix of codes times their blocks' factors, in float32; then one rounding to `dtype`."""
    exponents = None
    if companding is RANGE_EXPANSION:
        dequant_scale, per_tile = dequant_scale.unbind(-1)
        exponents = spread(per_tile, block, codes.shape)
    factors = scaling.block_factors(dequant_scale, tensor_amax)
    return (curves.decode(codes, fmt, companding, exponents) * spread(factors, block, codes.shape)).to(dtype)


def block_amax(x: Tensor, block: Block) -> Tensor:
    """The largest magnitude of every tile of a matrix, float32 [down, across]; NaN where a tile holds NaN."""
    return _by_tile(x.abs(), block, 0.0).amax(dim=(1, 3)).float()


def _block_least(x: Tensor, block: Block) -> Tensor:
    """The least magnitude of every tile that is not zero, float32 [down, across]; infinite where there is none."""
    return _by_tile(torch.where(x == 0, torch.inf, x.abs()), block, torch.inf).amin(dim=(1, 3))


def _by_tile(x: Tensor, block: Block, padding: float) -> Tensor:
    """A matrix as [tiles down, rows of a tile, tiles across, columns of a tile], none of them empty."""
    rows, columns = x.shape
    down, across = block.grid_of(rows, columns)
    height, width = block.size_in(rows, columns)
    padded = F.pad(x, (0, across * width - columns, 0, down * height - rows), value=padding)
    return padded.view(down, height, across, width)


def spread(per_block: Tensor, block: Block, shape: torch.Size) -> Tensor:
    """One value for each tile, repeated over the tile's values: [rows, columns]."""
    rows, columns = shape
    height, width = block.size_in(rows, columns)
    return per_block.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
