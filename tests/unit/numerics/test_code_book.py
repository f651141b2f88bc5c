"""The code book with a dynamic exponent: its values, and the nearest of them."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
import torch

from narrowgauge.numerics import code_book
from narrowgauge.numerics.formats import INT8, UINT8, Format

BOOKS = pytest.mark.parametrize("fmt", [INT8, UINT8], ids=repr)


def codes_in_order(fmt: Format) -> torch.Tensor:
    """The code of every value, from the lowest value on."""
    return (torch.arange(256) - code_book.zero_index(fmt.signed)).to(torch.uint8).view(fmt.dtype)


@BOOKS
def test_values_are_256_distinct_ones_in_order_with_an_exact_zero_and_one(fmt: Format) -> None:
    # case 28
    values = code_book.values(fmt.signed)
    assert len(set(values)) == 256 and list(values) == sorted(values)
    assert 0.0 in values and values[-1] == 1.0
    assert values[0] == (-0.992968738079071 if fmt.signed else 0.0)
    assert all(value == np.float32(value) for value in values)


@pytest.mark.parametrize(
    ("fmt", "digest"), [(INT8, "e732639a65f497b4"), (UINT8, "305f002cc11278fb")], ids=["signed", "unsigned"]
)
def test_values_have_the_bits_of_bitsandbytes(fmt: Format, digest: str) -> None:
    # of functional.create_dynamic_map, bitsandbytes 0.50.2
    data = np.array(code_book.values(fmt.signed), np.float32).tobytes()
    assert hashlib.sha256(data).hexdigest()[:16] == digest


def test_values_follow_from_the_description() -> None:
    # by hand: the decade from 10^-6 on has one value, half way between 0.1 and 1; the next two parts, and so on
    signed = [value for value in code_book.values(True) if value > 0]
    assert signed[:3] == pytest.approx([0.55e-6, 0.325e-5, 0.775e-5], rel=1e-6)
    assert signed[-2] == pytest.approx(1 - 0.9 / 64 / 2, rel=1e-6)
    assert sum(0.1 < value < 1 for value in signed) == 64
    unsigned = code_book.values(False)[1:]
    assert unsigned[:3] == pytest.approx([0.325e-6, 0.775e-6, 0.2125e-5], rel=1e-6)
    assert sum(0.1 < value < 1 for value in unsigned) == 128
    mirrored = sorted(-value for value in signed[:-1])
    assert mirrored == [value for value in code_book.values(True) if value < 0]


@BOOKS
def test_code_zero_is_zero_and_codes_wrap_around_it(fmt: Format) -> None:
    assert code_book.decode(torch.zeros(3, dtype=fmt.dtype), fmt).tolist() == [0.0] * 3
    assert code_book.decode(codes_in_order(fmt), fmt).tolist() == list(code_book.values(fmt.signed))
    ends = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])
    expected = [-127, -127, 0, -128, -128] if fmt.signed else [0, 0, 0, 255, 255]
    assert code_book.encode(ends, fmt).tolist() == expected


@BOOKS
def test_values_come_back_and_middles_part_them(fmt: Format) -> None:
    codes = codes_in_order(fmt)
    values = code_book.decode(codes, fmt)
    assert code_book.encode(values, fmt).equal(codes)
    middles = torch.tensor([np.float32(np.float32(a + b) / 2) for a, b in itertools.pairwise(values.numpy())])
    assert code_book.encode(middles, fmt).equal(codes[:-1])  # half way: the lower
    assert code_book.encode(middles.nextafter(torch.tensor(2.0)), fmt).equal(codes[1:])


@BOOKS
def test_random_values_take_the_nearest(fmt: Format) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(20000, generator=generator) ** 6
    x = torch.where(torch.rand(20000, generator=generator) < 0.5, x, -x if fmt.signed else x)
    values = torch.tensor(code_book.values(fmt.signed)).double()
    found = code_book.decode(code_book.encode(x, fmt), fmt).double()
    least = (x.double()[:, None] - values).abs().amin(dim=1)
    # the middle itself is rounded to float32
    assert ((x.double() - found).abs() <= least + found.abs() * 2.0**-23).all()
