"""`quantize` with stochastic rounding: repeatable by seed, unbiased, fresh bits at every write."""

from __future__ import annotations

import math

import pytest
import torch
from quantized_tensors import assert_same, bits, seeded

from narrowgauge import CURRENT, CURRENT_POW2, E8M0_UP, NONE, NVFP4, PER_ROW, STOCHASTIC, TENSOR_POW2, Block, CastSpec
from narrowgauge.errors import NarrowgaugeError, RecipeError
from narrowgauge.numerics import philox, rounding
from narrowgauge.numerics.formats import BF16, E2M1FN, E2M3FN, E4M3FN, E5M2, FP16, INT8
from narrowgauge.numerics.granularity import PER_COLUMN, PER_TENSOR
from narrowgauge.tensors.cast import cast_storage
from narrowgauge.tensors.quantized import quantize

SPECS = [
    CastSpec(E4M3FN, PER_TENSOR, CURRENT, STOCHASTIC),
    CastSpec(E5M2, PER_ROW, CURRENT_POW2, STOCHASTIC),
    CastSpec(INT8, PER_COLUMN, CURRENT, STOCHASTIC),
    CastSpec(E2M3FN, Block(1, 32), E8M0_UP, STOCHASTIC),
    CastSpec(E2M1FN, Block(1, 16), NVFP4, STOCHASTIC),
    CastSpec(E2M1FN, Block(16, 16), E8M0_UP, STOCHASTIC),
    CastSpec(FP16, PER_TENSOR, TENSOR_POW2, STOCHASTIC),
    CastSpec(BF16, PER_TENSOR, NONE, STOCHASTIC),
]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_seed_of_the_generator_decides(spec: CastSpec) -> None:
    x = seeded(2, 30, 40)
    first = quantize(x, spec, generator(1))
    assert_same(first, quantize(x, spec, generator(1)))
    source = generator(1)
    assert_same(first, quantize(x, spec, source))
    assert bits_of_codes(quantize(x, spec, source)) != bits_of_codes(first)  # the next key
    torch.manual_seed(1)
    assert_same(first, quantize(x, spec))  # torch's default generator
    assert bits_of_codes(quantize(x, spec)) != bits_of_codes(first)


def bits_of_codes(q: torch.Tensor) -> list[int]:
    return q.codes.view(torch.uint8).flatten().tolist()  # type: ignore[attr-defined]


def test_nearest_even_draws_nothing() -> None:
    source = generator(3)
    before = source.get_state()
    quantize(seeded(4, 40), CastSpec(E4M3FN, PER_ROW), source)
    assert torch.equal(source.get_state(), before)


@pytest.mark.parametrize("shape", [(30, 40), (2, 15, 40), (2, 2, 40), (37,)])
def test_value_i_takes_word_i_of_the_key(shape: tuple[int, ...]) -> None:
    x = seeded(*shape)
    words = philox.random_words(philox.draw_key("cpu", generator(5)), 0, x.numel()).view(shape)
    q = quantize(x, CastSpec(E4M3FN, PER_ROW, CURRENT_POW2, STOCHASTIC), generator(5))
    scaled = x / q.dequant_scale.expand(*shape[:-1], 1) if x.ndim > 1 else x / q.dequant_scale
    expected = rounding.encode(scaled, E4M3FN, words=words)
    assert torch.equal(q.codes.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.is_scaled], ids=str)
def test_the_mean_is_unbiased_and_values_are_neighbours(spec: CastSpec) -> None:
    x = seeded(16, 48)
    source, count = generator(7), 200
    values = torch.stack([quantize(x, spec, source).dequantize() for _ in range(count)])
    nearest = quantize(x, CastSpec(spec.format, spec.granularity, spec.scale)).dequantize()
    low, high = values.amin(0), values.amax(0)
    inside = (low < x) & (x < high)
    assert inside.float().mean() > 0.9  # most values fell to both sides
    assert ((nearest == low) | (nearest == high))[inside].all()
    assert ((values == low) | (values == high)).all()  # and never farther than to a neighbour
    # a two-valued variable of gap g has a standard deviation of at most g / 2
    error = (values.mean(0) - x)[inside] / ((high - low)[inside] / 2 / math.sqrt(count))
    assert error.abs().max() < 5 and abs(error.mean()) < 4 / math.sqrt(inside.sum())


def test_values_of_the_format_never_move() -> None:
    x = torch.tensor([0.0, -0.0, 1.0, 1.5, -6.0, 448.0, -448.0, 0.5]).repeat(4)
    for seed in range(5):
        q = quantize(x, CastSpec(E4M3FN, Block(1, 8), CURRENT_POW2, STOCHASTIC), generator(seed))
        assert torch.equal(q.dequantize(), x) and torch.equal(q.dequantize().signbit(), x.signbit())


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_writes_draw_a_fresh_key(spec: CastSpec) -> None:
    x, other = seeded(30, 40), seeded(30, 40, seed=1)
    results = []
    for seed in (1, 1, 2):
        q = quantize(x, spec, generator(0))
        torch.manual_seed(seed)
        q.copy_(other)
        torch.manual_seed(seed)
        assert_same(q, quantize(other, spec))
        q.add_(0.37)
        results.append(bits_of_codes(q))
    assert results[0] == results[1] != results[2]
    q.copy_(other)
    first = bits_of_codes(q)
    q.copy_(other)
    assert bits_of_codes(q) != first


def test_a_write_that_changes_nothing_draws_and_moves_nothing() -> None:
    q = quantize(seeded(6, 8), SPECS[0], generator(0))
    before, state = bits(q), torch.get_rng_state()
    q.add_(0.0)
    assert bits(q) == before and torch.equal(torch.get_rng_state(), state)


def test_a_generator_is_one() -> None:
    for spec in (CastSpec(E4M3FN), CastSpec(E4M3FN, rounding=STOCHASTIC)):
        with pytest.raises(NarrowgaugeError, match="generator: expected a torch.Generator or None, found 5"):
            quantize(torch.ones(3), spec, 5)  # type: ignore[arg-type]


def test_a_key_is_asked_for() -> None:
    with pytest.raises(RecipeError, match="needs random bits, and no key was given: draw one from a generator"):
        cast_storage(torch.ones(3), SPECS[0])
