"""Optimizers on the parts of distributed parameters: the bits of the same rows of the whole."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run as run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import narrowgauge as ng
from narrowgauge.distributed.layout import GroupReducer
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.optim.formats import StateFormats
from narrowgauge.optim.update import Item, update
from narrowgauge.recipes.spec import Recipe
from narrowgauge.tensors.local import local
from narrowgauge.tensors.quantized import QuantizedTensor, quantize

pytestmark = pytest.mark.multiproc
run = partial(run_ranks, timeout_s=300)  # Numba may compile

ROWS, COLUMNS, STEPS = 64, 512, 3
# what the ranks of a 2 x 2 mesh hold of a matrix: rows, columns, both, and rows of replicas
PLACEMENTS = {
    "rows": (Replicate(), Shard(0)),
    "columns": (Shard(1), Replicate()),
    "both": (Shard(0), Shard(1)),
}
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p, **formats: ng.optim.AdamW(p, lr=0.01, **formats),
    "Adam": lambda p, **formats: ng.optim.Adam(p, lr=0.01, weight_decay=0.1, **formats),
    "SGD": lambda p, **formats: ng.optim.SGD(p, lr=0.1, momentum=0.9, **formats),
    "Lion": lambda p, **formats: ng.optim.Lion(p, lr=0.01, weight_decay=0.1, **formats),
}


def _formats(recipe: Recipe, optimizer: str) -> dict[str, Any]:
    """The recipe's formats as the optimizer's arguments."""
    formats = StateFormats.of(recipe)
    found = {name: getattr(formats, name) for name in ("exp_avg", "master", "stochastic_rounding")}
    return found | ({"exp_avg_sq": formats.exp_avg_sq} if optimizer.startswith("Adam") else {})


def _values(seed: int, shape: tuple[int, ...] = (ROWS, COLUMNS)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _stored(values: Tensor, recipe: Recipe) -> Tensor:
    """A parameter as the recipe stores it."""
    if recipe.param.is_scaled:
        return quantize(values, recipe.param)
    return values.to(recipe.param.format.dtype)


def _gradient(values: Tensor, recipe: Recipe) -> Tensor:
    """A gradient as the recipe keeps it."""
    return quantize(values, recipe.grad) if recipe.grad.is_scaled else values.clone()


def _distributed(part: Tensor, mesh: Any, placements: tuple[Any, ...], shape: tuple[int, ...]) -> DTensor:
    stride = (shape[1], 1) if len(shape) == 2 else (1,)
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _run_shards(optimizer: str, recipe_name: str, where: str, offload: str | None) -> None:
    """On each rank: three steps of a part, and of the whole; what the part became is the whole's part."""
    recipe = ng.recipe(recipe_name)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    placements = PLACEMENTS[where]

    def part(whole: Tensor) -> Tensor:
        if isinstance(whole, QuantizedTensor):
            codes = part(whole.codes.view(torch.uint8)).view(whole.codes.dtype)
            return QuantizedTensor(codes, whole.dequant_scale, whole.spec, whole.dtype, whole.amax)
        return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local().contiguous()

    scales_are_shared = not recipe.param.is_scaled
    values = _values(0)
    reference = nn.Parameter(_stored(values if scales_are_shared else part(values), recipe))
    p = nn.Parameter(_distributed(_stored(part(values), recipe), mesh, placements, (ROWS, COLUMNS)))
    p.grad_dtype = reference.grad_dtype = None
    build, formats = OPTIMIZERS[optimizer], _formats(recipe, optimizer)
    whole, parted = build([reference], **formats), build([p], **formats, offload=offload)
    for step in range(STEPS):
        gradient = _gradient(_values(100 + step), recipe)
        mine = part(gradient)
        reference.grad = gradient if scales_are_shared else mine
        p.grad = _distributed(mine, mesh, placements, (ROWS, COLUMNS))
        whole.step()
        parted.step()
    expected, found = {"param": reference.data, **whole.state[reference]}, {"param": local(p), **parted.state[p]}
    assert expected.keys() == found.keys() and found["step"] == STEPS
    for name, tensor in found.items():
        if name == "step":
            continue
        assert type(tensor) in (Tensor, QuantizedTensor, nn.Parameter), name
        a, b = (x.dequantize() if isinstance(x, QuantizedTensor) else x for x in (expected[name], tensor))
        a = part(a.float().reshape(ROWS, COLUMNS)) if scales_are_shared else a.float()
        assert torch.equal(a, b.float().reshape(a.shape)), name
    assert isinstance(parted.full_values(p), DTensor)
    full = whole.full_values(reference)
    assert torch.equal(local(parted.full_values(p)), part(full) if scales_are_shared else full)


@pytest.mark.parametrize("where", PLACEMENTS)
@pytest.mark.parametrize("recipe", ["narrow8", "bf16", "fp8_lm_o1", "fp8_lm_o2"])
def test_a_part_is_stepped_as_the_same_part_of_the_whole(recipe: str, where: str) -> None:
    run(4, _run_shards, "AdamW", recipe, where, None)


@pytest.mark.parametrize("optimizer", ["Adam", "SGD", "Lion"])
def test_other_optimizers_do_so_too(optimizer: str) -> None:
    run(4, _run_shards, optimizer, "narrow8", "both", None)


def test_state_on_the_host_is_stepped_alike() -> None:
    run(4, _run_shards, "AdamW", "narrow8", "both", "cpu")


# stochastic rounding


def _run_stochastic() -> tuple[Tensor, Tensor]:
    """Rows that are all alike, on two shards of two replicas, each rank with a seed of its own."""
    torch.manual_seed(dist.get_rank())
    recipe = ng.recipe("narrow8_sr")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "shard"))
    placements, row = (Replicate(), Shard(0)), _values(0, (1, COLUMNS))
    p = nn.Parameter(_distributed(row.expand(ROWS // 2, -1).bfloat16().contiguous(), mesh, placements, (ROWS, COLUMNS)))
    p.grad_dtype = None
    optimizer = ng.optim.AdamW([("weight", p)], lr=0.01, **_formats(recipe, "AdamW"))
    optimizer.share_randomness(GroupReducer(None))
    grad = _values(1, (1, COLUMNS)).expand(ROWS // 2, -1).contiguous()
    p.grad = _distributed(grad, mesh, placements, (ROWS, COLUMNS))
    expected = copy.deepcopy(local(p).detach())
    state = ng.optim.AdamW([nn.Parameter(expected)], lr=0.01, **_formats(recipe, "AdamW"))
    assert optimizer.shared_seed is not None
    key, stream = optimizer.shared_seed.key(0), optimizer.shared_seed.stream(p, "weight")
    optimizer.step()
    # the slow twin, by hand
    twin = state.param_groups[0]["params"][0]
    entry = state._state_of(twin)
    entry["step"] += 1
    moments = state._moments_of(twin, entry, state.param_groups[0])
    hyper = state.hyper(state.param_groups[0], twin, entry)
    update(state.rule, Item(twin, None, grad, moments, hyper, True, stream), key)
    assert torch.equal(local(p), twin)
    rounded = {tuple(column.tolist()) for column in (local(p).float() - local(p).float()[0]).T}
    assert len(rounded) > 1  # alike rows were rounded apart
    return local(p).detach(), optimizer.state_dict()["narrowgauge_seed"]


def test_random_bits_are_those_of_the_part_whatever_the_seeds() -> None:
    found = run(4, _run_stochastic)
    parts = [part for part, _ in found]
    assert torch.equal(parts[0], parts[2]) and torch.equal(parts[1], parts[3])  # replicas
    assert not torch.equal(parts[0], parts[1])  # shards
    assert len({seed for _, seed in found}) == 1


def _resume_stochastic() -> None:
    """A checkpoint's seed goes on, whatever the seed of the process that loads it."""
    recipe, grad = ng.recipe("narrow8_sr"), _values(1)

    def build(seed: int, values: Tensor) -> tuple[nn.Parameter, LowPrecisionOptimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(COLUMNS, ROWS, bias=False)
        with torch.no_grad():
            model.weight.copy_(values)
        _, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), recipe)
        optimizer.share_randomness(GroupReducer(None))  # type: ignore[attr-defined]
        return model.weight, optimizer  # type: ignore[return-value]

    def step(p: nn.Parameter, optimizer: LowPrecisionOptimizer) -> None:
        p.grad = grad.clone()
        optimizer.step()

    p, optimizer = build(7, _values(0))
    step(p, optimizer)
    held, saved = p.detach().clone(), copy.deepcopy(optimizer.state_dict())
    step(p, optimizer)
    again, other = build(8, held.float())
    other.load_state_dict(saved)
    step(again, other)
    assert torch.equal(p, again)


def test_the_seed_is_a_part_of_the_state() -> None:
    run(2, _resume_stochastic)


# edges


def _run_empty() -> tuple[list[int], int, bool]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    values = _values(0, (1, 8192))
    p = nn.Parameter(distribute_tensor(values, mesh, [Shard(0)]))
    recipe = ng.recipe("narrow8")
    optimizer = ng.optim.AdamW([p], lr=0.01, **_formats(recipe, "AdamW"))
    p.grad = distribute_tensor(torch.ones_like(values), mesh, [Shard(0)])
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    return list(local(p).shape), optimizer.state[p]["step"], bool((optimizer.full_values(p) != 0).any())


def test_a_rank_without_values_counts_steps() -> None:
    found = run(2, _run_empty)
    assert [shape for shape, *_ in found] == [[1, 8192], [0, 8192]]
    assert [step for _, step, _ in found] == [1, 1]


def _formats_of_parts() -> set[torch.dtype]:
    """4,096 values in all, 2,048 on each rank: the whole is large enough for 8-bit moments."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    p = nn.Parameter(distribute_tensor(_values(0, (8, 512)), mesh, [Shard(0)]))
    optimizer = ng.optim.AdamW([p], **_formats(ng.recipe("narrow8"), "AdamW"))
    p.grad = distribute_tensor(_values(1, (8, 512)), mesh, [Shard(0)])
    optimizer.step()
    return {optimizer.state[p][name].codes.dtype for name in ("exp_avg", "exp_avg_sq")}


def test_formats_go_by_the_size_of_the_whole() -> None:
    assert run(2, _formats_of_parts) == [{torch.int8, torch.uint8}] * 2


def _overwritten() -> tuple[bool, bool]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    p = nn.Parameter(distribute_tensor(_values(0).bfloat16(), mesh, [Shard(0)]))
    p.grad_dtype = None
    optimizer = ng.optim.AdamW([p], lr=0.01, **_formats(ng.recipe("narrow8"), "AdamW"))
    version = p._version
    p.grad = distribute_tensor(_values(1), mesh, [Shard(0)])
    optimizer.step()
    was_seen = p._version > version and bool(optimizer.state[p]["master"].any())
    with torch.no_grad():
        p.mul_(2)  # through the DTensor: its local part counts no version
    optimizer.full_values(p)
    return was_seen, bool(optimizer.state[p]["master"].any())


def test_what_others_write_drops_the_residual() -> None:
    assert run(2, _overwritten) == [(True, False)] * 2


def _state_of_torch() -> None:
    """prepare takes over the state of torch's AdamW of a DTensor, whose moments are DTensors."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    p = nn.Parameter(distribute_tensor(_values(0), mesh, [Shard(0)]))
    theirs = torch.optim.AdamW([p], lr=0.01)
    p.grad = distribute_tensor(_values(1), mesh, [Shard(0)])
    theirs.step()
    ours = ng.optim.AdamW([p], lr=0.01)
    ours.load_state_dict(theirs.state_dict())
    for name in ("exp_avg", "exp_avg_sq"):
        assert type(ours.state[p][name]) is Tensor
        assert torch.equal(ours.state[p][name], local(theirs.state[p][name]))
    assert ours.state[p]["step"] == 1
    ours.set_values(p, distribute_tensor(_values(2), mesh, [Shard(0)]))
    assert torch.equal(p.full_tensor(), _values(2))  # type: ignore[attr-defined]


def test_the_state_of_torch_is_taken_over() -> None:
    run(2, _state_of_torch)


def _partial_gradient() -> list[Any]:
    """A gradient that is yet to be summed over ranks, as torch leaves those of norms under sequence parallelism."""
    from torch.distributed.tensor import Partial

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    p = nn.Parameter(distribute_tensor(torch.zeros(8), mesh, [Replicate()]))
    p.grad = DTensor.from_local(torch.full((8,), dist.get_rank() + 1.0), mesh, [Partial()])
    norm = float(ng.clip_grad_norm_([p], 1e9))
    ng.optim.SGD([p], lr=1.0).step()
    return [local(p).tolist(), norm]


def test_a_partial_gradient_is_summed_before_it_is_used() -> None:
    assert run(2, _partial_gradient) == [[[-3.0] * 8, pytest.approx(3 * 8**0.5)]] * 2


def _average() -> tuple[bool, bool]:
    """The average of the parts is the part of the average, whether a master completes them or not."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model, whole = nn.Module(), nn.Module()
    stored = quantize(distribute_tensor(_values(0), mesh, [Shard(0)]).to_local(), ng.recipe("fp8_lm_o2").param)
    model.weight = nn.Parameter(_distributed(stored, mesh, (Shard(0),), (ROWS, COLUMNS)))
    whole.weight = nn.Parameter(stored.dequantize())
    averages = [ng.optim.EMA(module, decay=0.5) for module in (model, whole)]
    with torch.no_grad():
        local(model.weight).copy_(stored.dequantize() * 2)
        whole.weight.mul_(2)
    for average in averages:
        average.update()
    found, expected = (average.averages["weight"] for average in averages)
    return isinstance(found, DTensor), torch.equal(local(found), expected)


def test_averages_are_kept_by_parts() -> None:
    assert run(2, _average) == [(True, True)] * 2


def _muon() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    whole = nn.Parameter(distribute_tensor(_values(0, (8, 8)), mesh, [Replicate()]))
    reference = nn.Parameter(_values(0, (8, 8)))
    for p, grad in (
        (whole, distribute_tensor(_values(1, (8, 8)), mesh, [Replicate()])),
        (reference, _values(1, (8, 8))),
    ):
        p.grad = grad
        ng.optim.Muon([p], lr=0.1).step()
    assert torch.equal(local(whole), reference)
    try:
        ng.optim.Muon([("blocks.0.weight", nn.Parameter(distribute_tensor(_values(0, (8, 8)), mesh, [Shard(0)])))])
    except NarrowgaugeError as error:
        return [str(error)]
    return []


def test_muon_asks_for_whole_matrices() -> None:
    for (message,) in run(2, _muon):
        assert "'blocks.0.weight'" in message and "partition=True" in message
