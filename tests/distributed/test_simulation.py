"""A simulated rank holds and sends what a real one does, and large layouts come out as arithmetic says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from models import VOCABULARY, tiny_config, tiny_gpt
from ranks import run
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.distributed import wire
from narrowgauge.distributed.simulation import simulated_ranks, without_values
from narrowgauge.models.gpt import GPT

TOKENS = 16
Rows = list[tuple[Any, ...]]


def spread(model: GPT, sizes: dict[str, int]) -> tuple[GPT, ng.distributed.Layout]:
    """The model over a layout of those sizes."""
    layout = ng.distributed.layout(**sizes, device_type="cpu")
    ng.distributed.parallelize_tensor(model, layout, sequence=True)
    if layout.size("shard") > 1:
        ng.distributed.shard(model, layout)
    else:
        ng.distributed.data_parallel(model, layout)
    return model, layout


def step(model: nn.Module, recipe: str, ids: Tensor) -> tuple[dict[str, int], Rows]:
    """Bytes held by role after a step, and what was sent in it."""
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters()), recipe)
    with wire.counted() as count:
        model(ids, ids)[1].backward()
        ng.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return dict(ng.ledger(model, optimizer).roles), [tuple(row) for row in count.rows]


def really(sizes: dict[str, int], recipe: str) -> tuple[dict[str, int], Rows]:
    ids = torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    return step(spread(tiny_gpt(), sizes)[0], recipe, ids)


def simulated(sizes: dict[str, int], recipe: str, rank: int = 0, **changes: Any) -> tuple[dict[str, int], Rows]:
    with simulated_ranks(math.prod(sizes.values()), rank):
        model, layout = spread(GPT(tiny_config(**changes), device="meta"), sizes)
        with without_values(model, layout):
            return step(model, recipe, torch.zeros(2, TOKENS, dtype=torch.int64))


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "sizes, recipe, rank",
    [
        ({"data": 2}, "narrow8", 1),
        ({"shard": 2}, "narrow8", 1),
        ({"tensor": 2}, "fp32", 0),
        ({"shard": 2, "tensor": 2}, "narrow8", 0),
    ],
)
def test_a_simulated_rank_holds_and_sends_what_a_real_one_does(sizes, recipe, rank):
    held, sent = run(math.prod(sizes.values()), really, sizes, recipe, timeout_s=300)[rank]
    of_simulated, sent_by_simulated = simulated(sizes, recipe, rank)
    assert of_simulated == held
    assert sorted(sent_by_simulated, key=str) == sorted(sent, key=str)


def test_a_rank_of_many_holds_and_sends_what_arithmetic_says():
    shape, shard, tensor = {"heads": 4, "width": 256}, 8, 4  # every dimension divides
    parameters = list(GPT(tiny_config(**shape), device="meta").parameters())
    # vectors are on all tensor-parallel ranks
    of_tensor_rank = [p.numel() // tensor if p.ndim == 2 else p.numel() for p in parameters]
    held, sent = simulated({"shard": shard, "tensor": tensor}, "narrow8", rank=11, **shape)
    assert held["param"] == 2 * sum(of_tensor_rank) // shard  # bfloat16
    assert held["master"] == sum(of_tensor_rank) // shard  # and 8 bits more
    matrices = sum(size for size, p in zip(of_tensor_rank, parameters, strict=True) if p.ndim == 2)
    found = sum(row[4] for row in sent if row[0] == "grad_comm" and row[2] is torch.uint8)
    codes = matrices * (shard - 1) // shard
    assert codes * (1 + 1 / 128) <= found <= codes * 1.02  # a scale for 128 values, and padding


def test_what_cannot_be_simulated_is_said():
    with pytest.raises(ng.ConfigError, match="rank=8: expected 0 to 7"), simulated_ranks(8, 8):
        pass
    with simulated_ranks(2):
        with pytest.raises(ng.NarrowgaugeError, match="found one of 2"), simulated_ranks(2):
            pass
        with pytest.raises(ng.ConfigError, match="expected 4 processes"):
            ng.distributed.layout(tensor=4)
        with pytest.raises(ng.NarrowgaugeError, match="3"):
            spread(GPT(tiny_config(heads=3, width=66), device="meta"), {"tensor": 2})
    assert not torch.distributed.is_initialized()
