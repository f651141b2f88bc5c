"""Every format against ml_dtypes: all codes decoded, and random values of its whole range encoded."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from narrowgauge.numerics import kernels, rounding
from narrowgauge.numerics.formats import BF16, E2M1FN, E2M3FN, E3M2FN, E4M3FN, E5M2, E8M0FNU, FP16, Format

TYPES = {
    E4M3FN: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
    E2M1FN: ml_dtypes.float4_e2m1fn,
    E3M2FN: ml_dtypes.float6_e3m2fn,
    E2M3FN: ml_dtypes.float6_e2m3fn,
    E8M0FNU: ml_dtypes.float8_e8m0fnu,
    BF16: ml_dtypes.bfloat16,
    FP16: np.float16,
}
CHUNK = 1 << 20


def codes_as_bytes(codes: torch.Tensor) -> np.ndarray:
    return codes.view(torch.uint16 if codes.element_size() == 2 else torch.uint8).numpy()


def random_values(fmt: Format, count: int, seed: int) -> np.ndarray:
    """Float32 of random mantissas and signs, over all exponents that the format rounds and a few beyond."""
    random = np.random.default_rng(seed)
    low = int(np.log2(fmt.smallest_subnormal)) - 3 + 127
    high = int(np.log2(fmt.max)) + 2 + 127
    exponents = random.integers(max(low, 0), min(high, 254), count, dtype=np.uint32, endpoint=True)
    bits = (exponents << 23) | random.integers(0, 1 << 23, count, dtype=np.uint32)
    if fmt.signed:
        bits |= random.integers(0, 2, count, dtype=np.uint32) << 31
    return bits.view(np.float32)


def check_random_values(fmt: Format, count: int) -> None:
    seen: set[int] = set()
    for seed, start in enumerate(range(0, count, CHUNK)):
        x = random_values(fmt, min(CHUNK, count - start), seed)
        with np.errstate(over="ignore"):  # to infinity, as IEEE 754 says
            expected = (np.clip(x, -fmt.max, fmt.max) if fmt.saturating else x).astype(TYPES[fmt])
        width = np.uint16 if fmt.bits == 16 else np.uint8
        found = kernels.quantize(torch.from_numpy(x), None, fmt).codes
        assert found is not None
        assert np.array_equal(codes_as_bytes(found), expected.view(width))
        seen.update(np.unique(expected.view(width)).tolist())
    finite = (1 << fmt.bits) - sum(not fmt_value_is_finite(fmt, code) for code in range(1 << fmt.bits))
    assert len(seen) >= 0.95 * min(finite, count / 20)  # the values reached (nearly) every code


def fmt_value_is_finite(fmt: Format, code: int) -> bool:
    width = np.uint16 if fmt.bits == 16 else np.uint8
    return bool(np.isfinite(np.array([code], width).view(TYPES[fmt]).astype(np.float32))[0])


@pytest.mark.parametrize("fmt", TYPES, ids=repr)
def test_every_code_has_the_value_that_ml_dtypes_gives_it(fmt: Format) -> None:
    codes = np.arange(1 << fmt.bits, dtype=np.uint16 if fmt.bits == 16 else np.uint8)
    expected = codes.view(TYPES[fmt]).astype(np.float32)
    as_stored = torch.from_numpy(codes.view(np.int16) if fmt.bits == 16 else codes).view(fmt.dtype)
    for found in (rounding.decode(as_stored, fmt), kernels.dequantize(as_stored, None, fmt)):
        assert np.array_equal(found.numpy(), expected, equal_nan=True)
        real = ~np.isnan(expected)
        assert np.array_equal(np.signbit(found.numpy()[real]), np.signbit(expected[real]))
    if fmt.bits <= 8:  # and bf16, the carrier of products, holds every one of them
        assert np.array_equal(rounding.decode(as_stored, fmt, torch.bfloat16).float().numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("fmt", TYPES, ids=repr)
def test_every_code_comes_back_from_its_value(fmt: Format) -> None:
    codes = np.arange(1 << fmt.bits, dtype=np.uint16 if fmt.bits == 16 else np.uint8)
    values = codes.view(TYPES[fmt]).astype(np.float32)
    keep = np.isfinite(values)
    found = kernels.quantize(torch.from_numpy(values[keep]), None, fmt).codes
    assert found is not None
    assert np.array_equal(codes_as_bytes(found), codes[keep])


@pytest.mark.parametrize("fmt", TYPES, ids=repr)
def test_random_values_have_the_codes_that_ml_dtypes_gives_them(fmt: Format) -> None:
    check_random_values(fmt, 100_000)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", TYPES, ids=repr)
def test_ten_million_random_values_have_the_codes_that_ml_dtypes_gives_them(fmt: Format) -> None:
    check_random_values(fmt, 10_000_000)
