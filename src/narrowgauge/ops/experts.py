"""The linear layers of many experts as one module: one weight, tokens grouped by expert. Plain torch, no recipe."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowgauge.errors import NarrowgaugeError


class GroupedLinear(nn.Module):
    """y_t = W_e x_t + b_e for every token t of expert e: as many linear layers of one shape as there are experts.

    weight: [experts, out_features, in_features]; bias: [experts, out_features] or None. Both start as the weights and
    biases of torch.nn.Linear do. An expert without tokens gets gradients of zeros, not none.
    """

    def __init__(self, experts: int, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.experts, self.in_features, self.out_features = experts, in_features, out_features
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(experts, out_features)) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw weight and bias anew, uniformly within 1 / sqrt(in_features)."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        for parameter in self.parameters(recurse=False):
            parameter.uniform_(-bound, bound)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [tokens, in_features] in the order of the experts, counts int64 [experts] -> [tokens, out_features].

        counts: how many of the tokens each expert takes. It is read by the host, so that where it is on another device
        than the CPU, every call waits for that device. torch.compile breaks its graph here, unless
        torch._dynamo.config.capture_scalar_outputs is set. Raises NarrowgaugeError where counts do not fit the tokens.
        """
        if torch.compiler.is_compiling():
            from narrowgauge.ops import graph_breaks

            if not graph_breaks.takes_sizes_from_values():
                return graph_breaks.of_all_experts(x, counts, self.weight, self.bias)
        return of_all_experts(x, counts, self.weight, self.bias)

    def extra_repr(self) -> str:
        shape = f"experts={self.experts}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{shape}, bias={self.bias is not None}"


def of_all_experts(x: Tensor, counts: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Each expert's rows of `x` times its weight; arguments as in GroupedLinear."""
    experts = weight.shape[0]
    biases = [None] * experts if bias is None else bias.unbind()
    parts = zip(x.split(group_sizes(counts, experts, x.shape[0])), weight.unbind(), biases, strict=True)
    return torch.cat([F.linear(part, own, own_bias) for part, own, own_bias in parts])


def group_sizes(counts: Tensor, experts: int, tokens: int) -> list[int]:
    """`counts` on the host. Raises NarrowgaugeError unless there is one for each expert, and `tokens` in all."""
    if counts.shape != (experts,) or counts.dtype.is_floating_point or counts.dtype is torch.bool:
        raise NarrowgaugeError(
            f"counts: expected a whole number of tokens for each of {experts} experts, found {counts.dtype} "
            f"{list(counts.shape)}: count with torch.bincount(expert, minlength={experts})"
        )
    sizes: list[int] = counts.tolist()
    if torch.compiler.is_compiling():
        return sizes
    if min(sizes, default=0) < 0 or sum(sizes) != tokens:
        raise NarrowgaugeError(
            f"counts {sizes} add up to {sum(sizes)} tokens, and {tokens} are given: expected the number of tokens of "
            "each expert, none below 0"
        )
    return sizes
