"""Companding: a curve before a cast and its inverse after it, so that codes lie denser where values are small.

A tile's values are divided by its scale, bent by the curve, and rounded; `expand(codes) * dequant_scale` gives them
back. Optimizer states span many powers of two, which equal steps cannot.
"""

from __future__ import annotations

from enum import Enum


class Companding(Enum):
    """Which curve.

    LINEAR: none. SQUARE_ROOT: code = round(sign(x) * sqrt(|x| * quant_scale)), x ~ code * |code| * dequant_scale.
    DYNAMIC: the 256 values of a fixed code book with a dynamic exponent (Dettmers 2015, arXiv:1511.04561; Dettmers et
    al. 2021, arXiv:2110.02861). RANGE_EXPANSION: a power of the value that makes the tile fill the format's range
    (COAT, arXiv:2410.19313).
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
