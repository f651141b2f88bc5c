"""Stochastic rounding: its random words, the rule for one value, and that it is unbiased."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from block_cases import FLOATS, from_bits, stored_bits, ties_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from narrowgauge.numerics import kernels, philox, reference, rounding
from narrowgauge.numerics.formats import BF16, E2M1FN, E4M3FN, E5M2, FP16, INT8, UINT8, Format
from narrowgauge.numerics.granularity import Block
from narrowgauge.numerics.scaling import CURRENT, E8M0_UP, NVFP4

FORMATS = (*FLOATS, INT8, BF16, FP16)
KEY = torch.tensor(0x1234_5678_9ABC_DEF0)
DRAWS = 1 << 14


def rounded(x: Tensor, fmt: Format, key: Tensor = KEY, stream: int = 0) -> Tensor:
    """`x` rounded stochastically, in float32."""
    codes = kernels.quantize(x, None, fmt, key=key, stream=stream).codes
    assert codes is not None
    return rounding.decode(codes, fmt)


def neighbours(x: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """The largest value of the format not above each of `x`, the smallest not below: float64, by the scalar twin."""
    pairs = []
    for value in x.flatten().tolist():
        below, above = (reference.encode_stochastically(reference.bits_of(value), fmt, word) for word in (2**32 - 1, 0))
        pairs.append(sorted(reference.float_of(reference.decode(code, fmt)) for code in (below, above)))
    low, high = torch.tensor(pairs, dtype=torch.float64).unbind(-1)
    return low.view(x.shape), high.view(x.shape)


def between(fmt: Format, count: int = 48) -> Tensor:
    """Values of both signs inside gaps of the format, from its subnormals to near its maximum."""
    generator = torch.Generator().manual_seed(7)
    lowest, highest = (math.log2(v) for v in (fmt.smallest_subnormal, fmt.max))
    lowest = max(lowest, -30) if not fmt.is_integer else -3
    exponents = torch.rand(count, generator=generator) * (min(highest, 30) - lowest) + lowest
    return torch.exp2(exponents) * (torch.randint(2, (count,), generator=generator) * 2 - 1)


# ---- random words


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_known_answers_of_random123(counter, key, expected) -> None:
    assert reference.philox4x32(counter, key) == expected


def test_the_first_words_of_key_0_and_stream_0_are_the_known_answer() -> None:
    assert [hex(w) for w in philox.random_words(torch.tensor(0), 0, 4).tolist()] == [
        "0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8",
    ]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 2**32 - 1), st.integers(0, 40))
def test_words_equal_the_scalar_twin(key: int, stream: int, count: int) -> None:
    words = philox.random_words(torch.tensor(key), stream, count)
    assert words.tolist() == [reference.random_word(key, stream, i) for i in range(count)]


def test_a_shorter_draw_is_the_start_of_a_longer_one() -> None:
    long = philox.random_words(KEY, 1, 1000)
    assert torch.equal(philox.random_words(KEY, 1, 17), long[:17])
    assert len(set(long.tolist())) == 1000


def test_words_are_uniform_in_every_bit() -> None:
    words = philox.random_words(KEY, 0, DRAWS)
    for bit in range(32):
        ones = (words >> bit & 1).sum().item()
        assert abs(ones - DRAWS / 2) <= 4 * math.sqrt(DRAWS) / 2  # a binomial's 4 sigma


def test_keys_come_from_the_generator_and_differ_from_draw_to_draw() -> None:
    a, b = (torch.Generator().manual_seed(5) for _ in range(2))
    first = [philox.draw_key("cpu", a).item() for _ in range(20)]
    assert first == [philox.draw_key("cpu", b).item() for _ in range(20)]
    assert len(set(first)) == 20
    assert any(key < 0 for key in first) and any(key > 2**40 for key in first)  # all 64 bits


# ---- one value


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 0xFFFFFFFF), st.integers(0, 0xFFFFFFFF), st.sampled_from([*FORMATS, UINT8]))
def test_any_value_is_rounded_as_the_scalar_twin_says(bits: int, word: int, fmt: Format) -> None:
    is_nan = bits % reference.SIGN > reference.INFINITY
    if is_nan and not fmt.has_nan:
        return
    x = from_bits(np.array([[bits]]))
    ((code,),) = stored_bits(rounding.encode(x, fmt, words=torch.tensor([[word]])))
    expected = reference.encode_stochastically(bits, fmt, word)
    assert code == expected or (is_nan and rounding.decode(rounding.encode(x, fmt), fmt).isnan().all())


@pytest.mark.parametrize("fmt", FLOATS, ids=repr)
def test_ties_and_their_neighbours_are_rounded_as_the_scalar_twin_says(fmt: Format) -> None:
    bits = ties_of(fmt)
    for word in (0, 0x7FFFFFFF, 0x80000000, 0x800000FF, 0x80000100, 0xFFFFFFFF):
        x = from_bits(np.array([bits]))
        codes = stored_bits(rounding.encode(x, fmt, words=torch.full(x.shape, word)))[0]
        assert codes == [reference.encode_stochastically(b, fmt, word) for b in bits]


def test_the_word_decides_by_its_upper_24_bits() -> None:
    # 2.5 lies a quarter into the gap of E2M1 from 2 to 3, times two: half; 2.25 a quarter
    for value, share in ((2.5, 0.5), (2.25, 0.25), (-2.75, 0.75)):
        threshold = int(share * 2**24)
        words = torch.tensor([0, (threshold << 8) - 1, threshold << 8, 2**32 - 1])
        found = rounding.decode(rounding.encode(torch.full((4,), value), E2M1FN, words=words), E2M1FN)
        assert found.abs().tolist() == [3.0, 3.0, 2.0, 2.0]


@pytest.mark.parametrize("fmt", [*FORMATS, UINT8], ids=repr)
def test_exact_values_never_move(fmt: Format) -> None:
    if fmt.bits == 16:
        codes = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(fmt.dtype)
    else:
        codes = torch.arange(1 << fmt.bits).to(torch.uint8).view(fmt.dtype)
    values = rounding.decode(codes, fmt)
    values = values[values.isfinite() & (values.abs() <= fmt.max)]
    for stream in range(3):
        found = rounded(values, fmt, stream=stream)
        assert torch.equal(found.view(torch.int32), values.view(torch.int32))  # the sign of zero too


@pytest.mark.parametrize("fmt", FORMATS, ids=repr)
def test_zeros_infinities_nan_and_what_lies_beyond_the_maximum_are_cast_as_to_nearest(fmt: Format) -> None:
    special = [0.0, -0.0, float("inf"), -float("inf"), 3.4e38, -3.4e38, fmt.max * 1.001, -fmt.max * 1.7]
    x = torch.tensor(special + [float("nan")] * fmt.has_nan).repeat(64)
    nearest = rounding.decode(rounding.encode(x, fmt), fmt)
    by_torch = rounding.encode(x, fmt, words=philox.random_words(KEY, 0, len(x)))
    for found in (rounded(x, fmt), rounding.decode(by_torch, fmt)):
        assert torch.equal(found.nan_to_num(nan=123), nearest.nan_to_num(nan=123))
        real = ~x.isnan()  # nothing defines the sign of NaN
        assert torch.equal(found.signbit()[real], nearest.signbit()[real])
        assert found.isnan().sum() == 64 * fmt.has_nan


@pytest.mark.parametrize("fmt", FORMATS, ids=repr)
def test_a_value_becomes_one_of_its_two_neighbours_without_bias(fmt: Format) -> None:
    x = between(fmt)
    low, high = neighbours(x, fmt)
    assert (low <= x).all() and (x <= high).all()
    found = rounded(x.expand(DRAWS, len(x)), fmt).double()
    assert ((found == low) | (found == high)).all()
    # the share f of the gap below x is the chance of the upper neighbour: the mean of n draws scatters by
    # gap * sqrt(f (1 - f) / n) about x, and words of 24 bits shift it by less than gap * 2^-24
    gap = high - low
    share = torch.where(gap > 0, (x.double() - low) / gap.clamp(min=1e-300), 0.0)
    sigma = gap * (share * (1 - share) / DRAWS).sqrt()
    error = found.mean(0) - x.double()
    assert (error.abs() <= 4 * sigma + gap * 2.0**-24).all()
    # and the errors scatter as much as chance makes them: the sum of n squared normal errors is n +- 4 sqrt(2 n)
    inside = (share > 0.01) & (share < 0.99)
    count = int(inside.sum())
    assert count >= 32
    squares = (error[inside] / sigma[inside]).square().sum().item()
    assert count - 4 * math.sqrt(2 * count) <= squares <= count + 4 * math.sqrt(2 * count)


@pytest.mark.parametrize("fmt", [E4M3FN, E2M1FN, BF16], ids=repr)
def test_the_upper_neighbour_is_as_frequent_as_the_share_of_the_gap(fmt: Format) -> None:
    low, gap = 1.0, 2.0**-fmt.mantissa_bits
    for sixteenths in range(17):
        for sign in (1, -1):
            x = torch.full((DRAWS,), sign * (low + gap * sixteenths / 16))
            up = (rounded(x, fmt, stream=sixteenths).abs() > low).sum().item()
            share = sixteenths / 16
            assert abs(up - DRAWS * share) <= 4 * math.sqrt(DRAWS * share * (1 - share))


def test_a_sum_of_small_steps_grows_in_bf16_only_by_stochastic_rounding() -> None:
    # 256 steps of 2^-10 on 1: each is an eighth of bf16's gap, which rounding to nearest drops every time
    generator = torch.Generator().manual_seed(0)
    stochastic = nearest = torch.ones(1024)
    for _ in range(256):
        stochastic = rounded(stochastic + 2**-10, BF16, philox.draw_key("cpu", generator))
        nearest = rounding.round_to(nearest + 2**-10, BF16)
    assert (nearest == 1).all()
    # every step has variance gap^2 * 7/64; the mean of 1024 such walks
    sigma = 2**-7 * math.sqrt(256 * 7 / 64 / 1024)
    assert abs(stochastic.double().mean().item() - 1.25) <= 4 * sigma


# ---- draws


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, E2M1FN, BF16], ids=repr)
def test_a_key_repeats_and_another_key_or_stream_differs(fmt: Format) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    first = rounded(x, fmt)
    assert torch.equal(first, rounded(x, fmt))
    moves = (rounding.round_to(x, fmt) != x).sum().item()
    for other in (rounded(x, fmt, stream=1), rounded(x, fmt, KEY + 1), rounded(x, fmt, KEY + (1 << 32))):
        # two independent draws differ with chance 2 f (1 - f), a third if f is uniform
        differing = (other != first).sum().item()
        assert moves / 4 <= differing <= moves / 2


@pytest.mark.parametrize("rule", [CURRENT, E8M0_UP, NVFP4], ids=repr)
@pytest.mark.parametrize("block", [Block(1, 16), Block(16, 16)], ids=repr)
def test_tiles_are_rounded_with_the_words_of_the_logical_order(rule, block: Block) -> None:
    fmt = E2M1FN
    x = torch.randn(24, 40, generator=torch.Generator().manual_seed(2))
    found = kernels.quantize_blocks(x, fmt, block, rule, key=KEY, stream=2)
    turned = kernels.quantize_blocks(x.t().contiguous().t(), fmt, block, rule, key=KEY, stream=2)
    nearest = kernels.quantize_blocks(x, fmt, block, rule)
    assert found.codes is not None and turned.codes is not None and nearest.codes is not None
    assert torch.equal(found.codes, turned.codes)
    assert torch.equal(found.dequant_scale.view(torch.uint8), nearest.dequant_scale.view(torch.uint8))
    apart = (found.codes != nearest.codes).double().mean().item()
    assert 0.15 <= apart <= 0.35  # to the further neighbour with chance min(f, 1 - f), a quarter if f is uniform


@pytest.mark.parametrize(
    ("fmt", "rule"), [(E4M3FN, CURRENT), (E5M2, E8M0_UP), (E2M1FN, CURRENT), (E2M1FN, E8M0_UP)], ids=repr
)
def test_the_mean_over_keys_of_a_cast_matrix_is_the_matrix(fmt: Format, rule) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, 64, generator=generator)
    casts = 400
    total = torch.zeros(x.shape, dtype=torch.float64)
    squares = torch.zeros(x.shape, dtype=torch.float64)
    for _ in range(casts):
        q = kernels.quantize_blocks(x, fmt, Block(1, 32), rule, key=philox.draw_key("cpu", generator))
        assert q.codes is not None
        error = kernels.dequantize_blocks(q.codes, q.dequant_scale, fmt, Block(1, 32)).double() - x.double()
        total, squares = total + error, squares + error.square()
    # by the scatter that was met: the sum over all values is within 4 sigma of 0, up to float32's scale and its inverse
    sigma = squares.sum().sqrt().item()
    assert abs(total.sum().item()) <= 4 * sigma + casts * x.double().abs().sum().item() * 2**-23
    assert sigma > 0
