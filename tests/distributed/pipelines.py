"""A tiny GPT in one process and as a pipeline, side by side."""

from __future__ import annotations

import functools
from typing import Any

import ranks
import torch
import torch.distributed as dist
from models import batch, tiny_gpt
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.distributed import Pipeline, layout, split_pipeline
from narrowgauge.models.gpt import GPT

run = functools.partial(ranks.run, timeout_s=300)  # the first call may compile kernels
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")


def batches(count: int = 4, sequences: int = 2) -> list[tuple[Tensor, Tensor]]:
    return [batch(seed, sequences) for seed in range(count)]


def prepared(model: nn.Module, recipe: Any, lr: float = 1e-2) -> torch.optim.Optimizer:
    """The optimizer of a prepared model."""
    _, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=lr), recipe)
    assert optimizer is not None
    return optimizer


def split(schedule: str, seed: int = 0, **changes: Any) -> Pipeline:
    """The tiny GPT over all ranks, four blocks unless told otherwise."""
    model = tiny_gpt(seed, **{"layers": 4, **changes})
    return split_pipeline(model, layout(pipeline=dist.get_world_size()), schedule)


def one_process_step(model: GPT, micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The mean loss, and its gradient on the parameters."""
    total = torch.zeros(())
    with ng.accumulate(model):
        for ids, targets in micro_batches:
            loss = model(ids, targets)[1]
            assert loss is not None
            (loss / len(micro_batches)).backward()
            total += loss.detach()
    return total / len(micro_batches)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """By name, in float32."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.dequantize() if isinstance(g, ng.QuantizedTensor) else g.float() for name, g in found.items()}
