"""The converted linear layer: an nn.Linear whose three GEMMs run by a recipe."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowgauge.layers import sharing
from narrowgauge.layers.parted import Parted
from narrowgauge.layers.recipe_layer import RecipeLayer, check_operands, output_dtype
from narrowgauge.ops.linear import linear
from narrowgauge.ops.parted import WHOLE, Parting
from narrowgauge.ops.reduce import SINGLE_PROCESS, Reducer
from narrowgauge.tensors.local import local


class Linear(RecipeLayer, nn.Linear):
    """y = x @ weight.T + bias, with operands cast by a recipe in forward and backward.

    Made from an nn.Linear by `convert`, which swaps the class in place: parameters, hooks and ties stay the very same
    objects. x: [..., in_features] of a floating dtype. Returns [..., out_features] in autocast's dtype inside
    an autocast region, else in x's dtype. A layer that `convert` has not configured is an nn.Linear.

    parted: runs the layer where its features are parted over processes; None: this process has all.
    """

    parted: Parted | None = None

    @property
    def amax_reducer(self) -> Reducer:
        """Over processes that hold parts of the layer, where it rolls by itself."""
        return SINGLE_PROCESS if self.parted is None else self.parted.reducer

    @property
    def shares_input(self) -> bool:
        """True where siblings that read the same tensor can use what this layer makes of it."""
        return self.quantized or self.parted is not None

    def forward(self, x: Tensor) -> Tensor:
        if self.parted is not None:
            return self.parted.run(self, x)
        if self.recipe is None:
            return F.linear(x, self.weight, self.bias)
        return self.product(x, self.bias)

    def product(self, x: Tensor, bias: Tensor | None, parting: Parting = WHOLE) -> Tensor:
        """The forward by the recipe, with this bias; parting: what of the operands this process has."""
        _check(self, x)
        return product(self, x, bias, parting)

    def reset_parameters(self) -> None:
        """Initialise weight and bias anew, and forget the scaling history of the old ones."""
        if self.parted is None:
            super().reset_parameters()
        else:
            self.parted.reset(self)
            self.reset_delayed()


def product(
    layer: RecipeLayer, x: Tensor, bias: Tensor | None, parting: Parting = WHOLE, transposed: bool = False
) -> Tensor:
    """`x` times the weight of a layer by its recipe, with its scaling state and its counts.

    parting: what of the operands this process has. transposed: whether the weight is [in_features, out_features].
    """
    # an empty batch says nothing about any magnitude
    record = layer.training and torch.is_grad_enabled() and x.numel() > 0
    layer.keep_state(record)
    return linear(
        x,
        layer.weight,
        bias,
        layer.casts,
        delayed=layer.delayed_slots(),
        record=record,
        training=layer.training,
        out_dtype=output_dtype(x),
        counter=layer.counter,
        shared=sharing.current() if layer.quantized else None,
        parting=parting,
        transposed=transposed,
    )


def _check(layer: Linear, x: Tensor) -> None:
    weight = layer.weight if layer.parted is None else local(layer.weight)
    where = f"Linear(in_features={layer.in_features}, out_features={layer.out_features})"
    fits = weight.ndim == 2 and x.ndim > 0 and weight.shape[1] == x.shape[-1]
    fits = fits and (weight.shape[0] == 0) == (layer.out_features == 0)
    check_operands(weight, x, where, layer.in_features, fits)
