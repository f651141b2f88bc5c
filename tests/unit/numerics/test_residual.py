"""bfloat16 and what it leaves over of float32: exact at every power of two, at ties, subnormals, infinities and NaN."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from narrowgauge.numerics import residual


def floats(bits: list[int]) -> Tensor:
    return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32))


def random_floats(count: int = 10**6, *, finite: bool) -> Tensor:
    bits = np.random.default_rng(0).integers(0, 2**32, count, dtype=np.uint32)
    x = torch.from_numpy(bits.view(np.float32))
    return torch.where(x.isfinite(), x, 1.0) if finite else x


def below_overflow(x: Tensor) -> Tensor:
    """Without the values that bfloat16 rounds to infinity."""
    return torch.where(x.to(torch.bfloat16).isfinite(), x, 1.0)


def same_bits(a: Tensor, b: Tensor) -> bool:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return torch.equal(a.view(kinds[a.element_size()]), b.view(kinds[b.element_size()]))


def split_exactly_in_doubles(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rule as written: hi by ml_dtypes' cast, r from exact differences, the quotient rounded to float32 once."""
    hi = x.astype(ml_dtypes.bfloat16)
    wide = hi.astype(np.float64)
    exponent = np.floor(np.log2(np.maximum(np.abs(wide), 2.0**-126)))
    half_ulp = 2.0 ** (exponent - 8)
    # x - hi and half_ulp are exact in float32, and so is their quotient, a multiple of 2^-15 of at most 1
    steps = ((x.astype(np.float64) - wide) / half_ulp).astype(np.float32) * np.float32(127)
    return hi, np.rint(steps).astype(np.int8)


# 24 bits


def test_a_million_random_values_split_as_the_rule_says() -> None:
    x = below_overflow(random_floats(finite=True))
    x = torch.where(x.abs() >= 2.0**-120, x, 1.0)  # below, half a unit is a subnormal number: a test of its own
    hi, r = residual.split(x)
    expected_hi, expected_r = split_exactly_in_doubles(x.numpy())
    assert hi.dtype is torch.bfloat16 and r.dtype is torch.int8 and hi.shape == r.shape == x.shape
    assert same_bits(hi, torch.from_numpy(expected_hi.view(np.int16)).view(torch.bfloat16))
    assert torch.equal(r, torch.from_numpy(expected_r))
    assert r.min() == -127 and r.max() == 127


def test_joining_gives_the_value_to_a_254th_of_a_unit_in_the_last_place() -> None:
    x = below_overflow(random_floats(finite=True))
    hi, r = residual.split(x)
    joined = residual.join(hi, r)
    half = residual.half_ulp(hi.float()).double()
    # half a step of 1/127 of half a unit, the roundings of share, product and sum, and float32's least number
    step = half / 127
    limit = step * 0.5 * (1 + 2e-5) + joined.abs().double() * 2.0**-24 + 2.0**-149
    error = (joined.double() - x.double()).abs()
    assert (error <= limit).all()
    assert (error > step * 0.4).any()  # the bound is not slack


def test_joined_values_split_into_the_same_parts() -> None:
    """But for some that stand at a tie: there hi may be the other neighbour, and the value stays to half a step."""
    x = below_overflow(random_floats(finite=True))
    # a tie above the largest bfloat16 is infinite
    x = torch.where((x.abs() >= 2.0**-110) & (x.abs() < 3.38e38), x, 1.0)
    hi, r = residual.split(x)
    joined = residual.join(hi, r)
    again_hi, again_r = residual.split(joined)
    moved = (again_hi != hi) | (again_r != r)
    assert (r[moved].abs() == 127).all()
    assert moved.float().mean() < 0.005  # |r| = 127 in 1 of 254 cases
    half = torch.maximum(residual.half_ulp(hi.float()), residual.half_ulp(again_hi.float()))
    limit = half / 254 * (1 + 2e-5) + joined.abs() * 2.0**-23  # and the two roundings of joining
    assert ((residual.join(again_hi, again_r) - joined).abs() <= limit).all()


def test_half_a_unit_in_the_last_place_of_every_exponent() -> None:
    for exponent in range(-126, 128):
        below = torch.tensor([1.0, 1.9921875], dtype=torch.float64) * 2.0**exponent
        expected = max(2.0 ** (exponent - 8), 2.0**-149)
        assert residual.half_ulp(below.float()).tolist() == [expected] * 2
    # subnormal numbers of bfloat16 and zero have the unit of the smallest normal one
    assert residual.half_ulp(floats([0, 0x00010000, 0x807F0000])).tolist() == [2.0**-134] * 3


@pytest.mark.parametrize(
    ("bits", "hi_bits", "r"),
    [
        (0x3F800000, 0x3F80, 0),  # 1
        (0x3F808000, 0x3F80, 127),  # a tie: to the even one below
        (0x3F818000, 0x3F82, -127),  # a tie: to the even one above
        (0x3F804000, 0x3F80, 64),  # half of half a unit: 63.5, to even
        (0x3F80C000, 0x3F81, -64),  # -63.5, to even
        (0x3F807FFF, 0x3F80, 127),
        (0x3F808001, 0x3F81, -127),
        (0xBF808001, 0xBF81, 127),
        (0x3FFF8000, 0x4000, -64),  # above 1.99.. the next power of two, whose unit is twice as large
        (0x00000000, 0x0000, 0),
        (0x80000000, 0x8000, 0),  # the sign of zero stays
        (0x00008000, 0x0000, 127),  # half a unit of bfloat16's subnormal numbers
        (0x00000001, 0x0000, 0),  # float32's smallest number
        (0x00000102, 0x0000, 1),
        (0x7F7F7FFF, 0x7F7F, 127),  # the largest value that does not overflow
        (0x7F7F8000, 0x7F80, 0),  # rounds to infinity
        (0x7F800000, 0x7F80, 0),
        (0xFF800000, 0xFF80, 0),
    ],
)
def test_values_at_the_edges_of_24_bits(bits: int, hi_bits: int, r: int) -> None:
    hi, found = residual.split(floats([bits]))
    assert hi.view(torch.int16).item() & 0xFFFF == hi_bits
    assert found.item() == r


def test_nan_has_no_residual() -> None:
    hi, r = residual.split(floats([0x7FC00000, 0xFFC00001]))
    assert hi.isnan().all() and r.tolist() == [0, 0]
    assert residual.join(hi, r).isnan().all()


def test_infinity_joins_to_infinity() -> None:
    x = torch.tensor([torch.inf, -torch.inf])
    assert torch.equal(residual.join(*residual.split(x)), x)


def test_a_bfloat16_value_has_no_residual_and_joins_to_itself() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    hi = bits.view(torch.bfloat16)
    hi = hi[~hi.isnan()]
    again, r = residual.split(hi.float())
    assert same_bits(again, hi) and not r.any()
    assert torch.equal(residual.join(hi, r), hi.float())  # -0 joins to +0


# 32 bits


def test_a_million_random_bit_patterns_come_back() -> None:
    """NaN and infinities too."""
    x = random_floats(finite=False)
    hi, remainder = residual.split_exactly(x)
    assert hi.dtype is torch.bfloat16 and remainder.dtype is torch.int16
    assert same_bits(residual.join_exactly(hi, remainder), x)
    assert x.isnan().any() and remainder.min() == -(2**15) and remainder.max() == 2**15 - 1


def test_all_lower_halves_of_some_values_come_back() -> None:
    low = torch.arange(2**16, dtype=torch.int64)
    for upper in (0x0000, 0x8000, 0x3F80, 0x3FFF, 0x7F7F, 0x7F80, 0x7FFF, 0xFF7F, 0xFFFF):
        bits = (
            ((upper << 16) + low).to(torch.int32) if upper < 0x8000 else ((upper << 16) + low - 2**32).to(torch.int32)
        )
        x = bits.view(torch.float32)
        assert same_bits(residual.join_exactly(*residual.split_exactly(x)), x)


@pytest.mark.parametrize(
    ("bits", "hi_bits", "remainder"),
    [
        (0x3F808000, 0x3F81, -0x8000),  # a tie: away from zero, since +0x8000 does not fit
        (0xBF808000, 0xBF81, -0x8000),  # for negative values, too
        (0x3F807FFF, 0x3F80, 0x7FFF),
        (0x3F818000, 0x3F82, -0x8000),
        (0x00000001, 0x0000, 1),
        (0x80000001, 0x8000, 1),
        (0x00008000, 0x0001, -0x8000),  # half of bfloat16's smallest number
        (0x7F7FFFFF, 0x7F80, -1),  # the largest float32 is infinite in bfloat16, and comes back
    ],
)
def test_values_at_the_edges_of_32_bits(bits: int, hi_bits: int, remainder: int) -> None:
    x = floats([bits])
    hi, found = residual.split_exactly(x)
    assert hi.view(torch.int16).item() & 0xFFFF == hi_bits
    assert found.item() == remainder
    assert same_bits(residual.join_exactly(hi, found), x)


@pytest.mark.parametrize("split", [residual.split, residual.split_exactly], ids=["24 bits", "32 bits"])
def test_strides_do_not_matter(split: object) -> None:
    x = torch.randn(6, 10).t()
    for ours, expected in zip(split(x), split(x.contiguous()), strict=True):  # type: ignore[operator]
        assert torch.equal(ours, expected)
    join = residual.join if split is residual.split else residual.join_exactly
    hi, r = split(x.contiguous())  # type: ignore[operator]
    strided = hi.t().contiguous().t()
    assert torch.equal(join(strided, r), join(hi, r))


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (2, 0, 3)], ids=str)
def test_empty_and_0_dimensional_tensors(shape: tuple[int, ...]) -> None:
    x = torch.full(shape, 1.001)
    assert torch.equal(residual.join_exactly(*residual.split_exactly(x)), x)
    hi, r = residual.split(x)
    assert hi.shape == r.shape == x.shape
