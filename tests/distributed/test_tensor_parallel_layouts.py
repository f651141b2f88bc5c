"""Tensor and sequence parallelism beside replicas, shards and stages: training in float32 is that of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from models import batch, tiny_gpt
from ranks import run

import narrowgauge as ng

pytestmark = pytest.mark.multiproc

# what has a place of its own in each kind of parallelism: a tied table that does not divide, positions, biases
CHANGES = {
    "positions": "learned", "norm": "layernorm", "norm_bias": True, "attention_bias": True, "mlp_bias": True,
    "activation": "gelu", "tied_embeddings": True, "vocab_size": 65,
}  # fmt: skip
STEPS = 3


def _alone() -> list[float]:
    model = tiny_gpt(**CHANGES)
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "fp32")
    losses = []
    for step in range(STEPS):
        _, loss = model(*batch(step))
        assert loss is not None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _spread(kind: str, recomputes: bool) -> tuple[list[float], list[float]]:
    expected = _alone()
    found = ng.distributed.layout(tensor=2, **{kind: 2})
    model = tiny_gpt(**CHANGES)
    model.activation_checkpointing = recomputes
    pipeline = ng.distributed.split_pipeline(model, found, "1f1b") if kind == "pipeline" else None
    model = model if pipeline is None else pipeline.model  # type: ignore[assignment]
    ng.distributed.parallelize_tensor(model, found, sequence=True)
    if kind == "shard":
        ng.distributed.shard(model, found)
    elif kind == "data":
        ng.distributed.data_parallel(model, found)
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "fp32")
    losses = []
    for step in range(STEPS):
        ids, targets = batch(step)
        if pipeline is not None:
            loss = pipeline.step([(ids[at : at + 1], targets[at : at + 1]) for at in range(len(ids))])
        else:
            _, loss = model(*(t.chunk(2)[found.batch_rank] for t in (ids, targets)))
            assert loss is not None
            loss.backward()
            loss = loss.detach().clone()
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, expected


# torch's FSDP2 takes up gradients when a block's backward ends: also of a block that backward has recomputed
@pytest.mark.parametrize(
    ("kind", "recomputes"), [("data", False), ("shard", False), ("shard", True), ("pipeline", False)]
)
def test_training_follows_one_process(kind: str, recomputes: bool) -> None:
    for losses, expected in run(4, _spread, kind, recomputes, timeout_s=300):
        assert losses == pytest.approx(expected, rel=1e-5)
