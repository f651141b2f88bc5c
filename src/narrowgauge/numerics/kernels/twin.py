"""The casts in plain torch operations: the slow twin of the kernels, for every format and device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from narrowgauge.numerics import philox, rounding, scaling
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
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Codes, carrier, number saturated, number flushed: each None where not asked for."""
    scaled = x.float() if quant_scale is None else x.float() * quant_scale
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
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Codes, carrier, stored scales, amax of the whole, number saturated, number flushed, of a matrix."""
    x = x.float()
    amax = block_amax(x, block)
    tensor_amax = scaling.tensor_amax(amax)
    quant_scale, stored = scaling.block_scales(amax, fmt, rule, tensor_amax)
    scaled = x * spread(quant_scale, block, x.shape)
    if not fmt.has_nan:  # the block's scale says it
        scaled = torch.where(scaled.isnan(), 0.0, scaled)
    words = None if key is None else philox.random_words(key, stream, x.numel()).view(x.shape)
    encoded = rounding.encode(scaled, fmt, saturating=True, words=words)
    carried = dequantize_blocks(encoded, stored, fmt, block, None, carrier) if carrier is not None else None
    saturated = flushed = None
    if count:
        saturated = (scaled.abs() > fmt.max).sum()
        flushed = ((x != 0) & (rounding.decode(encoded, fmt) == 0)).sum()
    return encoded if codes else None, carried, stored, tensor_amax, saturated, flushed


def dequantize_blocks(
    codes: Tensor, dequant_scale: Tensor, fmt: Format, block: Block, tensor_amax: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The values of a matrix of codes times their blocks' factors, in float32; then one rounding to `dtype`."""
    factors = scaling.block_factors(dequant_scale, tensor_amax)
    return (rounding.decode(codes, fmt) * spread(factors, block, codes.shape)).to(dtype)


def block_amax(x: Tensor, block: Block) -> Tensor:
    """The largest magnitude of every tile of a matrix, float32 [down, across]; NaN where a tile holds NaN."""
    rows, columns = x.shape
    down, across = block.grid_of(rows, columns)
    if 0 in (down, across):
        return torch.zeros(down, across, dtype=torch.float32, device=x.device)
    height, width = block.size_in(rows, columns)
    padded = F.pad(x.abs(), (0, across * width - columns, 0, down * height - rows))
    return padded.view(down, height, across, width).amax(dim=(1, 3)).float()


def spread(per_block: Tensor, block: Block, shape: torch.Size) -> Tensor:
    """One value for each tile, repeated over the tile's values: [rows, columns]."""
    rows, columns = shape
    height, width = block.size_in(rows, columns)
    return per_block.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
