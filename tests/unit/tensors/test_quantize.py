"""`quantize`: bits of codes and scales, against golden values, numpy with ml_dtypes, and reported cases."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from narrowgauge import CURRENT, CURRENT_POW2, E8M0_UP, NONE, TENSOR_POW2, CastSpec, Delayed, NarrowgaugeError
from narrowgauge.errors import RecipeError
from narrowgauge.numerics import formats
from narrowgauge.numerics.formats import BF16, E2M1FN, E2M3FN, E3M2FN, E4M3FN, E5M2, FP16, FP32, INT8, TF32
from narrowgauge.tensors.quantized import QuantizedTensor, quantize

GOLDEN = Path(__file__).parents[2] / "golden"
CASTS = json.loads((GOLDEN / "casts.json").read_text())
SCALES = json.loads((GOLDEN / "scales.json").read_text())
NARROW = (E4M3FN, E5M2)
NUMPY_TYPES = {E4M3FN: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}


def floats(words: list[str]) -> torch.Tensor:
    return torch.from_numpy(np.array([int(w, 16) for w in words], dtype=np.uint32).view(np.float32).copy())


def as_ints(codes: torch.Tensor) -> list[int]:
    return codes.view(torch.uint8).tolist()


def assert_same(a: QuantizedTensor, b: QuantizedTensor) -> None:
    """Equal in every bit of codes and scale."""
    assert as_ints(a.codes.contiguous()) == as_ints(b.codes.contiguous())
    assert torch.equal(a.dequant_scale.view(torch.int32), b.dequant_scale.view(torch.int32))


@pytest.mark.parametrize("name", sorted(CASTS["formats"]))
def test_unscaled_codes_are_the_golden_ones(name: str) -> None:
    table, fmt = CASTS["formats"][name], formats.ALL[name.upper()]
    q = quantize(floats(table["x_f32_hex"]), CastSpec(fmt, scale=NONE))
    assert as_ints(q.codes) == table["code"]
    assert q.dequant_scale.item() == 1.0


@pytest.mark.parametrize("name", ["e4m3fn", "e5m2"])
def test_infinity_saturates_and_nan_stays_nan(name: str) -> None:
    table, fmt = CASTS["formats"][name], formats.ALL[name.upper()]
    q = quantize(floats(table["special_x_f32_hex"]), CastSpec(fmt))
    assert as_ints(q.codes)[:2] == table["special_code"][:2]
    values = q.dequantize()
    assert values[:2].tolist() == [fmt.max, -fmt.max] and values[2].isnan()
    assert q.dequant_scale.item() == 1.0
    assert q.amax.isnan()  # what was there stays visible


def test_wide_unscaled_values_are_the_golden_ones() -> None:
    wide = CASTS["wide"]
    x = floats(wide["x_f32_hex"])
    for fmt, key in ((FP16, "fp16_bits"), (BF16, "bf16_bits")):
        expected = torch.tensor(wide[key], dtype=torch.int32).to(torch.int16).view(fmt.dtype)
        codes = quantize(x, CastSpec(fmt)).codes
        assert ((codes.view(torch.int16) == expected.view(torch.int16)) | (codes.isnan() & expected.isnan())).all()
    expected, codes = floats(wide["tf32_as_f32_hex"]), quantize(x, CastSpec(TF32)).codes
    assert ((codes.view(torch.int32) == expected.view(torch.int32)) | (codes.isnan() & expected.isnan())).all()


@pytest.mark.parametrize("fmt", NARROW)
@pytest.mark.parametrize(("rule", "suffix"), [(CURRENT, "f32"), (CURRENT_POW2, "pow2")])
def test_scales_are_the_golden_ones(fmt: formats.Format, rule: object, suffix: str) -> None:
    table = SCALES["tables"][f"{fmt.name.lower()}_{suffix}"]
    for amax, inverse in zip(floats(SCALES["amax_f32_hex"]), floats(table["inverse_f32_hex"]), strict=True):
        q = quantize(torch.stack([amax / 2, -amax]), CastSpec(fmt, scale=rule))  # type: ignore[arg-type]
        assert q.dequant_scale.item() == inverse.item()
        assert q.amax.item() == amax.item()


@pytest.mark.parametrize("fmt", NARROW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_codes_and_scale_agree_with_numpy(fmt: formats.Format, dtype: torch.dtype) -> None:
    x = (torch.randn(37, 53, generator=torch.Generator().manual_seed(1)) * 3e-3).to(dtype)
    q = quantize(x, CastSpec(fmt))
    values = x.float().numpy()
    scale = np.float32(fmt.max) / np.abs(values).max()
    codes = np.clip(values * scale, -fmt.max, fmt.max).astype(NUMPY_TYPES[fmt])
    assert as_ints(q.codes) == codes.view(np.uint8).tolist()
    assert q.dequant_scale.item() == np.float32(1) / scale
    assert q.dequant_scale.dtype is torch.float32 and q.dtype is dtype
    expected = torch.from_numpy(codes.astype(np.float32) * (np.float32(1) / scale)).to(dtype)
    assert torch.equal(q.dequantize(), expected)


def test_scaled_fp16_agrees_with_numpy() -> None:
    x = torch.randn(64, 5, generator=torch.Generator().manual_seed(2)) * 1e-9
    q = quantize(x, CastSpec(FP16, scale=TENSOR_POW2))
    values = x.numpy()
    exponent = min(np.floor(np.log2(np.float64(65504) / np.abs(values).max())), 126)
    assert q.dequant_scale.item() == 2.0**-exponent
    assert np.array_equal(q.codes.numpy(), (values * np.float32(2.0**exponent)).astype(np.float16))
    assert (q.dequantize() - x).abs().max() <= 2**-11 * x.abs().max()


def test_scale_of_fp16_input_is_computed_in_float32() -> None:
    q = quantize(torch.full((16, 16), 0.005, dtype=torch.float16), CastSpec(E4M3FN))  # case 3
    assert q.dequant_scale.item() == pytest.approx(1.1163e-5, rel=1e-4)
    assert q.dequantize().dtype is torch.float16
    assert q.dequantize()[0, 0].item() == pytest.approx(0.005, rel=1e-3)


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, E2M1FN, E2M3FN, E3M2FN, INT8])
@pytest.mark.parametrize("rule", [CURRENT, CURRENT_POW2, TENSOR_POW2, E8M0_UP])
def test_zeros_come_back_as_zeros(fmt: formats.Format, rule: object) -> None:
    q = quantize(torch.zeros(4, 256), CastSpec(fmt, scale=rule))  # case 1  # type: ignore[arg-type]
    assert q.dequant_scale.isfinite() and q.dequant_scale > 0
    assert torch.equal(q.dequantize(), torch.zeros(4, 256))


@pytest.mark.parametrize("rule", [CURRENT, CURRENT_POW2, TENSOR_POW2])
def test_one_zero_row_stays_zero(rule: object) -> None:
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(3))  # case 1
    x[1] = 0
    values = quantize(x, CastSpec(E4M3FN, scale=rule)).dequantize()  # type: ignore[arg-type]
    assert torch.equal(values[1], torch.zeros(256))
    assert ((values - x).abs() <= (x.abs() / 16).clamp(min=2.2e-6 * x.abs().max())).all()


@pytest.mark.parametrize("fmt", NARROW)
@pytest.mark.parametrize("rule", [CURRENT_POW2, TENSOR_POW2, CURRENT])
def test_requantizing_is_stable(fmt: formats.Format, rule: object) -> None:
    spec = CastSpec(fmt, scale=rule)  # case 9  # type: ignore[arg-type]
    first = quantize(torch.randn(64, 64, generator=torch.Generator().manual_seed(4)), spec)
    again = first
    for _ in range(10):
        again = quantize(again.dequantize(), spec)
        assert as_ints(again.codes) == as_ints(first.codes)
        if rule is CURRENT:
            torch.testing.assert_close(again.dequantize(), first.dequantize(), rtol=1e-6, atol=0)
        else:
            assert_same(again, first)


def test_requantizing_every_finite_code_gives_it_back() -> None:
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = codes.float()  # case 9
    for scale in (1.0, 2.0**-13, 3.0e-5):
        y = values * scale
        z = quantize(y, CastSpec(E4M3FN))
        assert as_ints(z.codes) == as_ints(codes)  # the sign of zero too
        torch.testing.assert_close(z.dequantize(), y, rtol=1e-6, atol=0)


@pytest.mark.parametrize("fmt", [E4M3FN, E2M1FN, FP16])
@pytest.mark.parametrize(
    "strided",
    [
        lambda x: x[:, ::2],
        lambda x: x.t(),
        lambda x: x[:1].expand(5, -1),
        lambda x: x[..., :40],
        lambda x: x.reshape(2, 8, 8, 6).permute(0, 3, 1, 2),
    ],
)
def test_strides_do_not_matter(fmt: formats.Format, strided: object) -> None:
    x = torch.randn(16, 48, generator=torch.Generator().manual_seed(5))  # case 51
    view = strided(x)  # type: ignore[operator]
    spec = CastSpec(fmt, scale=TENSOR_POW2 if fmt is FP16 else CURRENT)
    assert_same(quantize(view, spec), quantize(view.contiguous(), spec))
    assert torch.equal(quantize(view, spec).dequantize(), quantize(view.contiguous(), spec).dequantize())


@pytest.mark.parametrize("shape", [(0,), (0, 16), (2, 0, 16)])
@pytest.mark.parametrize(
    "spec", [CastSpec(E4M3FN), CastSpec(FP16, scale=TENSOR_POW2), CastSpec(BF16), CastSpec(E2M1FN)]
)
def test_empty_tensors(shape: tuple[int, ...], spec: CastSpec) -> None:
    q = quantize(torch.empty(shape), spec)  # case 54
    assert q.shape == shape and q.dequantize().shape == shape
    assert q.dequant_scale.isfinite() and q.dequant_scale > 0
    assert q.add_(1).shape == shape


def test_tiny_tensors_take_the_largest_scale() -> None:
    q = quantize(torch.tensor([1e-40, -1e-40]), CastSpec(E4M3FN))  # 448 / 1e-40 is infinite in float32
    assert q.dequant_scale.isfinite() and q.dequant_scale > 0
    assert q.dequantize().isfinite().all()


@pytest.mark.parametrize("x", [torch.arange(4), torch.ones(3, dtype=torch.bool), torch.ones(2, dtype=torch.complex64)])
def test_tensors_of_other_kinds_are_refused(x: torch.Tensor) -> None:
    with pytest.raises(NarrowgaugeError, match=r"expected a tensor of float16.*found torch\..*convert"):
        quantize(x, CastSpec(E4M3FN))


def test_delayed_scaling_needs_a_given_scale() -> None:
    with pytest.raises(RecipeError, match="earlier steps: use CURRENT"):
        quantize(torch.ones(3), CastSpec(E4M3FN, scale=Delayed()))
    with pytest.raises(RecipeError, match="expected a CastSpec, found 'E4M3'"):
        quantize(torch.ones(3), "E4M3")  # type: ignore[arg-type]


def test_nan_in_a_format_without_nan() -> None:
    x = torch.tensor([1.0, float("nan"), 2.0])
    for rule in (CURRENT, CURRENT_POW2, TENSOR_POW2, E8M0_UP):
        q = quantize(x, CastSpec(E2M1FN, scale=rule))
        assert q.dequant_scale.isnan() and q.dequantize().isnan().all()
    with pytest.raises(RecipeError, match="NaN"):
        quantize(x, CastSpec(E2M1FN, scale=NONE))


def test_operations_see_an_infinity_that_saturated() -> None:
    x = torch.tensor([1.0, float("-inf"), 3.0])
    for spec in (CastSpec(E4M3FN), CastSpec(E5M2), CastSpec(FP16, scale=TENSOR_POW2)):
        q = quantize(x, spec)
        assert q.dequantize().tolist() == [1.0, -spec.format.max, 3.0]
        assert (q + 0).tolist() == [1.0, float("-inf"), 3.0]
        assert q.isfinite().tolist() == [True, False, True]
        assert q.norm() == float("inf")


def test_the_result_owns_its_memory() -> None:
    for spec, dtype in ((CastSpec(FP32), torch.float32), (CastSpec(BF16), torch.bfloat16)):
        x = torch.ones(4, dtype=dtype, requires_grad=True)
        q = quantize(x, spec)
        q.add_(1)
        assert not q.requires_grad
        assert x.tolist() == [1, 1, 1, 1] and q.tolist() == [2, 2, 2, 2]


def test_a_quantized_tensor_is_cast_by_its_values() -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(6))
    q = quantize(x, CastSpec(E4M3FN))
    assert_same(quantize(q, CastSpec(E5M2)), quantize(q.dequantize(), CastSpec(E5M2)))


def test_parts_that_do_not_fit_are_refused() -> None:
    codes, scale = torch.zeros(3, dtype=torch.float8_e4m3fn), torch.ones(())
    with pytest.raises(NarrowgaugeError, match="codes of E5M2: expected torch.float8_e5m2"):
        QuantizedTensor(codes, scale, CastSpec(E5M2))
    with pytest.raises(NarrowgaugeError, match="expected one float32 value"):
        QuantizedTensor(codes, torch.ones(3), CastSpec(E4M3FN))
    with pytest.raises(NarrowgaugeError, match="floating dtype"):
        QuantizedTensor(codes, scale, CastSpec(E4M3FN), torch.int32)


def test_nbytes_counts_what_is_held() -> None:
    assert quantize(torch.ones(100), CastSpec(E4M3FN)).nbytes == 100 + 4 + 4
    assert quantize(torch.ones(100), CastSpec(FP16, scale=TENSOR_POW2)).nbytes == 200 + 4 + 4
