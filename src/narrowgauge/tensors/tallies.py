"""What casting a tensor for storage did to its values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from narrowgauge.numerics import scaling
from narrowgauge.numerics.companding import RANGE_EXPANSION
from narrowgauge.numerics.tally import Tally, pieces
from narrowgauge.tensors.packed import PackedTensor
from narrowgauge.tensors.quantized import QuantizedTensor

# a scale is rounded to float32, and so is its inverse: the largest value may pass the format's maximum by this
_SLACK = 1 + 2.0**-20


def add_storage(tally: Tally, x: Tensor, stored: Tensor) -> None:
    """Add the cast of `x` to `stored`, of the same values in another shape: magnitudes, scale, error, shares lost.

    x: a plain floating tensor. saturated: of casts with one scale a tensor; tiles have scales that fit them.
    """
    x = x.detach()
    kept = values_of(stored).reshape(x.shape)
    tally.raise_to(amax=scaling.tensor_amax(x), scale=largest_scale(stored))
    tally.add(values=x.numel(), flushed=((x != 0) & (kept == 0)).sum())
    if isinstance(stored, QuantizedTensor) and not stored.spec.in_blocks:
        limit = stored.dequant_scale * (stored.spec.format.max * _SLACK)
        tally.add(saturated=(x.abs() > limit).sum())
    tally.add_error(x, kept)
    tally.add_bins(x)


def values_of(stored: Tensor) -> Tensor:
    """What is stored, as a plain floating tensor."""
    return stored.dequantize(torch.float32) if isinstance(stored, QuantizedTensor | PackedTensor) else stored.detach()


def largest_scale(stored: Tensor) -> Tensor | None:
    """The largest factor of the codes of a tensor's tiles; None where there is none, or an exponent beside it."""
    if not isinstance(stored, QuantizedTensor | PackedTensor) or not stored.dequant_scale.numel():
        return None
    if stored.spec.companding is RANGE_EXPANSION:
        return None
    return scaling.block_factors(stored.dequant_scale, stored.amax).max()


def in_pieces(function: Callable[..., None], *tensors: Tensor) -> None:
    """Call `function` with flat pieces of tensors of one shape, so that its temporaries stay small."""
    flat = [t.reshape(-1) for t in tensors]
    for part in pieces(flat[0]):
        function(*(t[part] for t in flat))
