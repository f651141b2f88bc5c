"""How many bytes a linear layer keeps for backward."""

from __future__ import annotations

import pytest
import torch
from saved_bytes import saved_bytes
from torch import Tensor
from torch.nn import functional as F

from narrowgauge.numerics.formats import BF16, E4M3FN, E5M2, TF32
from narrowgauge.ops.linear import LinearCasts, linear
from narrowgauge.recipes.spec import CastSpec

FP8 = LinearCasts(CastSpec(E4M3FN), CastSpec(E4M3FN), CastSpec(E5M2), BF16)
WIDE = LinearCasts(CastSpec(BF16), CastSpec(BF16), CastSpec(BF16), BF16)
TOKENS, WIDTH, HIDDEN = 256, 64, 96


def weights() -> tuple[Tensor, Tensor]:
    return torch.randn(HIDDEN, WIDTH, requires_grad=True), torch.randn(WIDTH, HIDDEN, requires_grad=True)


def two_layers(casts: LinearCasts, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    hidden = linear(x, up, None, casts, out_dtype=torch.bfloat16)
    return linear(hidden, down, None, casts, out_dtype=torch.bfloat16)


def test_the_input_is_saved_as_one_byte_a_value():
    up, down = weights()
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)

    def count(function) -> int:
        return saved_bytes(function, (up, down), (up.shape, down.shape))

    def under_autocast() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.linear(F.linear(x, up), down)

    ours = count(lambda: two_layers(FP8, x, up, down))
    fp32 = count(lambda: F.linear(F.linear(x, up), down))
    autocast = count(under_autocast) - 2 * (up.numel() + down.numel())  # less the bf16 copies of the weights
    assert fp32 == 4 * TOKENS * (WIDTH + HIDDEN)
    assert autocast == 2 * TOKENS * (WIDTH + HIDDEN)
    scales = 4 * 4  # two of the inputs, two of the weights
    assert ours == TOKENS * (WIDTH + HIDDEN) + scales
    assert ours <= 0.30 * fp32
    assert ours <= 0.55 * autocast


@pytest.mark.parametrize(
    ("casts", "bytes_per_value"),
    [
        (WIDE, 2),
        (LinearCasts(CastSpec(TF32), CastSpec(TF32), CastSpec(TF32), TF32), 4),
        (LinearCasts(FP8.input, FP8.weight, FP8.grad_output, BF16, in_compute=(False, False, True)), 2),
        (LinearCasts(FP8.input, FP8.weight, FP8.grad_output, BF16, in_compute=(True, True, False)), 1),
        (LinearCasts(WIDE.input, WIDE.weight, WIDE.grad_output, BF16, activation=CastSpec(E4M3FN)), 1),
    ],
    ids=["bf16", "tf32", "grad_weight in bf16", "the others in bf16", "E4M3 activation"],
)
def test_what_grad_weight_multiplies_decides_what_is_saved(casts, bytes_per_value):
    weight = torch.randn(HIDDEN, WIDTH, requires_grad=True)
    x = torch.randn(TOKENS, WIDTH)
    saved = saved_bytes(lambda: linear(x, weight, None, casts, out_dtype=torch.bfloat16), (weight,), (weight.shape,))
    assert bytes_per_value * TOKENS * WIDTH <= saved <= bytes_per_value * TOKENS * WIDTH + 8


def test_an_input_already_in_the_compute_dtype_is_not_copied():
    weight = torch.randn(HIDDEN, WIDTH, requires_grad=True)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16)
    assert saved_bytes(lambda: linear(x, weight, None, WIDE, out_dtype=torch.bfloat16), (weight, x)) == 0


def test_nothing_is_saved_where_no_gradient_can_flow():
    weight, x = torch.randn(HIDDEN, WIDTH, requires_grad=True), torch.randn(TOKENS, WIDTH)
    with torch.no_grad():
        assert saved_bytes(lambda: linear(x, weight, None, FP8, out_dtype=torch.bfloat16)) == 0
    frozen = weight.detach()
    assert saved_bytes(lambda: linear(x, frozen, None, FP8, out_dtype=torch.bfloat16)) == 0
