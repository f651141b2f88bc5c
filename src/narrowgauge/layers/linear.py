"""The converted linear layer: an nn.Linear whose three GEMMs run by a recipe."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowgauge.layers import sharing
from narrowgauge.layers.recipe_layer import RecipeLayer, check_operands, output_dtype
from narrowgauge.ops.linear import linear


class Linear(RecipeLayer, nn.Linear):
    """y = x @ weight.T + bias, with operands cast by a recipe in forward and backward.

    Made from an nn.Linear by `convert`, which swaps the class in place: parameters, hooks and ties stay the very same
    objects. x: [..., in_features] of a floating dtype. Returns [..., out_features] in autocast's dtype inside
    an autocast region, else in x's dtype. A layer that `convert` has not configured is an nn.Linear.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.recipe is None:
            return F.linear(x, self.weight, self.bias)
        _check(self, x)
        # an empty batch says nothing about any magnitude
        record = self.training and torch.is_grad_enabled() and x.numel() > 0
        self.keep_state(record)
        return linear(
            x,
            self.weight,
            self.bias,
            self.casts,
            delayed=self.delayed_slots(),
            record=record,
            training=self.training,
            out_dtype=output_dtype(x),
            counter=self.counter,
            shared=sharing.current() if self.quantized else None,
        )


def _check(layer: Linear, x: Tensor) -> None:
    weight = layer.weight
    where = f"Linear(in_features={layer.in_features}, out_features={layer.out_features})"
    fits = weight.ndim == 2 and x.ndim > 0 and weight.shape[1] == x.shape[-1]
    fits = fits and (weight.shape[0] == 0) == (layer.out_features == 0)
    check_operands(weight, x, where, layer.in_features, fits)
