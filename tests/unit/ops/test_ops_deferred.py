"""Weight gradients that are taken after the backward pass: the same bits, through the same hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.ops.deferred import WeightGradients, putting_off


def _model(recipe: str, **fields: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 128, bias=False), nn.GELU(), nn.Linear(128, 64))
    ng.prepare(model, None, ng.recipe(recipe).replace(**fields))
    return model


def _gradients(model: nn.Module, later: WeightGradients | None) -> dict[str, torch.Tensor]:
    ids = torch.arange(48) % 32
    with ng.accumulate(model):
        for _ in range(2):
            if later is None:
                model(ids).float().square().mean().backward()
                continue
            with putting_off(later):
                loss = model(ids).float().square().mean()
            loss.backward()
            later.take()()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("recipe", "fields"),
    [("bf16", {}), ("fp8_current", {}), ("narrow8", {}), ("fp8_current", {"smooth": ("3",)}), ("mxfp8", {})],
)
def test_put_off_gradients_are_the_same_bits(recipe: str, fields: dict[str, Any]) -> None:
    expected = _gradients(_model(recipe, **fields), None)
    found = _gradients(_model(recipe, **fields), WeightGradients())
    assert expected.keys() == found.keys() and len(expected) == 4
    for name, grad in expected.items():
        assert type(grad) is type(found[name]) and grad.dtype is found[name].dtype
        values = [x.dequantize() if isinstance(x, ng.QuantizedTensor) else x for x in (grad, found[name])]
        assert torch.equal(*values), name


def test_backward_leaves_out_what_is_put_off_and_hooks_run_when_it_is_taken() -> None:
    model = _model("bf16")
    weights, ran = [model[1].weight, model[3].weight], []
    for weight in weights:
        weight.register_hook(lambda grad: ran.append("before"))
        weight.register_post_accumulate_grad_hook(lambda p: ran.append("after"))
    later = WeightGradients()
    with putting_off(later):
        loss = model(torch.arange(16)).float().square().mean()
    loss.backward()
    assert all(weight.grad is None for weight in weights) and not ran
    assert model[0].weight.grad is not None and model[3].bias.grad is not None
    take = later.take()
    take()
    assert ran == ["before", "after"] * 2 and all(weight.grad is not None for weight in weights)
    first = weights[0].grad.clone()
    take()  # once
    later.take()()
    assert torch.equal(weights[0].grad, first)


def test_a_layer_whose_input_needs_no_gradient_keeps_its_own() -> None:
    layer = nn.Sequential(nn.Linear(64, 64))
    ng.prepare(layer, None, "bf16")
    later = WeightGradients()
    with putting_off(later):
        loss = layer(torch.randn(4, 64)).float().sum()
    loss.backward()
    assert layer[0].weight.grad is not None
