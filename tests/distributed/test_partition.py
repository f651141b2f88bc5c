"""Whole parameters parted over replicas: who owns what, what travels, and that nobody steps by other numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import batch, tiny_gpt
from ranks import run as run_ranks
from torch import Tensor

import narrowgauge as ng
from narrowgauge.distributed import partition, replicas, wire
from narrowgauge.distributed.layout import layout
from narrowgauge.optim.state import COPY, MASTER
from narrowgauge.recipes.casts import WIRE
from narrowgauge.tensors.quantized import QuantizedTensor, quantize

run = partial(run_ranks, timeout_s=300)  # Numba may compile
STEPS = 3


def _loads(sizes: list[int], ranks: int) -> list[int]:
    found = partition.owners(sizes, ranks)
    return [sum(size for size, rank in zip(sizes, found, strict=True) if rank == each) for each in range(ranks)]


def test_tensors_go_in_falling_size_to_the_least_loaded_rank() -> None:
    assert _loads([100, 90, 50, 40, 30, 20, 10], 2) == [170, 170]
    assert _loads([6, 6, 5, 5, 4, 4], 4) == [6, 6, 9, 9]
    assert partition.owners([10, 100, 20, 90], 2) == [0, 0, 1, 1]  # in the order of the list: 100 + 10, 90 + 20
    assert partition.owners([5, 5], 4) == [0, 1]  # equal ones in their order, the first rank of equal loads


Run = tuple[torch.nn.Module, Any]


def _build(recipe: str, parted: bool) -> Run:
    model = replicas.data_parallel(tiny_gpt(), layout(data=dist.get_world_size()), partition=parted)
    return ng.prepare(model, ng.optim.AdamW(model.parameters(), lr=0.01), recipe)


def _step(model: torch.nn.Module, optimizer: Any, seed: int) -> None:
    ids, targets = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch(seed))
    model(ids, targets)[1].backward()
    optimizer.step()
    optimizer.zero_grad()


def _values(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor.float().clone()


def _parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: _values(p) for name, p in model.named_parameters()}


def _compare(recipe: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str], list[str]]:
    """Parameters after some steps with parted state and without, and whose state this rank has."""
    found = []
    for parted in (True, False):
        model, optimizer = _build(recipe, parted)
        for step in range(STEPS):
            _step(model, optimizer, step)
        found.append((_parameters(model), optimizer))
    (values, optimizer), (expected, whole) = found
    of = optimizer.partition
    own = [name for name, p in _named(optimizer) if of.owns(p)]
    kept = [name for name, p in _named(optimizer) if optimizer.state.get(p)]
    assert whole.partition is None
    return values, expected, own, kept


def _named(optimizer: Any) -> list[tuple[str, Tensor]]:
    return [(optimizer.name_of(p), p) for p in optimizer.parameters()]


@pytest.mark.multiproc
@pytest.mark.parametrize("recipe", ["fp32", "bf16_pure", "fp8_lm_o3"])
def test_what_travels_as_it_is_stored_is_stepped_as_without_parts(recipe: str) -> None:
    found = run(2, _compare, recipe)
    for values, expected, own, kept in found:
        assert own == kept and own
        for name, value in values.items():
            assert torch.equal(value, expected[name]), name
    assert not set(found[0][2]) & set(found[1][2])
    assert len(found[0][2]) + len(found[1][2]) == len(found[0][0])


def _narrow(recipe: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], list[wire.Row], int]:
    """After one step: the parameters, the digits of the own ones, all digits of a run without parts, the wire."""
    model, optimizer = _build(recipe, True)
    with wire.counted() as count:
        _step(model, optimizer, 0)
    rows = [row for row in count.rows if row.role == "param_comm"]
    own = {name: optimizer.full_values(p) for name, p in _named(optimizer) if optimizer.state.get(p)}
    sent = 0
    for name, p in _named(optimizer):
        if name in own and p.numel() >= 4096:
            sent += p.numel() + -(-p.numel() // 128)
            assert COPY in optimizer.state[p]
            assert not isinstance(p, QuantizedTensor) or MASTER not in optimizer.state[p]
    whole, reference = _build(recipe, False)
    _step(whole, reference, 0)
    digits = {name: reference.full_values(p) for name, p in _named(reference)}
    return _parameters(model), own, digits, rows, sent


@pytest.mark.multiproc
@pytest.mark.parametrize("recipe", ["narrow8", "fp8_lm_o2"])
def test_parameters_travel_in_8_bits_and_owners_keep_their_digits(recipe: str) -> None:
    found = run(2, _narrow, recipe)
    for values, own, digits, rows, sent in found:
        for name, value in values.items():
            assert torch.equal(value, found[0][0][name]), name  # the same on all ranks
        for name, full in own.items():
            assert torch.equal(full, digits[name]), name  # the step is that of the whole state
            if full.numel() < 4096:
                assert torch.equal(values[name], full) or recipe == "narrow8"  # bfloat16 beside a residual
                continue
            stored = full if recipe == "narrow8" else quantize(full, ng.recipe(recipe).param).dequantize()
            decoded = quantize(stored.reshape(1, -1), WIRE).dequantize().reshape(full.shape)
            if recipe == "fp8_lm_o2":
                decoded = quantize(decoded, ng.recipe(recipe).param).dequantize()
            assert torch.equal(values[name], decoded), name
        assert sum(row.bytes for row in rows if row.dtype is torch.uint8) == sent
        assert {row.collective for row in rows} == {"all_gather"}


def _resumed() -> None:
    """Three steps, and two, a save, a load and one: the same bits. A whole optimizer gets the owner's digits."""
    model, optimizer = _build("narrow8", True)
    for step in range(2):
        _step(model, optimizer, step)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    saved = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, optimizer.state_dict())
    _step(model, optimizer, 2)
    again, other = _build("narrow8", True)
    again.load_state_dict(weights)
    other.load_state_dict(saved)
    _step(again, other, 2)
    for (name, value), (_, expected) in zip(_parameters(again).items(), _parameters(model).items(), strict=True):
        assert torch.equal(value, expected), name
    for (name, p), (_, q) in zip(_named(other), _named(optimizer), strict=True):
        assert torch.equal(other.full_values(p), optimizer.full_values(q)), name
    alone, whole = _build("narrow8", False)
    alone.load_state_dict(weights)
    whole.load_state_dict(saved)
    third, parted = _build("narrow8", True)
    third.load_state_dict(weights)
    parted.load_state_dict(saved)
    for (name, p), (_, q) in zip(_named(whole), _named(parted), strict=True):
        if parted.partition.owns(q):
            assert torch.equal(whole.full_values(p), parted.full_values(q)), name


def _prepared_again() -> list[Tensor]:
    model, optimizer = _build("narrow8", True)
    _step(model, optimizer, 0)
    model, optimizer = ng.prepare(model, optimizer, "fp8_lm_o2")
    after = list(_parameters(model).values())
    _step(model, optimizer, 1)
    return after + list(_parameters(model).values())


@pytest.mark.multiproc
def test_another_recipe_finds_all_ranks_equal() -> None:
    first, second = run(2, _prepared_again)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.multiproc
def test_a_saved_part_goes_on_bit_for_bit() -> None:
    run(2, _resumed)


def _skipped() -> tuple[bool, bool, int]:
    model, optimizer = _build("narrow8", True)
    _step(model, optimizer, 0)
    before = _parameters(model)
    ids, targets = (part.chunk(2)[dist.get_rank()] for part in batch(1))
    model(ids, targets)[1].backward()
    if dist.get_rank() == 1:  # of one rank alone, after the reduction
        next(p for p in model.parameters() if p.grad is not None).grad.mul_(float("nan"))
    with wire.counted() as count:
        optimizer.step()
    same = all(torch.equal(value, before[name]) for name, value in _parameters(model).items())
    return optimizer.step_was_skipped, same, count.bytes_of("param_comm")


@pytest.mark.multiproc
def test_a_skipped_step_sends_nothing() -> None:
    assert run(2, _skipped) == [(True, True, 0)] * 2


def _few() -> tuple[list[float], int]:
    """More ranks than parameters."""
    torch.manual_seed(0)
    model = replicas.data_parallel(torch.nn.Linear(64, 64, bias=False), layout(data=3), partition=True)
    model, optimizer = ng.prepare(model, torch.optim.Muon(model.parameters(), lr=0.1), "narrow8")
    before = model.weight.detach().float().clone()
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    return (model.weight.detach().float() - before).abs().amax().item(), len(optimizer.state)


@pytest.mark.multiproc
def test_a_rank_may_own_nothing_and_muon_has_whole_matrices() -> None:
    found = run(3, _few)
    assert [size for _, size in found] == [1, 0, 0]
    assert found[0][0] == found[1][0] == found[2][0] > 0
