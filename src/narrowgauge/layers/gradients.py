"""Gradients cast as soon as backward has made them."""

from __future__ import annotations

from torch import nn

from narrowgauge.recipes.spec import Recipe
from narrowgauge.tensors.quantized import quantize


def install(model: nn.Module, recipe: Recipe) -> None:
    if not recipe.grad.format.is_narrow:
        return

    def cast(p: nn.Parameter) -> None:
        p.grad = quantize(p.grad, recipe.grad)

    for p in model.parameters():
        if p.requires_grad and p.numel() >= recipe.min_state_size:
            p.register_post_accumulate_grad_hook(cast)
