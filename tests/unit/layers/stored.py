"""A model with a tied table, a norm and a frozen layer, and steps of its training."""

from __future__ import annotations

import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.tensors.quantized import QuantizedTensor

IDS = torch.arange(32).reshape(2, 16)
LM = ["fp8_lm_o1", "fp8_lm_o2", "fp8_lm_o3"]
IN_BF16 = ["narrow8", "narrow8_sr", "bf16_pure"]
NEW = [*LM, *IN_BF16]


class Tied(nn.Module):
    """An embedding, a block with norm and bias, a frozen layer, and a head that is the embedding."""

    def __init__(self, vocabulary: int = 48, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=3)
        self.block = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(self.frozen(self.block(self.embedding(ids)))))


TRAINABLE = ["embedding.weight", "block.weight", "block.bias", "norm.weight", "norm.bias"]


def loss_of(model: nn.Module) -> torch.Tensor:
    return nn.functional.cross_entropy(model(IDS).float().flatten(0, 1), IDS.flatten())


def prepared(recipe: str | ng.Recipe, lr: float = 0.01) -> tuple[Tied, torch.optim.Optimizer]:
    model = Tied()
    return ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=lr), recipe)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = loss_of(model)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def quantized_names(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if isinstance(p, QuantizedTensor)]
