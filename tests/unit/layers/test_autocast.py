"""Autocast by recipe."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import narrowgauge as ng


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16), ("fp8_current", torch.bfloat16)]
    + [("fp16", torch.float16), ("fp16_pure", torch.float16)],
)
def test_unconverted_products_run_in_the_compute_dtype(recipe: str, dtype: torch.dtype) -> None:
    a = torch.randn(8, 8)
    with ng.autocast(recipe):
        assert (a @ a).dtype is dtype
        assert F.linear(a, a).dtype is dtype
        assert F.scaled_dot_product_attention(a[None, None], a[None, None], a[None, None]).dtype is dtype
        assert (a + a).dtype is torch.float32
    assert (a @ a).dtype is torch.float32


def test_it_is_a_decorator_and_enters_again() -> None:
    for recipe in ("bf16", "fp16"):
        dtype = ng.recipe(recipe).compute_dtype

        @ng.autocast(recipe)
        def product(a: torch.Tensor) -> torch.Tensor:
            with ng.autocast("fp32"):
                assert (a @ a).dtype is torch.float32
            return a @ a

        assert product(torch.ones(4, 4)).dtype is product(torch.ones(4, 4)).dtype is dtype


def test_float32_turns_an_outer_region_off() -> None:
    a = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16), ng.autocast("fp32"):
        assert (a @ a).dtype is torch.float32


@pytest.mark.parametrize(
    "product",
    [
        lambda a, b: a @ b,
        lambda a, b: torch.bmm(a[None], b[None])[0],
        lambda a, b: F.linear(a, b.T, torch.zeros(16)),
        lambda a, b: torch.addmm(torch.zeros(16), a, b),
        lambda a, b: torch.einsum("ij,jk->ik", a, b),
        lambda a, b: a.matmul(b),
        lambda a, b: F.conv1d(a.T[None], b.T[:, :, None])[0].T,
    ],
)
def test_emulated_float16_rounds_operands_and_results_as_float16_does(product) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(16, 16), torch.randn(16, 16)
    exact = a.half().double() @ b.half().double()
    with ng.autocast("fp16"):
        y = product(a, b)
    assert y.dtype is torch.float16
    # float32 accumulation, then one rounding: half an ulp of float16 and a little
    ulp = 2.0 ** (exact.abs().clamp(min=2**-14).log2().floor() - 10)
    assert ((y.double() - exact).abs() <= 0.51 * ulp + 2**-20).all()


def test_emulated_float16_overflows_as_ieee_754_does() -> None:
    a = torch.full((2, 2), 300.0, requires_grad=True)
    with ng.autocast("fp16"):
        assert (a @ a).isinf().all()  # 2 * 300^2 = 180000 > 65504
        attention = F.scaled_dot_product_attention(*[torch.full((1, 1, 2, 4), 7e4)] * 3)
    assert not attention.isfinite().any()


def test_nested_regions_of_other_dtypes_are_not_emulated() -> None:
    a = torch.randn(4, 4)
    with ng.autocast("fp16"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (a @ a).dtype is torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert (a @ a).dtype is torch.float32


def test_attention_layers_of_torch_run_in_every_region() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, dropout=0.0)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
    for recipe in ("bf16", "fp16", "fp8_current"):
        ng.prepare(layer, optimizer, recipe)
        x = torch.randn(2, 5, 32)
        for training in (True, False):
            layer.train(training)
            y = layer(x)
            assert y.isfinite().all()
        y.float().sum().backward()
        assert ng.report(layer)["self_attn.out_proj"].status == "skipped"


def test_an_unknown_recipe_is_refused() -> None:
    with pytest.raises(ng.RecipeError, match="did you mean 'bf16'"):
        ng.autocast("bf17")
