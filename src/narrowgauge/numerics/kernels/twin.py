"""The casts in plain torch operations: the slow twin of the kernels, for every format and device."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.numerics import rounding
from narrowgauge.numerics.formats import Format


def quantize(
    x: Tensor,
    quant_scale: Tensor | None,
    fmt: Format,
    saturating: bool | None,
    codes: bool,
    carrier: torch.dtype | None,
    count: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Codes, carrier, number saturated, number flushed: each None where not asked for."""
    scaled = x.float() if quant_scale is None else x.float() * quant_scale
    encoded = rounding.encode(scaled, fmt, saturating=saturating)
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
