"""Products have no scale of their own: what is made of a result is a cast of it, which keeps what its format holds."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

import narrowgauge as ng
from narrowgauge.numerics import kernels
from narrowgauge.numerics.formats import BF16, E4M3FN, FP32
from narrowgauge.numerics.granularity import PER_ROW, PER_TENSOR, Block
from narrowgauge.numerics.scaling import CURRENT, CURRENT_POW2, E8M0_UP, TENSOR_POW2
from narrowgauge.ops import experts, grouped, matmul
from narrowgauge.ops import linear as linear_module
from narrowgauge.ops.cuda import product
from narrowgauge.ops.linear import LinearCasts, linear
from narrowgauge.recipes.spec import CastSpec, Emulation

SPECS = [
    CastSpec(E4M3FN, PER_TENSOR, CURRENT_POW2),
    CastSpec(E4M3FN, PER_TENSOR, TENSOR_POW2),
    CastSpec(E4M3FN, PER_ROW, CURRENT_POW2),
    CastSpec(E4M3FN, Block(1, 16), E8M0_UP),
    CastSpec(E4M3FN, Block(16, 16), CURRENT_POW2),
]


def whole_numbers() -> tuple[Tensor, Tensor, Tensor]:
    """a, b [16, 16] of -1, 0, 1, and a @ b.T, all of which E4M3 holds, and their halves."""
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-1, 2, (16, 16), generator=draw).float() for _ in range(2))
    product = a @ b.t()
    assert product.abs().max() <= 16 and product.unique().numel() > 5
    return a, b, product


# case 7
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("emulation", list(Emulation))
def test_a_product_that_is_quantized_stands_for_the_product(spec, emulation):
    a, b, exact = whole_numbers()
    casts = LinearCasts(spec, spec, spec, FP32, emulation=emulation)
    found = linear(a, b, None, casts, out_dtype=torch.float32)
    assert torch.equal(found, exact)
    assert torch.equal(linear(a, b, None, casts, out_dtype=torch.bfloat16).float(), exact)
    whole, half = ng.quantize(found, spec), ng.quantize(0.5 * found, spec)
    assert torch.equal(whole.dequantize(), exact) and torch.equal(half.dequantize(), 0.5 * exact)
    # the scale takes the factor, so the codes are the same; where it cannot, it is the codes that differ
    assert torch.equal(whole.codes.view(torch.uint8), half.codes.view(torch.uint8))
    assert torch.equal(whole.dequant_scale.float(), 2 * half.dequant_scale.float())


# case 7
def test_with_one_scale_given_the_codes_take_the_factor():
    _, _, exact = whole_numbers()
    quant_scale = torch.tensor(8.0)
    whole, half = (
        kernels.quantize(values, quant_scale, E4M3FN).codes.view(torch.uint8) for values in (exact, 0.5 * exact)
    )
    assert not torch.equal(whole, half)
    for codes, values in ((whole, exact), (half, 0.5 * exact)):
        assert torch.equal(codes.view(torch.float8_e4m3fn).float() / 8, values)


# case 7
@pytest.mark.parametrize("module", [linear_module, grouped, matmul, experts, product], ids=lambda m: m.__name__)
def test_no_product_takes_a_scale_for_its_result(module):
    words = ("out_scale", "result_scale", "scale_result", "output_scale", "y_scale")
    for name, function in inspect.getmembers(module, inspect.isfunction):
        assert not set(words) & set(inspect.signature(function).parameters), name


def test_a_free_scale_rounds_by_no_more_than_the_format():
    _, _, exact = whole_numbers()
    q = ng.quantize(exact, CastSpec(E4M3FN, scale=CURRENT))
    assert ((q.dequantize() - exact).abs() <= exact.abs() / 16).all()
    assert ng.quantize(exact, CastSpec(BF16)).dequantize().equal(exact)
