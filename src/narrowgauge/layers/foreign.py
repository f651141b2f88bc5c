"""Linear layers of transformers, which need not be installed: known by the names of their classes and their parts.

Each is swapped for a class made for its own, which pickles and copies as that: parameters, their names and their shapes
stay what they were, so that checkpoints do.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.layers.linear import product
from narrowgauge.layers.recipe_layer import RecipeLayer, check_operands, output_dtype
from narrowgauge.ops.grouped import grouped_linear
from narrowgauge.ops.grouped_products import describe_products
from narrowgauge.ops.operands import DelayedSlots

_TRANSPOSED = {("transformers.pytorch_utils", "Conv1D")}
# what transformers' decorator `use_experts_implementation` leaves on a module
_EXPERTS = ("num_experts", "has_gate", "has_bias", "is_transposed", "_is_expert_parallel")


class Foreign(RecipeLayer):
    """A layer of another library that runs by a recipe; mixed in before the library's own class, see `class_for`."""

    plain: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty, (self.plain, _mixin_of(type(self))), self.__getstate__()


class TransposedLinear(Foreign):
    """y = x @ weight + bias by a recipe: weight [in_features, out_features], as in GPT-2's Conv1D.

    x: [..., in_features]. The products and their casts are those of a Linear whose weight is the transposed one.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.recipe is None:
            return super().forward(x)  # type: ignore[misc]
        weight = self.weight
        fits = weight.ndim == 2 and x.ndim > 0 and weight.shape[0] == x.shape[-1]
        check_operands(weight, x, f"{self.plain.__name__}{tuple(weight.shape)}", weight.shape[0], fits)
        return product(self, x, self._parameters.get("bias"), transposed=True)


class Experts(Foreign):
    """transformers' experts of a mixture: gate_up_proj, or up_proj, and down_proj, each one weight [experts, N, K].

    Both are grouped products by the recipe, cast as each expert's own layers. Delayed scaling has a state for each of
    the two and each expert, in this order: one without tokens leaves it as it was.
    """

    num_experts: int
    has_gate: bool
    has_bias: bool

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The first of the weights."""
        return self.get_parameter(weight_names(self)[0])

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (2, self.num_experts)

    def describe_products(self, device: torch.device) -> str:
        """How many experts, and how their products are called on `device`."""
        how = describe_products(self.training_casts, device, self.weight.shape[1:], self.has_bias)
        return f"{' and '.join(weight_names(self))} of {self.num_experts} experts, {how}"

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [tokens, K], the experts of each token and their weights [tokens, top_k] -> [tokens, K]."""
        if self.recipe is None:
            return super().forward(hidden_states, top_k_index, top_k_weights)  # type: ignore[misc]
        me: Any = self
        chosen = top_k_index.shape[-1]
        check_operands(
            self.weight,
            hidden_states,
            f"{self.plain.__name__}({self.num_experts} experts)",
            self.weight.shape[-1],
            hidden_states.ndim == 2 and hidden_states.shape[-1] == self.weight.shape[-1],
        )
        expert, order = torch.sort(top_k_index.reshape(-1), stable=True)
        counts = torch.bincount(expert, minlength=self.num_experts)
        record = self.training and torch.is_grad_enabled()
        self.keep_state((counts > 0).to(hidden_states.device) if record and self.delayed_rules else False)
        up = self._product(0, hidden_states[order // chosen], counts, record)
        inner = me._apply_gate(up) if self.has_gate else me.act_fn(up)
        down = self._product(1, inner, counts, record)
        if getattr(self, "has_post_expert_norm", False):
            down = me.post_expert_norm(down)
        weighted = down * top_k_weights.reshape(-1)[order].unsqueeze(-1)
        in_place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return weighted[in_place].view(*top_k_index.shape, -1).sum(dim=1).to(hidden_states.dtype)

    def _product(self, at: int, x: Tensor, counts: Tensor, record: bool) -> Tensor:
        name = weight_names(self)[at]
        products = grouped_linear
        if torch.compiler.is_compiling():
            from narrowgauge.ops import graph_breaks

            products = graph_breaks.grouped_linear
        slots = {
            role: DelayedSlots(*(None if view is None else view[at] for view in each))  # type: ignore[arg-type]
            for role, each in self.delayed_slots().items()
        }
        return products(
            x,
            counts,
            self.get_parameter(name),
            self.get_parameter(f"{name}_bias") if self.has_bias else None,
            self.casts,
            delayed=slots,
            record=record,
            training=self.training,
            out_dtype=output_dtype(x),
            counter=self.counter,
        )


def mixin_for(plain: type[Any], module: nn.Module | None = None) -> type[Foreign] | None:
    """What makes a class of another library run by a recipe; None where nothing here does.

    module: an instance, by whose parts experts are known.
    """
    if (plain.__module__, plain.__qualname__) in _TRANSPOSED:
        return TransposedLinear
    if module is not None and all(name in module.__dict__ for name in _EXPERTS) and _has_weights(module):
        return Experts
    return None


@cache
def class_for(plain: type[nn.Module], mixin: type[Foreign]) -> type[Foreign]:
    """The class of the layers of class `plain` that run by a recipe. Its name is that of `plain`."""
    return type(plain.__name__, (mixin, plain), {"plain": plain, "__module__": plain.__module__})


def why_not(module: nn.Module) -> str | None:
    """Why experts of transformers cannot be converted, or None."""
    if not all(name in module.__dict__ for name in _EXPERTS) or not _has_weights(module):
        return None
    name = type(module).__name__
    if module.is_transposed:
        return f"{name} keeps each expert's weights as [in, out]: only those of [out, in] are converted"
    if module._is_expert_parallel:
        return f"{name} holds a part of the experts (expert parallelism of transformers): it runs as it is"
    return None


def weight_names(module: nn.Module) -> tuple[str, ...]:
    """The parameters of a linear layer, or of experts, that are matrices."""
    if all(name in module.__dict__ for name in _EXPERTS):
        return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    return ("weight",)


def features_of(module: nn.Module) -> tuple[int, int]:
    """(in_features, out_features) of a linear layer; of experts the width of tokens, and of what is between."""
    if isinstance(getattr(module, "in_features", None), int):
        return module.in_features, module.out_features  # type: ignore[return-value]
    if len(weight_names(module)) == 2:
        _, width, inner = module.get_parameter("down_proj").shape
        return width, inner
    inputs, outputs = module.get_parameter("weight").shape
    return inputs, outputs


def _has_weights(module: nn.Module) -> bool:
    weights = [module._parameters.get(name) for name in weight_names(module)]
    return all(weight is not None and weight.ndim == 3 for weight in weights)


def _mixin_of(own: type[Any]) -> type[Foreign]:
    return next(base for base in own.__mro__ if base in (TransposedLinear, Experts))


def _empty(plain: type[nn.Module], mixin: type[Foreign]) -> Foreign:
    cls = class_for(plain, mixin)
    return cls.__new__(cls)
