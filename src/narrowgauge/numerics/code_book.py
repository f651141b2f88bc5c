"""The 8-bit code book with a dynamic exponent, and casts to it.

A value of magnitude at most 1 has a decimal exponent of 0 to 6, written in unary, and the bits that this leaves divide
the decade into equal parts. Sources: Dettmers 2015, arXiv:1511.04561; Dettmers et al. 2021, arXiv:2110.02861, whose
implementation, bitsandbytes, has the same 256 values, signed or not.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from narrowgauge.numerics.formats import Format

EXPONENTS = 7  # decades: of non-sign bits, all may go to the exponent


@functools.cache
def values(signed: bool) -> tuple[float, ...]:
    """The 256 values, float32, in rising order: 0, 1 and, in each decade, the middles of equal parts of [0.1, 1]."""
    found = [0.0, 1.0]
    for i in range(EXPONENTS):
        parts = 2**i if signed else 2 ** (i + 1)
        edges = torch.linspace(0.1, 1.0, parts + 1, dtype=torch.float32, device="cpu")
        middles = (10.0 ** (i - (EXPONENTS - 1)) * ((edges[:-1] + edges[1:]) / 2.0)).tolist()
        found += middles + [-value for value in middles] * signed
    return tuple(sorted(found))


def zero_index(signed: bool) -> int:
    """The place of the value 0 in `values`; its code is 0, and code c (modulo 256) stands c places after it."""
    return values(signed).index(0.0)


def smallest(signed: bool) -> float:
    """The smallest positive value."""
    return values(signed)[zero_index(signed) + 1]


def encode(x: Tensor, fmt: Format) -> Tensor:
    """Codes, of INT8 or UINT8, of the nearest values; half way between two, the lower one. x: float32, without NaN."""
    places = torch.bucketize(x.contiguous(), _middles(fmt.signed, x.device))
    return (places - zero_index(fmt.signed)).to(torch.uint8).view(fmt.dtype)


def decode(codes: Tensor, fmt: Format) -> Tensor:
    """The float32 values of codes of INT8 or UINT8."""
    return _values_of_codes(fmt.signed, codes.device)[codes.contiguous().view(torch.uint8).int()]


@functools.cache
def _values_of_codes(signed: bool, device: torch.device) -> Tensor:
    return torch.tensor(values(signed), device=device).roll(-zero_index(signed))


@functools.cache
def _middles(signed: bool, device: torch.device) -> Tensor:
    """Half way between neighbours, rounded to float32."""
    found = torch.tensor(values(signed), device=device)
    return (found[:-1] + found[1:]) / 2.0
