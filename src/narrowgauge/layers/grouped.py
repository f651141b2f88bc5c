"""The converted layer of many experts: a GroupedLinear whose GEMMs run by a recipe."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.layers.recipe_layer import RecipeLayer, check_operands, output_dtype
from narrowgauge.ops import experts
from narrowgauge.ops.grouped import grouped_linear
from narrowgauge.ops.grouped_products import describe_products


class GroupedLinear(RecipeLayer, experts.GroupedLinear):
    """y_t = W_e x_t + b_e for every token t of expert e, with each expert's operands cast by a recipe as one layer's.

    Made from a plain GroupedLinear by `convert`, which swaps the class in place: parameters, hooks and ties stay the
    very same objects. Returns autocast's dtype inside an autocast region, else x's dtype. Delayed scaling has a state
    for each expert, which one without tokens leaves as it was.
    """

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.experts,)

    def describe_products(self, device: torch.device) -> str:
        """How many experts, and how their products are called on `device`."""
        weight, has_bias = (self.out_features, self.in_features), self.bias is not None
        return f"{self.experts} experts, {describe_products(self.training_casts, device, weight, has_bias)}"

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [tokens, in_features] in the order of the experts, counts int64 [experts] -> [tokens, out_features].

        counts is read by the host, and torch.compile breaks its graph here. Raises NarrowgaugeError where it does not
        fit the tokens, ConversionError where x does not fit the layer.
        """
        if self.recipe is None:
            return super().forward(x, counts)
        weight, shape = self.weight, (self.experts, self.out_features, self.in_features)
        fits = weight.shape == shape and x.ndim == 2 and x.shape[-1] == self.in_features
        check_operands(weight, x, f"GroupedLinear({experts.GroupedLinear.extra_repr(self)})", self.in_features, fits)
        record = self.training and torch.is_grad_enabled()
        self.keep_state((counts > 0).to(x.device) if record and self.delayed_rules else False)
        products = grouped_linear
        if torch.compiler.is_compiling():
            from narrowgauge.ops import graph_breaks

            products = graph_breaks.grouped_linear
        return products(
            x,
            counts,
            weight,
            self.bias,
            self.casts,
            delayed=self.delayed_slots(),
            record=record,
            training=self.training,
            out_dtype=output_dtype(x),
            counter=self.counter,
        )
