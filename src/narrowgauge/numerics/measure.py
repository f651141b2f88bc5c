"""Measures of what a cast did to a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.numerics import rounding
from narrowgauge.numerics.formats import Format


def sqnr_db(x: Tensor, approximation: Tensor) -> float:
    """Signal to quantization noise ratio in dB, in float64: 10 log10(sum x^2 / sum (x - approximation)^2).

    Infinite where the two are equal; NaN where either holds a value that is not finite.
    """
    x, approximation = x.double(), approximation.double()
    signal, noise = x.square().sum(), (x - approximation).square().sum()
    if noise == 0:
        return float("inf")
    if not noise.isfinite():
        return float("nan")
    return float(10 * torch.log10(signal / noise))


def share_saturated(x: Tensor, quant_scale: Tensor, fmt: Format) -> float:
    """Share of the values with |x * quant_scale| > max before the clamp; 0 for an empty tensor."""
    return _share((x.float() * quant_scale).abs() > fmt.max)


def share_flushed(x: Tensor, codes: Tensor, fmt: Format) -> float:
    """Share of the values that are not zero but whose code stands for zero (+0 or -0); 0 for an empty tensor."""
    return _share((x != 0) & (rounding.decode(codes, fmt) == 0))


def _share(mask: Tensor) -> float:
    return mask.double().mean().item() if mask.numel() else 0.0
