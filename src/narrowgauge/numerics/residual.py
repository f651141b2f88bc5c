"""What bfloat16 leaves over of a float32 value, in 8 bits or, without loss, in 16.

Eight bits: hi = bfloat16(x), to nearest even, and r = round((x - hi) / (ulp(hi) / 2) * 127), to nearest even, so that
x ~ hi + r / 127 * ulp(hi) / 2: 24 bits in all. Sixteen bits: the upper half of float32's bits rounded half away from
zero, and what it differs by; with ties to even the remainder would not fit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.numerics.formats import INT8

_SHIFT = 16  # bits of float32 that bfloat16 has not


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """(hi, r) of float32 values: bfloat16 and int8, of x's shape. r is 0 where hi is infinite or NaN."""
    hi = x.to(torch.bfloat16)
    wide = hi.float()
    steps = (x - wide) / half_ulp(wide) * INT8.max
    steps = torch.where(wide.isfinite(), steps, 0.0).round()
    return hi, steps.to(torch.int8)


def join(hi: Tensor, r: Tensor) -> Tensor:
    """The float32 values that `split` gave (hi, r) for, to within a 255th of a unit in hi's last place."""
    wide = hi.float()
    # tensor by tensor: by a scalar it may run as a product with the reciprocal
    share = r.float() / torch.full_like(wide, INT8.max)
    return wide + share * half_ulp(wide)


def half_ulp(wide: Tensor) -> Tensor:
    """Half a unit in the last place of bfloat16 values given in float32: float32, a power of two."""
    exponent = ((wide.view(torch.int32) >> 23) & 0xFF).clamp(min=1)
    # 2^(exponent - 135): below exponent 9 that is a subnormal number of float32
    bits = torch.where(exponent > 8, (exponent - 8) << 23, torch.ones_like(exponent) << (exponent + 14).clamp(max=22))
    return bits.view(torch.float32)


def split_exactly(x: Tensor) -> tuple[Tensor, Tensor]:
    """(hi, remainder) of float32 values: bfloat16 and int16, of x's shape; no bit is lost."""
    bits = x.contiguous().view(torch.int32)
    upper = (bits.to(torch.int64) + (1 << (_SHIFT - 1))) >> _SHIFT
    remainder = bits - (upper << _SHIFT)
    return upper.to(torch.int16).view(torch.bfloat16), remainder.to(torch.int16)


def join_exactly(hi: Tensor, remainder: Tensor) -> Tensor:
    """The float32 values that `split_exactly` gave (hi, remainder) for."""
    upper = hi.contiguous().view(torch.int16).to(torch.int32) << _SHIFT
    return (upper + remainder.to(torch.int32)).view(torch.float32)
