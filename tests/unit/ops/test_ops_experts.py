"""The plain layer of many experts: the very numbers of as many linear layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.ops.experts import GroupedLinear

SPLITS = [[5, 0, 33, 2], [40, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 7]]


def twins(bias: bool, dtype: torch.dtype = torch.float32) -> tuple[GroupedLinear, list[nn.Linear]]:
    torch.manual_seed(0)
    grouped = GroupedLinear(4, 20, 12, bias=bias).to(dtype)
    layers = []
    for expert in range(4):
        layer = nn.Linear(20, 12, bias=bias, dtype=dtype)
        layer.weight.data.copy_(grouped.weight[expert])
        if bias:
            layer.bias.data.copy_(grouped.bias[expert])
        layers.append(layer)
    return grouped, layers


def gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("counts", SPLITS)
def test_equals_separate_linear_layers_in_every_bit(counts, bias, dtype):  # cases 96, 98
    grouped, layers = twins(bias, dtype)
    x = torch.randn(sum(counts), 20, dtype=dtype, requires_grad=True)
    y = grouped(x, torch.tensor(counts))
    separate = x.detach().clone().requires_grad_()
    expected = torch.cat([layer(part) for layer, part in zip(layers, separate.split(counts), strict=True)])
    assert y.shape == (sum(counts), 12) and torch.equal(y, expected)
    grad = torch.randn_like(y)
    y.backward(grad)
    expected.backward(grad)
    assert torch.equal(x.grad, separate.grad)
    for expert, layer in enumerate(layers):
        assert torch.equal(gradient(grouped.weight)[expert], gradient(layer.weight))
        assert bool(gradient(grouped.weight)[expert].any()) == (counts[expert] > 0)
        if bias:
            assert torch.equal(gradient(grouped.bias)[expert], gradient(layer.bias))


def test_autocast_reaches_the_products():
    grouped, _ = twins(bias=True)
    x = torch.randn(6, 20)
    with torch.autocast("cpu", torch.bfloat16):
        y = grouped(x, torch.tensor([6, 0, 0, 0]))
    assert y.dtype is torch.bfloat16
    narrow = nn.functional.linear(x.bfloat16(), grouped.weight[0].bfloat16(), grouped.bias[0].bfloat16())
    assert torch.equal(y, narrow)


def test_starts_like_linear_layers():
    torch.manual_seed(0)
    grouped = GroupedLinear(3, 64, 128, bias=True)
    for parameter in (grouped.weight, grouped.bias):
        assert 0.12 < float(parameter.detach().abs().max()) <= 0.125  # 1 / sqrt(64)
        assert float(parameter.detach().std()) == pytest.approx(0.125 / 3**0.5, rel=0.1)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (torch.tensor([2, 2, 2, 2]), r"\[2, 2, 2, 2\] add up to 8 tokens, and 6 are given"),
        (torch.tensor([7, -1, 0, 0]), r"add up to 6 tokens.*none below 0"),
        (torch.tensor([6, 0]), r"each of 4 experts, found torch.int64 \[2\].*bincount\(expert, minlength=4\)"),
        (torch.tensor([6.0, 0, 0, 0]), r"found torch.float32 \[4\]"),
    ],
)
def test_counts_that_do_not_fit_are_refused(counts, message):
    with pytest.raises(NarrowgaugeError, match=message):
        twins(bias=False)[0](torch.randn(6, 20), counts)


def test_compiles_into_one_graph_for_all_counts():
    grouped, _ = twins(bias=True)
    with torch._dynamo.config.patch(capture_scalar_outputs=True, error_on_recompile=True):
        compiled = torch.compile(grouped, fullgraph=True, backend="aot_eager", dynamic=True)
        for counts in (SPLITS[0], SPLITS[1], SPLITS[3]):
            x = torch.randn(sum(counts), 20)
            split = torch.tensor(counts)
            assert torch.equal(compiled(x, split), grouped(x, split))
