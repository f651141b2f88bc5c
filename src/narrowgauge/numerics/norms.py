"""Norms of stored tensors, from how often each of their codes occurs: no value is decoded.

There are at most 256 codes, so a norm is a sum of at most 256 terms in float64, whatever the size of the tensor: nearly
exact, and the same on every device, since the terms are added in a fixed order.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from narrowgauge.numerics import rounding
from narrowgauge.numerics.formats import Format

ORDERS = (1.0, 2.0, math.inf)


def norms(counts: Tensor, dequant_scale: Tensor, amax: Tensor, fmt: Format, order: float) -> Tensor:
    """The norms of n tensors with a scale each: float64 [n].

    counts: int64 [n, 256], how often each code occurs. dequant_scale, amax: float32 [n]; where amax is infinite, codes
    of the format's maximum stand for infinite values. order: one of ORDERS. 0 for a tensor without values.
    """
    values = _magnitudes(fmt, counts.device)
    values = torch.where(amax.isinf()[:, None] & (values >= fmt.max), torch.inf, values)
    occurs = counts > 0
    if order == math.inf:
        # a maximum over a table in which what does not occur is 0; NaN goes through
        return torch.where(occurs, values, 0.0).amax(1) * dequant_scale.double()
    terms = torch.where(occurs, (values if order == 1.0 else values * values) * counts, 0.0)
    while terms.shape[1] > 1:  # in pairs, since devices differ in how they sum
        half = terms.shape[1] // 2
        terms = terms[:, :half] + terms[:, half:]
    total = terms[:, 0]
    return (total if order == 1.0 else total.sqrt()) * dequant_scale.double()


@functools.cache
def _magnitudes(fmt: Format, device: torch.device) -> Tensor:
    """|value| of every code of a byte, float64 [256]; 0 for bytes that are no codes."""
    # a code of fewer bits is a byte of its own, in two's complement where the format is of signed integers
    codes = torch.arange(256 if fmt.dtype is not torch.uint8 else 1 << fmt.bits, dtype=torch.uint8).view(fmt.dtype)
    values = torch.zeros(256, dtype=torch.float64)
    values[: len(codes)] = rounding.decode(codes, fmt).double().abs()
    return values.to(device)
