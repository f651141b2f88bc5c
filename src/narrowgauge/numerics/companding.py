"""Companding: a curve before a cast and its inverse after it, so that codes lie denser where values are small.

A tile's values are multiplied by its scale, bent by the curve, and rounded; `decode(codes) * dequant_scale` gives them
back. Optimizer states span many powers of two, which equal steps cannot.
"""

from __future__ import annotations

import math
from enum import Enum

import torch
from torch import Tensor

from narrowgauge.numerics import code_book, rounding
from narrowgauge.numerics.formats import Format

# RANGE_EXPANSION's exponents are multiples of this
EXPONENT_STEP = 1 / 16


class Companding(Enum):
    """Which curve.

    LINEAR: none. SQUARE_ROOT: code = round(sign(x) * sqrt(|x| * quant_scale)), x ~ code * |code| * dequant_scale.
    DYNAMIC: the 256 values of a fixed code book with a dynamic exponent, see `code_book`. RANGE_EXPANSION: a power of
    the value that makes the tile fill the format's range (COAT, arXiv:2410.19313).
    """

    LINEAR = "linear"
    SQUARE_ROOT = "square root"
    DYNAMIC = "dynamic code book"
    RANGE_EXPANSION = "range expansion"

    def __repr__(self) -> str:
        return self.name


LINEAR = Companding.LINEAR
SQUARE_ROOT = Companding.SQUARE_ROOT
DYNAMIC = Companding.DYNAMIC
RANGE_EXPANSION = Companding.RANGE_EXPANSION


def limit_of(fmt: Format, companding: Companding) -> float:
    """The magnitude that a scale brings the largest value of a tile to: what the largest code stands for."""
    if companding is DYNAMIC:
        return 1.0
    return fmt.max**2 if companding is SQUARE_ROOT else fmt.max


def smallest_of(fmt: Format, companding: Companding) -> float:
    """The smallest positive magnitude that a code stands for; of RANGE_EXPANSION that of a tile it does not bend."""
    if companding is DYNAMIC:
        return code_book.smallest(fmt.signed)
    least = fmt.smallest_subnormal
    return least**2 if companding is SQUARE_ROOT else least


def encode(
    scaled: Tensor,
    fmt: Format,
    companding: Companding = LINEAR,
    exponents: Tensor | None = None,
    *,
    nonzero: Tensor | None = None,
    words: Tensor | None = None,
) -> Tensor:
    """Bend scaled values and round them to codes of `fmt`, saturating: float32 of any shape to `fmt.dtype`.

    exponents: of RANGE_EXPANSION, broadcastable against `scaled`. nonzero: True where a value of its sign is to have a
    code that is not zero's. words: random, as in `rounding.encode`. NaN has code 0 where the format has none.
    """
    bent = _bend(scaled, fmt, companding, exponents)
    if nonzero is not None:
        least = code_book.smallest(fmt.signed) if companding is DYNAMIC else fmt.smallest_subnormal
        bent = rounding.lifted(bent, nonzero, least)
    if not fmt.has_nan:
        bent = torch.where(bent.isnan(), 0.0, bent)
    if companding is DYNAMIC:
        return code_book.encode(bent, fmt)
    return rounding.encode(bent, fmt, saturating=True, words=words)


def decode(codes: Tensor, fmt: Format, companding: Companding = LINEAR, exponents: Tensor | None = None) -> Tensor:
    """What codes stand for, float32, but for the scale of their tile."""
    if companding is DYNAMIC:
        return code_book.decode(codes, fmt)
    values = rounding.decode(codes, fmt)
    if companding is SQUARE_ROOT:
        return values * values.abs()
    return values if companding is LINEAR else _power(values, fmt, exponents, inverse=True)


def is_extreme(codes: Tensor, fmt: Format, companding: Companding) -> Tensor:
    """True for the codes that an infinity is cast to, of either sign."""
    if companding is DYNAMIC:  # 1 has the last code, which is next to that of the least value where they are signed
        return codes <= -127 if fmt.signed else codes == 255
    return rounding.decode(codes, fmt).abs() >= fmt.max


def expansion_exponents(largest: Tensor, least: Tensor, fmt: Format) -> Tensor:
    """The exponents of RANGE_EXPANSION, float32, of tiles by their largest and least magnitude that is not zero.

    COAT's k = floor(log2(R) / log2(largest / least) * 16) / 16, R = max^2 / 2 of the format, at least 1/16. Tiles that
    have no such range, of one magnitude or with infinities or NaN, have 1: they are cast plainly.
    """
    span = largest.double().log2() - least.double().log2()
    wanted = math.log2(fmt.max**2 / 2) / span
    exponents = ((wanted / EXPONENT_STEP).floor() * EXPONENT_STEP).clamp(min=EXPONENT_STEP)
    return torch.where(span.isfinite() & (span > 0), exponents, 1.0).float()


def _bend(scaled: Tensor, fmt: Format, companding: Companding, exponents: Tensor | None) -> Tensor:
    if companding is SQUARE_ROOT:
        return rounding.root(scaled.abs()).copysign(scaled)
    return _power(scaled, fmt, exponents, inverse=False) if companding is RANGE_EXPANSION else scaled


def _power(x: Tensor, fmt: Format, exponents: Tensor | None, *, inverse: bool) -> Tensor:
    """sign(x) * max * (|x| / max)^exponent, or to the inverse of the exponent; where that is 1, x itself."""
    assert exponents is not None
    power = 1.0 / exponents if inverse else exponents
    bent = ((x.abs() / fmt.max) ** power * fmt.max).copysign(x)
    return torch.where(exponents == 1.0, x, bent)
