"""Smoothing of outlier channels: what one channel has too much of moves into the weight, where there is room.

Source: Smooth-SwiGLU, arXiv:2409.12517, section 4.4: the product of a gated unit grows outliers in a few channels,
which one scale for the whole tensor, above all a delayed one, cannot follow. Here the factors are powers of two, so
that they round nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.ops.reduce import SINGLE_PROCESS, Reducer


def channel_factors(x: Tensor, reducer: Reducer = SINGLE_PROCESS) -> Tensor:
    """For every column of x [rows, columns] the power of two at or below its largest magnitude: float32 [columns].

    1 for a column that is zero, that holds infinity or NaN, or where there are no rows. x / factors has magnitudes
    below 2. reducer: over processes that have other rows.
    """
    if x.shape[0] == 0:
        return torch.ones(x.shape[1], dtype=torch.float32, device=x.device)
    amax = reducer.max_(x.abs().amax(dim=0).float())
    factors = (amax.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where(amax.isfinite() & (factors > 0), factors, 1.0)
