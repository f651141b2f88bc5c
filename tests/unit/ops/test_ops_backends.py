"""Which backend multiplies two formats on a device, and that it says why."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.errors import RecipeError
from narrowgauge.numerics import rounding
from narrowgauge.numerics.formats import BF16, E2M1FN, E3M2FN, E4M3FN, E5M2, FP16, FP32, TF32, Format
from narrowgauge.ops import backends
from narrowgauge.ops.backends import EMULATED, NATIVE, SCALED_MM, backend_of
from narrowgauge.ops.casts import LinearCasts
from narrowgauge.recipes.spec import CastSpec, Emulation, Recipe

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def set_capability(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))


@pytest.mark.parametrize(
    ("feature", "emulation", "carrier"),
    [
        ("avx512_bf16", Emulation.FAST, torch.bfloat16),
        (None, Emulation.FAST, torch.float32),
        ("avx512_bf16", Emulation.EXACT, torch.float32),
    ],
)
def test_fp8_on_a_cpu_is_emulated_in_bf16_where_that_is_fast(monkeypatch, feature, emulation, carrier):
    monkeypatch.setattr(backends, "FAST_BF16", feature)
    backend = backend_of(E4M3FN, E5M2, CPU, emulation)
    assert (backend.name, backend.native, backend.carrier) == (EMULATED, False, carrier)
    assert "E4M3FN by E5M2" in backend.reason
    assert ("bf16 (avx512_bf16)" if carrier is torch.bfloat16 else "float32") in backend.reason


def test_bf16_is_native_only_with_a_cpu_feature_for_it(monkeypatch):
    monkeypatch.setattr(backends, "FAST_BF16", "amx_bf16")
    assert backend_of(BF16, BF16, CPU).name == NATIVE
    monkeypatch.setattr(backends, "FAST_BF16", None)
    backend = backend_of(BF16, BF16, CPU)
    assert (backend.native, backend.carrier, backend.result) == (False, torch.float32, torch.bfloat16)


@pytest.mark.parametrize(("fmt", "result"), [(FP16, torch.float16), (TF32, torch.float32)])
def test_fp16_and_tf32_products_are_emulated_on_a_cpu_and_say_so(fmt, result):
    backend = backend_of(fmt, fmt, CPU)
    assert (backend.native, backend.carrier, backend.result) == (False, torch.float32, result)
    assert "rounded operands, float32 products" in backend.reason


def test_float32_is_native_everywhere():
    assert backend_of(FP32, FP32, CPU).native
    assert backend_of(FP32, FP32, CUDA).native


def test_fp8_on_cuda_needs_compute_capability_8_9(monkeypatch):
    set_capability(monkeypatch, 9, 0)
    backend = backend_of(E5M2, E4M3FN, CUDA)
    assert (backend.name, backend.native) == (SCALED_MM, True)
    assert "9.0" in backend.reason
    for major, minor, carrier in ((8, 6, torch.bfloat16), (7, 5, torch.float32)):
        set_capability(monkeypatch, major, minor)
        backend = backend_of(E4M3FN, E4M3FN, CUDA)
        assert (backend.name, backend.native, backend.carrier) == (EMULATED, False, carrier)
        assert f"{major}.{minor} has no FP8 products" in backend.reason


def test_e5m2_by_e5m2_is_emulated_on_cuda(monkeypatch):
    set_capability(monkeypatch, 9, 0)
    backend = backend_of(E5M2, E5M2, CUDA)
    assert not backend.native
    assert "no E5M2 by E5M2" in backend.reason


def test_a_capability_that_is_assumed_is_called_assumed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "assumed" in backend_of(E4M3FN, E4M3FN, CUDA).reason


def test_bf16_on_cuda_below_8_0_is_emulated(monkeypatch):
    set_capability(monkeypatch, 7, 0)
    assert backend_of(FP16, FP16, CUDA).native
    backend = backend_of(BF16, BF16, CUDA)
    assert (backend.native, backend.carrier) == (False, torch.float32)


def test_tf32_on_cuda_says_how_to_reach_the_tensor_cores(monkeypatch):
    set_capability(monkeypatch, 8, 0)
    backend = backend_of(TF32, TF32, CUDA)
    assert not backend.native
    assert "fp32_precision = 'tf32'" in backend.reason


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, E3M2FN, E2M1FN])
@pytest.mark.parametrize("feature", ["avx512_bf16", None])
def test_a_carrier_holds_every_value_of_its_formats(monkeypatch, fmt: Format, feature):
    monkeypatch.setattr(backends, "FAST_BF16", feature)
    carrier = backend_of(fmt, fmt, CPU).carrier
    assert carrier is not None
    codes = torch.arange(1 << fmt.bits, dtype=torch.uint8).view(fmt.dtype)
    values = rounding.decode(codes, fmt)
    torch.testing.assert_close(values.to(carrier).float(), values, rtol=0, atol=0, equal_nan=True)


def test_a_product_with_one_wide_operand_is_carried_where_both_fit():
    assert backend_of(E4M3FN, FP32, CPU).carrier is torch.float32
    assert backend_of(E4M3FN, FP16, CPU).carrier is torch.float32
    assert not backend_of(E4M3FN, BF16, CPU).native


def test_casts_name_the_gemms_whose_backends_differ():
    casts = LinearCasts(CastSpec(E4M3FN), CastSpec(E4M3FN), CastSpec(E5M2), FP32, in_compute=(False, True, False))
    described = casts.describe("cpu")
    assert not described.native
    assert "grad_input: float32 product" in described.reason
    assert "output: this CPU multiplies no E4M3FN" in described.reason
    kept = LinearCasts.of(Recipe(name="r", compute=FP32), quantized=False)
    assert kept.describe("cpu").reason == "float32 product"


def test_casts_follow_from_a_recipe():
    recipe = Recipe(
        name="r",
        input=CastSpec(E4M3FN),
        weight=CastSpec(E4M3FN),
        grad_output=CastSpec(E5M2),
        compute=BF16,
        override_linear_precision=(False, False, True),
        emulation="exact",
    )
    casts = LinearCasts.of(recipe, quantized=True)
    assert (casts.input, casts.weight, casts.grad_output) == (recipe.input, recipe.weight, recipe.grad_output)
    assert casts.in_compute == (False, False, True)
    assert casts.emulation is Emulation.EXACT
    kept = LinearCasts.of(recipe, quantized=False)
    assert kept.input == kept.weight == kept.grad_output == CastSpec(BF16)
    assert kept.in_compute == (False, False, False)


def test_float32_products_that_remain_take_tf32_operands_where_asked():
    recipe = Recipe(name="r", compute=FP32, tf32=True)
    assert LinearCasts.of(recipe, quantized=True).input == CastSpec(TF32)
    assert LinearCasts.of(recipe.replace(compute=BF16), quantized=True).input == CastSpec(BF16)


def test_an_undecided_compute_dtype_is_an_error():
    with pytest.raises(RecipeError, match="resolve"):
        LinearCasts.of(Recipe(name="r"), quantized=True)
