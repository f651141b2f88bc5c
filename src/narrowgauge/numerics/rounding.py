"""Casts: float32 to codes and back, by round to nearest even or by stochastic rounding.

Narrow formats saturate at +-max (so does infinity), wide ones overflow to infinity as IEEE 754 does; NaN stays NaN.
`reference` holds the scalar twin, `kernels` the fast paths; all give the same bits.
"""

from __future__ import annotations

import functools
import math
from enum import Enum

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.formats import FP32, TF32, Format


class Rounding(Enum):
    """How a cast picks between the two neighbours of a value."""

    NEAREST_EVEN = "nearest even"
    STOCHASTIC = "stochastic"
    NONZERO = "nearest even, and nothing but zero to zero"  # for what is divided by

    def __repr__(self) -> str:
        return self.name


NEAREST_EVEN = Rounding.NEAREST_EVEN
STOCHASTIC = Rounding.STOCHASTIC
NONZERO = Rounding.NONZERO


def encode(x: Tensor, fmt: Format, *, saturating: bool | None = None, words: Tensor | None = None) -> Tensor:
    """Cast to codes of `fmt` by round to nearest even or, with random words, stochastically.

    x: any floating dtype (float64 is rounded to float32 first), any shape. Returns a tensor of `fmt.dtype` of the same
    shape (formats below 8 bits: one code a byte, in the low bits; TF32: float32 values). `saturating` overrides what
    the format does beyond its maximum: scaled FP16 storage saturates, FP16 arithmetic does not. words: one random word
    of 32 bits for each value, see `round_stochastically`. Raises RecipeError for NaN in a format that has none, and for
    `saturating=False` in one that has no infinity.
    """
    x = x.float()
    if words is not None:
        x = round_stochastically(x, fmt, words)
    if fmt.saturating if saturating is None else saturating:
        x = x.clamp(-fmt.max if fmt.signed else 0.0, fmt.max)
    elif not fmt.has_inf:
        raise RecipeError(
            f"saturating=False: {fmt.name} has no infinity to overflow to; leave saturating out, or use E5M2"
        )
    if fmt is TF32:
        return _round_to_tf32(x)
    if fmt.is_integer:
        _refuse_nan(x, fmt)
        return x.round().to(fmt.dtype)
    if fmt.dtype is torch.uint8:
        _refuse_nan(x, fmt)
        return _encode_small(x, fmt)
    return x.to(fmt.dtype)


def round_stochastically(x: Tensor, fmt: Format, words: Tensor) -> Tensor:
    """Round to one of the two neighbours in `fmt`, the nearer the likelier: unbiased. In float32.

    x: float32. words: int64 of the same shape, uniform in [0, 2^32). With f in [0, 1) the distance to the lower
    neighbour (in magnitude) as a share of the gap, the upper one is taken where the word's top 24 bits, as an integer,
    are less than f * 2^24. Values of the format, zeros, infinities, NaN and what lies beyond the maximum stay as they
    are.
    """
    magnitude = x.double().abs()
    if fmt.is_integer:
        steps, gap_exponent = magnitude, torch.zeros_like(x, dtype=torch.int32)
    else:
        lowest = 1 - fmt.bias
        exponent = torch.where(magnitude > 0, magnitude.frexp().exponent - 1, lowest).clamp(min=lowest)
        gap_exponent = exponent - fmt.mantissa_bits
        steps = torch.ldexp(magnitude, -gap_exponent)  # exact: float64 has the range
    lower = steps.floor()
    upwards = (words >> 8) < (steps - lower) * 2.0**24
    rounded = torch.ldexp(lower + upwards, gap_exponent).float().copysign(x)
    return torch.where(magnitude <= fmt.max, rounded, x)


def root(x: Tensor) -> Tensor:
    """The square root, of float32 correctly rounded: torch's own on a CPU is MKL's, an ulp off in places.

    float64 stays as torch has it.
    """
    return x.double().sqrt().to(x.dtype)  # twice as many digits and more: the second rounding moves nothing


def lifted(x: Tensor, where: Tensor, least: float) -> Tensor:
    """`x`, raised to the magnitude `least` (> 0) where it is smaller and `where` is True; -0 to -least, NaN stays.

    Lifting before a cast is lifting its code: the least value that has one rounds to itself, and nothing above moves.
    """
    return torch.where(where & (x.abs() < least), torch.full_like(x, least).copysign(x), x)


def decode(codes: Tensor, fmt: Format, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of `codes` (a tensor of `fmt.dtype`) in `dtype`, exact where `dtype` holds them."""
    if fmt.dtype is torch.uint8 and not fmt.is_integer:
        return torch.tensor(_code_values(fmt), device=codes.device)[codes.int()].to(dtype)
    return codes.to(dtype)


def round_to(x: Tensor, fmt: Format) -> Tensor:
    """Round every value of `x` to the nearest value of `fmt`, kept in float32."""
    return x.float() if fmt is FP32 else decode(encode(x, fmt), fmt)


def _refuse_nan(x: Tensor, fmt: Format) -> None:
    if not x.is_meta and x.isnan().any():
        raise RecipeError(
            f"NaN cannot be cast to {fmt.name}, which has no NaN: find where it comes from, or use E4M3FN"
        )


def _round_to_tf32(x: Tensor) -> Tensor:
    bits = x.view(torch.int32)
    lowest = (bits >> 13) & 1  # ties to even: the last kept bit decides
    rounded = ((bits + 0xFFF + lowest) & ~0x1FFF).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)


def _encode_small(x: Tensor, fmt: Format) -> Tensor:
    """Codes of a 4- or 6-bit format; `x` is already clamped to +-max."""
    magnitude = x.abs()
    smallest_exponent = 1 - fmt.bias
    exponent = torch.where(magnitude > 0, magnitude.frexp().exponent - 1, smallest_exponent)  # frexp(0) has exponent 0
    exponent = exponent.clamp(min=smallest_exponent)
    # dividing by a power of two is exact, so this rounds once
    steps = torch.ldexp(magnitude, fmt.mantissa_bits - exponent).round().int()
    code = ((exponent - smallest_exponent) << fmt.mantissa_bits) + steps
    sign = x.signbit().int() << (fmt.bits - 1)
    return (code | sign).to(torch.uint8)


@functools.cache
def _code_values(fmt: Format) -> tuple[float, ...]:
    """The value of every code of a small float format."""
    half = 1 << (fmt.bits - 1)
    values = []
    for field in range(half):
        exponent, mantissa = field >> fmt.mantissa_bits, field & ((1 << fmt.mantissa_bits) - 1)
        implicit = (1 << fmt.mantissa_bits) if exponent else 0
        values.append(math.ldexp(mantissa + implicit, max(exponent, 1) - fmt.bias - fmt.mantissa_bits))
    return (*values, *(-value for value in values))
