"""Pipelines of replicas, of shards and of tensor-parallel stages, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import batch, tiny_gpt
from pipelines import one_process_step, prepared, run
from torch import Tensor

import narrowgauge as ng
from narrowgauge.distributed import Layout, data_parallel, layout, parallelize_tensor, shard, split_pipeline
from narrowgauge.distributed.tensor_parallel import whole_gradient
from narrowgauge.tensors.local import is_distributed, local

pytestmark = pytest.mark.multiproc
CHANGES = {"layers": 4, "tied_embeddings": True}
COUNT = 4  # micro-batches of one sequence, or of two where one process has those of both replicas


def _mine(place: Layout) -> list[tuple[Tensor, Tensor]]:
    """This rank's micro-batches: sequences of the whole batch, dealt to the ranks that read different ones."""
    whole, at, ranks = [batch(seed, 2) for seed in range(COUNT)], place.batch_rank, place.batch_ranks
    return [(ids[at::ranks], targets[at::ranks]) for ids, targets in whole]


def _whole(model: Any, name: str, p: Tensor, place: Layout) -> Tensor:
    """The gradient of the whole parameter, wide."""
    if place.size("tensor") > 1:
        grad = whole_gradient(model, name)
    else:
        grad = p.grad.full_tensor() if is_distributed(p.grad) and _is_plain(p.grad) else _gathered(p.grad)
    assert grad is not None
    return grad.float().clone()  # clipping scales in place


def _is_plain(grad: Any) -> bool:
    return not isinstance(local(grad), ng.QuantizedTensor)


def _gathered(grad: Any) -> Tensor:
    held = local(grad)
    held = held.dequantize() if isinstance(held, ng.QuantizedTensor) else held
    if not is_distributed(grad):
        return held
    parts: list[Any] = [None] * dist.get_world_size(grad.device_mesh.get_group())
    dist.all_gather_object(parts, held, group=grad.device_mesh.get_group())
    return torch.cat(parts)


def _run(sizes: dict[str, int], schedule: str, recipe: Any, sequence: bool = False) -> tuple[float, float, Any, Any]:
    place = layout(pipeline=2, **sizes)
    pipeline = split_pipeline(tiny_gpt(**CHANGES), place, schedule)
    model = pipeline.model
    if place.size("tensor") > 1:
        parallelize_tensor(model, place, sequence=sequence)
    if place.size("shard") > 1:
        shard(model, place)
    elif place.size("data") > 1:
        data_parallel(model, place)
    optimizer = prepared(model, recipe)
    loss = pipeline.step(_mine(place))
    gradients = {name: _whole(model, name, p, place) for name, p in model.named_parameters() if p.grad is not None}
    norm = float(ng.clip_grad_norm_(list(model.parameters()), 0.1))
    optimizer.step()
    optimizer.zero_grad()
    again = pipeline.step(_mine(place))
    losses = torch.tensor([float(loss), float(again)])
    dist.all_reduce(losses, group=place.batch)
    return *(losses / place.batch_ranks).tolist(), norm, gradients


def _one_process(recipe: Any) -> tuple[float, float, float, dict[str, Tensor]]:
    model = tiny_gpt(**CHANGES)
    optimizer = prepared(model, recipe)
    whole = [batch(seed, 2) for seed in range(COUNT)]
    loss = float(one_process_step(model, whole))
    found = {name: p.grad for name, p in model.named_parameters()}
    gradients = {
        n: g.dequantize() if isinstance(g, ng.QuantizedTensor) else g.float().clone() for n, g in found.items()
    }
    norm = float(ng.clip_grad_norm_(list(model.parameters()), 0.1))
    optimizer.step()
    optimizer.zero_grad()
    return loss, float(one_process_step(model, whole)), norm, gradients


@pytest.mark.parametrize(
    ("sizes", "schedule", "sequence"),
    [
        ({"data": 2}, "1f1b", False),
        ({"data": 2}, "zero_bubble", False),
        ({"tensor": 2}, "1f1b", False),
        ({"tensor": 2}, "zbv", True),
        ({"tensor": 2}, "interleaved", True),
        ({"shard": 2}, "1f1b", False),
        ({"shard": 2}, "interleaved", False),
    ],
)
def test_float32_is_as_one_process(sizes: dict[str, int], schedule: str, sequence: bool) -> None:
    loss, again, norm, expected = _one_process("fp32")
    found = run(4, _run, sizes, schedule, "fp32", sequence)
    for each in found:
        assert each[0] == pytest.approx(loss, rel=1e-6) and each[1] == pytest.approx(again, rel=1e-5)
        assert each[2] == pytest.approx(norm, rel=1e-5)
        for name, grad in each[3].items():
            assert float((grad - expected[name]).norm() / expected[name].norm()) < 1e-5, name
    assert {name for each in found for name in each[3]} == expected.keys()


@pytest.mark.parametrize(
    ("sizes", "schedule"),
    [({"data": 2}, "1f1b"), ({"data": 2}, "zero_bubble"), ({"tensor": 2}, "1f1b"), ({"shard": 2}, "1f1b")],
)
def test_8_bits_are_near_one_process(sizes: dict[str, int], schedule: str) -> None:
    loss, again, norm, _ = _one_process("narrow8")
    for each in run(4, _run, sizes, schedule, "narrow8"):
        assert each[0] == pytest.approx(loss, rel=2.0**-8) and each[1] == pytest.approx(again, rel=2.0**-7)
        assert each[2] == pytest.approx(norm, rel=0.03)


@pytest.mark.parametrize("sequence", [False, True])
def test_weight_gradients_of_parted_layers_can_be_put_off(sequence: bool) -> None:
    plain = run(4, _run, {"tensor": 2}, "1f1b", "narrow8", sequence)
    put_off = run(4, _run, {"tensor": 2}, "zero_bubble", "narrow8", sequence)
    for expected, found in zip(plain, put_off, strict=True):
        assert found[:3] == expected[:3] and found[3].keys() == expected[3].keys()
        assert all(torch.equal(grad, expected[3][name]) for name, grad in found[3].items())


def _sharded_zero_bubble() -> str:
    try:
        _run({"shard": 2}, "zbv", "fp32")
    except ng.ConversionError as error:
        return str(error)
    return ""


def test_putting_off_the_gradients_of_shards_is_refused() -> None:
    assert all(
        "use schedule '1f1b' or 'interleaved' with shards" in message for message in run(4, _sharded_zero_bubble)
    )
