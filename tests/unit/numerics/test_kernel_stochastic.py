"""The Numba kernels for stochastic casts with one scale and for the Hadamard transform against their twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from narrowgauge.numerics import hadamard, kernels, philox
from narrowgauge.numerics.formats import BF16, E4M3FN, E5M2, Format
from narrowgauge.numerics.kernels import cpu, cpu_hadamard, numba_rows, twin

INPUTS = (torch.float32, torch.bfloat16, torch.float16)
KEYS = (0, 1, -1, 2**63 - 1, -(2**63), 3**39)


def assert_bits_equal(a: Tensor | None, b: Tensor | None) -> None:
    """Equal in bits, but for a NaN's payload."""
    assert a is not None and b is not None
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    same = a.view(view) == b.view(view)
    assert (same | (a.float().isnan() & b.float().isnan())).all()


def random_bits(length: int, dtype: torch.dtype) -> Tensor:
    bits = torch.randint(-(2**31), 2**31, (length,), generator=torch.Generator().manual_seed(length))
    return bits.to(torch.int32).view(torch.float32).to(dtype)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("stream", [0, 5, 2**31])
def test_words_are_those_of_philox(key: int, stream: int) -> None:
    words = torch.empty(400, dtype=torch.int32)
    expected = philox.random_words(torch.tensor(key), stream, 500)
    numba_rows.draw_row(key, stream, 0, words.numpy())
    assert torch.equal(words.long() & 0xFFFFFFFF, expected[:400])
    numba_rows.draw_row(key, stream, 25, words.numpy())
    assert torch.equal(words.long() & 0xFFFFFFFF, expected[100:])


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
@pytest.mark.parametrize("scale", [None, 1.7, 2.0**-20])
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=repr)
def test_narrow_casts_of_random_bits(fmt: Format, scale: float | None, dtype: torch.dtype) -> None:
    x, key = random_bits(70_001, dtype), torch.tensor(KEYS[-1])
    factor = None if scale is None else torch.tensor(scale)
    for carrier in (torch.bfloat16, torch.float32):
        expected = twin.quantize(x, factor, fmt, None, True, carrier, True, key, 4)
        found = kernels.quantize(x, factor, fmt, carrier=carrier, count=True, key=key, stream=4)
        for a, b in zip(found, expected, strict=True):
            assert_bits_equal(a, b)


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
@pytest.mark.parametrize("scale", [None, 1.7])
def test_bfloat16_casts_of_random_bits(scale: float | None, dtype: torch.dtype) -> None:
    x, key = random_bits(70_001, dtype), torch.tensor(KEYS[-1])
    x[:4] = torch.tensor([3.4028235e38, 3.3961775e38, -0.0, 1e-40]).to(dtype)
    factor = None if scale is None else torch.tensor(scale)
    expected = twin.quantize(x, factor, BF16, None, True, None, False, key, 4)[0]
    assert_bits_equal(cpu.round_to_bfloat16(x, factor, key, 4), expected)
    assert_bits_equal(kernels.quantize(x, factor, BF16, key=key, stream=4).codes, expected)


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, BF16], ids=repr)
@pytest.mark.parametrize("length", [1, 2, 1023, 1025, 200_003])
def test_any_length_in_any_number_of_threads(fmt: Format, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, key = torch.randn(length, generator=torch.Generator().manual_seed(length)), torch.tensor(9)
    expected = twin.quantize(x, None, fmt, None, True, None, False, key, 0)[0]
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert_bits_equal(kernels.quantize(x, None, fmt, key=key).codes, expected)


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
@pytest.mark.parametrize("shape", [(16, 16), (1, 1), (37, 300), (5, 1), (31, 257), (300, 256)], ids=str)
def test_the_transform_has_the_bits_of_its_twin(shape: tuple[int, int], dtype: torch.dtype, monkeypatch) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 0] = -0.0
    for signs in (hadamard.SIGNS, hadamard.Hadamard.seeded(1).signs):
        assert_bits_equal(kernels.transform(x, signs), hadamard.transform(x, signs))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert_bits_equal(cpu_hadamard.transform(x.t(), hadamard.SIGNS), hadamard.transform(x.t(), hadamard.SIGNS))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)], ids=str)
def test_the_transform_of_nothing(shape: tuple[int, int]) -> None:
    assert kernels.transform(torch.empty(shape), hadamard.SIGNS).shape == (-(-shape[0] // 16) * 16, shape[1])
