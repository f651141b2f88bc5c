"""The norm of all gradients of a model that is spread over processes: every value once, the same bits everywhere."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run as run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import narrowgauge as ng
from narrowgauge.distributed import counting, wire
from narrowgauge.distributed.layout import Layout, attach, layout
from narrowgauge.errors import ConversionError
from narrowgauge.ops.reduce import SINGLE_PROCESS
from narrowgauge.tensors.local import as_part_of, local
from narrowgauge.tensors.quantized import quantize
from narrowgauge.tensors.shares import set_share

pytestmark = pytest.mark.multiproc
run = partial(run_ranks, timeout_s=300)
MAX_NORM = 0.1


def _values(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _parameter(seed: int, shape: tuple[int, ...], mesh: DeviceMesh | None, *placements: Any) -> nn.Parameter:
    """A parameter of ones with a gradient that follows from `seed`, whole or on a mesh."""
    values, grad = torch.ones(shape), _values(seed, *shape)
    if mesh is None:
        p = nn.Parameter(values)
        p.grad = grad
        return p
    p = nn.Parameter(distribute_tensor(values, mesh, placements, src_data_rank=None))
    p.grad = distribute_tensor(grad, mesh, placements, src_data_rank=None)
    return p


def _expected(*gradients: tuple[int, tuple[int, ...]], order: float = 2.0) -> float:
    """The norm of all gradients, each once, in float64."""
    flat = torch.cat([_values(seed, *shape).flatten().double() for seed, shape in gradients])
    return float(torch.linalg.vector_norm(flat, order))


def _quantize(p: nn.Parameter) -> None:
    """The gradient in 8 bits, each part with a scale of its own."""
    assert p.grad is not None
    p.grad = as_part_of(p, quantize(local(p.grad), ng.recipe("narrow8").grad))


# two stages of two tensor-parallel ranks; the table of the first is tied to the head of the last
WHOLE = {"norm": (32,), "table": (48, 32), "column": (64, 32), "row": (32, 64)}


def _stages(in_8_bits: bool, order: float) -> dict[str, Any]:
    """Case 94: every stage has a norm, a column and a row, and both have the table."""
    found = layout(pipeline=2, tensor=2)
    stage, mesh = found.rank("pipeline"), found.mesh["tensor"]
    model = nn.Module()
    model.norm = _parameter(10 * stage, WHOLE["norm"], None)
    model.column = _parameter(10 * stage + 1, WHOLE["column"], mesh, Shard(0))
    model.row = _parameter(10 * stage + 2, WHOLE["row"], mesh, Shard(1))
    model.table = _parameter(30, WHOLE["table"], mesh, Shard(0))
    set_share(model.table, (), counted=stage == 0, name="embedding.weight")
    attach(model, found)
    counting.count_once(model, counting.deciding(model))
    if in_8_bits:
        for p in (model.column, model.row, model.table):
            _quantize(p)
    parameters = list(model.parameters())
    with wire.counted() as count:
        norm = ng.clip_grad_norm_(parameters, MAX_NORM, order)
    clipped = {name: local(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    first = {name: float(grad.dequantize().flatten()[0] if in_8_bits and name != "norm" else grad.flatten()[0])
             for name, grad in clipped.items()}  # fmt: skip
    return {"norm": norm, "first": first, "rows": [row[:4] for row in count.rows], "bytes": count.bytes}


@pytest.mark.parametrize("in_8_bits", [False, True])
@pytest.mark.parametrize("order", [2.0, float("inf"), 1.0])
def test_tensor_parallel_stages_with_a_tied_table(in_8_bits: bool, order: float) -> None:  # case 94
    gradients = [(seed, WHOLE[name]) for stage in (0, 10) for name, seed in
                 (("norm", stage), ("column", stage + 1), ("row", stage + 2))]  # fmt: skip
    expected = _expected(*gradients, (30, WHOLE["table"]), order=order)
    found = run(4, _stages, in_8_bits, order)
    for rank in found:
        assert torch.equal(rank["norm"], found[0]["norm"])  # bitwise: the same factor everywhere
        assert float(rank["norm"]) == pytest.approx(expected, rel=1e-2 if in_8_bits else 1e-5)
        assert rank["rows"] == [(wire.CONTROL, "all_gather", torch.float32, 1)] and rank["bytes"] == 12
    factor = MAX_NORM / (expected + 1e-6)
    for rank, result in enumerate(found):
        stage = rank // 2
        assert result["first"]["norm"] == pytest.approx(
            float(_values(10 * stage, 32)[0]) * factor, rel=1e-2 if in_8_bits else 1e-5
        )


def _sharded(prepared: bool) -> tuple[Tensor, int]:
    """Shards of two dimensions, shards of one, and whole parameters; with a layout and from the placements alone."""
    if prepared:
        found = layout(shard=2, tensor=2)
        mesh = found.mesh["shard", "tensor"]
    else:
        mesh = init_device_mesh("cpu", (2, 2))
    model = nn.Module()
    model.both = _parameter(1, (8, 6), mesh, Shard(0), Shard(1))
    model.one = _parameter(2, (5, 3), mesh, Shard(0), Replicate())  # uneven: 3 rows and 2
    model.other = _parameter(3, (4,), mesh, Replicate(), Shard(0))
    model.whole = _parameter(4, (7,), None)
    model.lonely = _parameter(5, (1, 9), mesh, Shard(0), Replicate())  # one rank has nothing
    if prepared:
        attach(model, found)
        counting.count_once(model, counting.deciding(model))
    with wire.counted() as count:
        norm = ng.clip_grad_norm_(model.parameters(), 1e9)
    return norm, sum(row.calls for row in count.rows)


@pytest.mark.parametrize("prepared", [True, False])
def test_parts_and_replicas_count_once(prepared: bool) -> None:
    expected = _expected((1, (8, 6)), (2, (5, 3)), (3, (4,)), (4, (7,)), (5, (1, 9)))
    found = run(4, _sharded, prepared)
    for norm, calls in found:
        assert float(norm) == pytest.approx(expected, rel=1e-5)
        assert torch.equal(norm, found[0][0])
        assert calls == (1 if prepared else 0)  # torch's own groups are not on our wire


def _replicas() -> Tensor:
    """Whole parameters on four ranks: none counts its gradient again."""
    found = layout(data=2, shard=2)
    model = nn.Module()
    model.weight = _parameter(1, (16, 16), None)
    attach(model, found)
    counting.count_once(model, counting.deciding(model))
    counting.count_once(model, counting.deciding(model))  # as prepare does when it is called again
    return ng.clip_grad_norm_(model.parameters(), 1e9)


def test_replicas_count_once() -> None:
    expected = _expected((1, (16, 16)))
    assert [float(norm) for norm in run(4, _replicas)] == [pytest.approx(expected, rel=1e-6)] * 4


def _extreme(value: float) -> tuple[float, float]:
    """A gradient of one rank whose square overflows, or that is not finite; the other has none at all."""
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Shard(0)], run_check=False))
    grad = torch.full((4,), value if dist.get_rank() == 0 else 1.0)
    p.grad = DTensor.from_local(grad, mesh, [Shard(0)], run_check=False)
    unused = nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Shard(0)], run_check=False))
    norm = float(ng.clip_grad_norm_([p, unused], 1.0))
    return norm, float(local(p.grad)[0])


def test_values_beyond_float32_squares_and_infinities() -> None:
    for norm, _ in run(2, _extreme, 1e30):
        assert norm == pytest.approx(2e30, rel=1e-5)
    (norm, kept), (other, left) = run(2, _extreme, float("inf"))
    assert norm == other == float("inf") and kept == float("inf") and left == 1.0  # nothing is scaled
    (norm, _), (other, left) = run(2, _extreme, float("nan"))
    assert norm != norm and other != other and left == 1.0


def _other_mesh() -> str:
    found: Layout = layout(shard=2)
    model = nn.Module()
    model.weight = _parameter(1, (4, 4), init_device_mesh("cpu", (2,), mesh_dim_names=("mine",)), Shard(0))
    attach(model, found)
    assert counting.deciding(model) is not SINGLE_PROCESS
    try:
        counting.count_once(model, counting.deciding(model))
    except ConversionError as error:
        return str(error)
    return ""


def test_a_mesh_of_other_dimensions_is_refused() -> None:
    for message in run(2, _other_mesh):
        assert "'weight'" in message and "mine" in message
