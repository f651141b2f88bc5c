"""`cast_operand`: the same bits as `quantize`, and what it counts."""

from __future__ import annotations

import pytest
import torch

from narrowgauge import CURRENT, CURRENT_POW2, NONE, TENSOR_POW2, CastSpec, Delayed
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.formats import BF16, E4M3FN, E5M2, FP16, TF32
from narrowgauge.tensors.cast import cast_operand
from narrowgauge.tensors.quantized import QuantizedTensor, quantize


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_same_bytes(a: torch.Tensor | None, b: torch.Tensor) -> None:
    assert a is not None and a.dtype is b.dtype and a.shape == b.shape
    assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2])
@pytest.mark.parametrize("rule", [CURRENT, CURRENT_POW2, TENSOR_POW2, NONE])
@pytest.mark.parametrize("shape", [(3, 5), (70, 90), (0, 7)])
def test_codes_and_scale_are_those_of_quantize(fmt: object, rule: object, shape: tuple[int, int]) -> None:
    spec = CastSpec(fmt, scale=rule)  # type: ignore[arg-type]
    x = normal(*shape)
    operand = cast_operand(x, spec, keep_codes=True, carrier=torch.bfloat16)
    q = quantize(x, spec)
    assert_same_bytes(operand.codes, q.codes)
    assert operand.carrier is not None and operand.carrier.dtype is torch.bfloat16
    assert torch.equal(operand.carrier.float(), q.codes.float())  # bf16 holds every FP8 value
    if rule is NONE:
        assert operand.dequant_scale is None and operand.amax is None
    else:
        assert operand.dequant_scale is not None and operand.amax is not None
        assert operand.dequant_scale == q.dequant_scale
        assert operand.amax == q.amax
    assert operand.saturated is None and operand.flushed is None


def test_only_what_is_asked_for_is_made() -> None:
    x = normal(4, 4)
    assert cast_operand(x, CastSpec(E4M3FN), keep_codes=False, carrier=torch.float32).codes is None
    assert cast_operand(x, CastSpec(E4M3FN), keep_codes=True, carrier=None).carrier is None


def test_a_given_scale_is_used_and_amax_still_recorded() -> None:
    x = torch.tensor([100.0, -3.0, 1e-6])
    scale = torch.tensor(8.0)
    operand = cast_operand(x, CastSpec(E4M3FN, scale=Delayed()), scale, keep_codes=True, carrier=None, count=True)
    assert operand.codes is not None and operand.codes.float().tolist() == [448.0, -24.0, 0.0]
    assert operand.dequant_scale == 0.125 and operand.amax == 100.0
    assert operand.saturated == 1 and operand.flushed == 1


def test_delayed_scaling_without_a_scale_is_refused() -> None:
    with pytest.raises(RecipeError, match="pass quant_scale, or use CURRENT"):
        cast_operand(normal(2), CastSpec(E4M3FN, scale=Delayed()), keep_codes=True, carrier=None)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_amax_shows_values_that_are_not_finite(bad: float) -> None:
    x = normal(64, 64)
    x[3, 5] = bad
    operand = cast_operand(x, CastSpec(E4M3FN), keep_codes=True, carrier=None)
    assert operand.amax is not None and not operand.amax.isfinite()
    assert operand.dequant_scale == 1.0


def test_wide_operands_overflow_and_stored_ones_saturate() -> None:
    x = torch.tensor([1e5, -1.0])
    overflowing = cast_operand(x, CastSpec(FP16), keep_codes=True, carrier=None, count=True)
    assert overflowing.codes is not None and overflowing.codes.tolist() == [float("inf"), -1.0]
    assert overflowing.saturated == 1 and overflowing.amax == 1e5
    scale = torch.tensor(1.0)
    stored = cast_operand(x, CastSpec(FP16, scale=TENSOR_POW2), scale, keep_codes=True, carrier=None)
    assert stored.codes is not None and stored.codes.tolist() == [65504.0, -1.0]


@pytest.mark.parametrize("fmt", [BF16, FP16, TF32])
def test_wide_operands_have_no_scale(fmt: object) -> None:
    x = normal(9, 7)
    operand = cast_operand(x, CastSpec(fmt), keep_codes=True, carrier=torch.float32)  # type: ignore[arg-type]
    assert operand.dequant_scale is None
    assert torch.equal(operand.carrier, quantize(x, CastSpec(fmt)).dequantize())  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_inputs_of_every_floating_dtype(dtype: torch.dtype) -> None:
    x = normal(50, 50).to(dtype)
    operand = cast_operand(x, CastSpec(E4M3FN), keep_codes=True, carrier=None)
    assert_same_bytes(operand.codes, quantize(x.float(), CastSpec(E4M3FN)).codes)


def test_strided_inputs_are_cast_in_logical_order() -> None:
    x = normal(40, 60)  # case 51
    for view in (x[:, ::2], x.t(), x[:1].expand(7, -1)):
        operand = cast_operand(view, CastSpec(E5M2), keep_codes=True, carrier=torch.float32)
        dense = cast_operand(view.contiguous(), CastSpec(E5M2), keep_codes=True, carrier=torch.float32)
        assert dense.codes is not None
        assert_same_bytes(operand.codes, dense.codes)
        assert torch.equal(operand.carrier, dense.carrier)  # type: ignore[arg-type]


def test_a_quantized_parameter_is_read_by_its_values() -> None:
    stored = torch.nn.Parameter(quantize(normal(32, 48), CastSpec(FP16, scale=TENSOR_POW2)))
    operand = cast_operand(stored, CastSpec(E4M3FN), keep_codes=True, carrier=None)
    assert_same_bytes(operand.codes, quantize(stored.dequantize().detach(), CastSpec(E4M3FN)).codes)
    assert operand.codes is not None and not operand.codes.requires_grad


@pytest.mark.parametrize("rule", [CURRENT, CURRENT_POW2, TENSOR_POW2])
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2])
def test_scaled_float16_is_cast_from_its_codes(fmt: object, rule: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of a cast of its values, which are not made: every code, under scales in the middle and at the ends."""
    spec = CastSpec(fmt, scale=rule)  # type: ignore[arg-type]
    codes = torch.arange(1 << 16).to(torch.uint16).view(torch.float16)
    finite = codes[codes.isfinite()].view(-1, 64)
    for part in (finite, finite / 1024, torch.zeros(40, 64).half(), codes.view(-1, 64)):
        for exponent in (-140, -91, -60, -1, 0, 7, 60, 89, 105):
            q = QuantizedTensor(part, torch.tensor(2.0).pow(exponent), CastSpec(FP16, scale=TENSOR_POW2))
            plain = cast_operand(q.dequantize(), spec, keep_codes=True, carrier=torch.bfloat16)
            with monkeypatch.context() as patched:
                if -90 <= exponent < 90:
                    patched.setattr(QuantizedTensor, "dequantize", None)
                found = cast_operand(q, spec, keep_codes=True, carrier=torch.bfloat16)
            for name in ("codes", "carrier", "amax", "dequant_scale"):
                a, b = getattr(found, name), getattr(plain, name)
                assert torch.equal(a.float().nan_to_num(nan=-1.0), b.float().nan_to_num(nan=-1.0)), (name, exponent)


def test_scaled_float16_is_decoded_where_its_scale_is_no_power_of_two() -> None:
    q = QuantizedTensor(normal(32, 48).half(), torch.tensor(0.3), CastSpec(FP16, scale=CURRENT))
    operand = cast_operand(q, CastSpec(E4M3FN), keep_codes=True, carrier=None)
    assert_same_bytes(operand.codes, quantize(q.dequantize(), CastSpec(E4M3FN)).codes)


def test_codes_already_in_the_format_are_used_as_they_are() -> None:
    q = quantize(normal(8, 8), CastSpec(E4M3FN))
    operand = cast_operand(q, CastSpec(E4M3FN), keep_codes=True, carrier=torch.bfloat16)
    assert operand.codes is q.codes and operand.dequant_scale is q.dequant_scale
    assert operand.carrier is not None and torch.equal(operand.carrier.float(), q.codes.float())
