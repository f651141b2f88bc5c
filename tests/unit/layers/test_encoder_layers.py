"""torch's encoder layers, whose fused inference path would bypass converted layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import narrowgauge as ng


def make_encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=2)


X = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(1))
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # the fused path of float32
@pytest.mark.parametrize("recipe", [*ng.recipe_names(), "half"])
@pytest.mark.parametrize("padding", [None, PADDING])
def test_inference_runs_the_converted_layers(recipe: str, padding: torch.Tensor | None) -> None:
    model = make_encoder().eval()
    exact = copy.deepcopy(model)(X, src_key_padding_mask=padding)
    # one quantized layer of two shares no inputs
    ng.prepare(model, None, ng.recipe("fp8_current", exclude=("*linear2",)) if recipe == "half" else recipe)
    with torch.no_grad():
        y = model(X, src_key_padding_mask=padding)
    trained = model(X, src_key_padding_mask=padding)  # gradients are on: never fused
    if padding is not None:  # what stands at padded positions means nothing
        y, trained, exact = y[~padding], trained[~padding], exact[~padding]
    off = ((y - exact).norm() / exact.norm()).item()
    # attention, which is not converted, is fused still, and rounds in other places: FP8 layers take that a code further
    allowed = {"fp32": 1e-5, "tf32": 1e-5, "bf16": 4e-3, "fp16": 4e-3, "fp16_pure": 4e-3}.get(recipe, 1e-2)
    # parameters in bfloat16 let it round to that, twice as far again
    allowed *= 4 if "fp4" in recipe or "fp6" in recipe or "narrow8" in recipe else 1
    assert ((y - trained).norm() / exact.norm()).item() < allowed
    narrow = {"fp32": (0, 1e-6), "half": (5e-3, 0.05), "mxfp8": (5e-3, 0.05), "mxfp6": (0.02, 0.08)}
    narrow |= {"mxfp4": (0.04, 0.16), "nvfp4": (0.02, 0.16)}
    lowest, highest = narrow.get(recipe, (5e-3, 0.05) if recipe.startswith(("fp8", "narrow8")) else (5e-5, 5e-3))
    assert lowest <= off < highest


def test_a_recipe_that_converts_nothing_gives_the_fused_path_back() -> None:
    model = make_encoder()
    ng.prepare(model, None, "bf16")
    assert not model.use_nested_tensor and all(layer._forward_pre_hooks for layer in model.layers)
    ng.prepare(model, None, "bf16")
    ng.prepare(model, None, "fp32")
    assert model.use_nested_tensor and not any(layer._forward_pre_hooks for layer in model.layers)
