from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.errors import RecipeError
from narrowgauge.numerics import formats, reference, rounding
from narrowgauge.numerics.formats import BF16, E4M3FN, E5M2, E8M0FNU, FP16, FP32, INT8, TF32, UINT8, Format

FLOATS = [f for f in formats.ALL.values() if f.bits <= 8 and not f.is_integer and f.signed]
ML_DTYPES = {
    "E4M3FN": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
    "E2M1FN": ml_dtypes.float4_e2m1fn,
    "E3M2FN": ml_dtypes.float6_e3m2fn,
    "E2M3FN": ml_dtypes.float6_e2m3fn,
}


def from_hex(values: list[str]) -> torch.Tensor:
    return torch.from_numpy(np.array([int(v, 16) for v in values], np.uint32).view(np.float32))


def bits_list(x: torch.Tensor) -> list[int]:
    return [b & 0xFFFFFFFF for b in x.view(torch.int32).tolist()]


def code_ints(codes: torch.Tensor, fmt: Format) -> list[int]:
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[codes.element_size()]
    return [c % (1 << 8 * codes.element_size()) for c in codes.view(width).tolist()]


def is_nan_code(code: int, fmt: Format) -> bool:
    return reference.decode(code, fmt) % reference.SIGN > reference.INFINITY


@pytest.mark.parametrize("fmt", FLOATS, ids=repr)
def test_codes_equal_the_golden_codes(fmt: Format, golden) -> None:
    expected = golden("casts")["formats"][fmt.name.lower()]
    x = from_hex(expected["x_f32_hex"])
    assert code_ints(rounding.encode(x, fmt), fmt) == expected["code"]
    assert [reference.encode(b, fmt) for b in bits_list(x)] == expected["code"]
    for value, code in zip(
        expected.get("special_x_f32_hex", []), expected.get("special_code", []), strict=True
    ):  # +inf, -inf, NaN
        (found,) = code_ints(rounding.encode(from_hex([value]), fmt), fmt)
        assert found == code or (is_nan_code(found, fmt) and is_nan_code(code, fmt))


@pytest.mark.parametrize(
    ("fmt", "key"), [(FP16, "fp16_bits"), (BF16, "bf16_bits"), (TF32, "tf32_as_f32_hex")], ids=["FP16", "BF16", "TF32"]
)
def test_wide_casts_equal_the_golden_bits(fmt: Format, key: str, golden) -> None:
    wide = golden("casts")["wide"]
    x = from_hex(wide["x_f32_hex"])
    expected = [int(v, 16) if isinstance(v, str) else v for v in wide[key]]
    assert code_ints(rounding.encode(x, fmt), fmt) == expected
    assert [reference.encode(b, fmt) for b in bits_list(x)] == expected


@pytest.mark.parametrize("fmt", FLOATS, ids=repr)
def test_codes_equal_the_scalar_twin_in_every_class_of_float32(fmt: Format, float32_classes) -> None:
    x = float32_classes(fmt)
    found = code_ints(rounding.encode(x, fmt), fmt)
    for bits, code in zip(bits_list(x), found, strict=True):
        expected = reference.encode(bits, fmt)
        assert code == expected or (is_nan_code(code, fmt) and is_nan_code(expected, fmt)), hex(bits)


@pytest.mark.parametrize("fmt", FLOATS, ids=repr)
def test_codes_equal_ml_dtypes_after_a_clip(fmt: Format, float32_classes) -> None:
    x = float32_classes(fmt)
    x = x[~x.isnan()]
    clipped = x.clamp(-fmt.max, fmt.max).numpy()
    assert np.array_equal(
        rounding.encode(x, fmt).view(torch.uint8).numpy(), clipped.astype(ML_DTYPES[fmt.name]).view(np.uint8)
    )


@pytest.mark.parametrize("fmt", [FP16, BF16, TF32, FP32, E5M2], ids=repr)
def test_overflow_without_saturation_is_ieee(fmt: Format, float32_classes) -> None:
    x = float32_classes(E5M2)
    x = torch.cat([x, torch.tensor([65504.0, 65519.99, 65520.0, 3.39e38, 3.3961e38, -3.4e38])])
    found = code_ints(rounding.encode(x, fmt, saturating=False), fmt)
    for bits, code in zip(bits_list(x), found, strict=True):
        expected = reference.encode(bits, fmt, saturating=False)
        assert code == expected or bits % reference.SIGN > reference.INFINITY, hex(bits)


def test_scaled_fp16_storage_saturates_and_arithmetic_does_not() -> None:
    x = torch.tensor([7e4, -float("inf")])
    assert rounding.encode(x, FP16).tolist() == [float("inf"), -float("inf")]
    assert rounding.encode(x, FP16, saturating=True).tolist() == [65504.0, -65504.0]


@pytest.mark.parametrize("fmt", [INT8, UINT8], ids=repr)
def test_integers_round_ties_to_even_and_saturate(fmt: Format) -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 254.5, 300.0, -300.0, float("inf"), -float("inf")])
    expected = [reference.encode(b, fmt) for b in bits_list(x)]
    assert code_ints(rounding.encode(x, fmt), fmt) == expected
    assert 0x80 not in expected or fmt is UINT8  # -128 is not used


@pytest.mark.parametrize("fmt", [f for f in formats.ALL.values() if not f.has_nan], ids=repr)
def test_nan_is_refused_where_the_format_has_none(fmt: Format) -> None:
    with pytest.raises(RecipeError, match="NaN cannot be cast"):
        rounding.encode(torch.tensor([1.0, float("nan")]), fmt)
    with pytest.raises(ValueError, match="no NaN"):
        reference.encode(reference.NAN, fmt)


@pytest.mark.parametrize("fmt", [f for f in formats.ALL.values() if not f.has_inf], ids=repr)
def test_overflow_is_refused_where_the_format_has_no_infinity(fmt: Format) -> None:
    with pytest.raises(RecipeError, match="no infinity"):
        rounding.encode(torch.ones(1), fmt, saturating=False)


def test_e8m0_equals_the_scalar_twin() -> None:
    edges = [reference.bits_of(2.0**e) for e in range(-127, 128)] + [
        0,
        1,
        0x00500000,
        0x00600000,
        0x7F7FFFFF,
        0x7F800000,
    ]
    bits = [b + d for b in edges for d in (-1, 0, 1, 0x3FFFFF, 0x400000) if 0 <= b + d <= 0x7F800000]
    x = torch.from_numpy(np.array(bits, np.int32)).view(torch.float32)
    assert code_ints(rounding.encode(x, E8M0FNU), E8M0FNU) == [reference.encode(b, E8M0FNU) for b in bits]


@pytest.mark.parametrize("fmt", [f for f in formats.ALL.values() if f.bits <= 8], ids=repr)
def test_decoding_and_encoding_again_gives_every_code_back(fmt: Format) -> None:
    # case 9: casting what is already representable changes nothing, and no sign of zero becomes NaN
    codes = torch.arange(1 << fmt.bits).to(torch.uint8).view(fmt.dtype)
    values = rounding.decode(codes, fmt)
    keep = values.isfinite() & (values.abs() <= fmt.max)
    again = rounding.encode(values[keep], fmt)
    assert code_ints(again, fmt) == code_ints(codes[keep], fmt)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 0xFFFFFFFF), st.sampled_from([*FLOATS, FP16, BF16, TF32]))
def test_any_bit_pattern_encodes_as_the_scalar_twin_says(bits: int, fmt: Format) -> None:
    is_nan = bits % reference.SIGN > reference.INFINITY
    if is_nan and not fmt.has_nan:
        return
    x = torch.from_numpy(np.array([bits], np.uint32).view(np.float32))
    (code,) = code_ints(rounding.encode(x, fmt), fmt)
    expected = reference.encode(bits, fmt)
    assert code == expected or is_nan
    assert is_nan == (reference.decode(code, fmt) % reference.SIGN > reference.INFINITY if fmt.bits <= 8 else is_nan)


@settings(max_examples=200, deadline=None)
@given(st.floats(-448, 448, width=32))
def test_e4m3_rounds_within_half_a_spacing(value: float) -> None:
    rounded = rounding.round_to(torch.tensor([value]), E4M3FN).item()
    assert abs(rounded - value) <= max(abs(value) / 16, 2**-10)


def test_decode_follows_the_device_and_dtype_asked_for() -> None:
    codes = rounding.encode(torch.tensor([0.5, 6.0, -3.0]), formats.E2M1FN)
    assert rounding.decode(codes, formats.E2M1FN, torch.bfloat16).tolist() == [0.5, 6.0, -3.0]
    assert rounding.round_to(torch.tensor([0.1], dtype=torch.float64), FP32).dtype is torch.float32


def test_roots_are_correctly_rounded() -> None:
    bits = torch.randint(0, 0x7F800000, (1 << 18,), generator=torch.Generator().manual_seed(0)).int()
    x = torch.cat([bits.view(torch.float32), torch.tensor([0.0, 2.0**-149, torch.inf])])
    assert torch.equal(rounding.root(x), torch.from_numpy(np.sqrt(x.numpy())))  # numpy's is the processor's
    two = torch.tensor(2.0, dtype=torch.float64)
    assert abs(rounding.root(two).item() - math.sqrt(2.0)) <= math.ulp(math.sqrt(2.0))
