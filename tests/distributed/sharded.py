"""Models that the tests of sharding share, and how they are prepared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import narrowgauge as ng
from narrowgauge.tensors.quantized import QuantizedTensor


def prepared(model: nn.Module, recipe: Any = "narrow8") -> tuple[Any, Any]:
    """The model, whole or sharded, and an AdamW, by the recipe."""
    return ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe)


def mlp(width: int = 64) -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, width))


class Stack(nn.Module):
    """Two layers in a list, whose weights are large and whose biases are small. The same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


def values_of(x: Tensor) -> Tensor:
    """A copy of the values of a tensor, quantized or not."""
    return x.dequantize(torch.float32) if isinstance(x, QuantizedTensor) else x.clone()
