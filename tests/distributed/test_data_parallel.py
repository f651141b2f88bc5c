"""Gradients averaged over replicas: the bits of the mean, the same on every rank, and what others got wrong."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import batch, tiny_gpt
from ranks import run
from replicas import NARROW, SIDE, WIDE, expected_grad, prepared, values
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.distributed import buckets, data_parallel, reduction, wire
from narrowgauge.distributed.layout import GroupReducer
from narrowgauge.numerics.formats import BF16, FP32
from narrowgauge.recipes.casts import WIRE
from narrowgauge.recipes.spec import CastSpec, Recipe

pytestmark = pytest.mark.multiproc

RECIPES = ("fp32", "bf16_pure", "fp8_current", "fp8_lm_o2", "narrow8")
EVERY_FORMAT = {
    "float32": WIDE,
    "bfloat16": Recipe(name="bfloat16", compute=FP32, grad=CastSpec(BF16), grad_comm=CastSpec(BF16)),
    "8 bits": NARROW,
    "8 bits of a wide one": Recipe(name="8 bits of a wide one", compute=FP32, grad_comm=WIRE),
}


def _one_backward(recipe: str, bucket_values: int) -> dict[str, tuple[Tensor, Tensor]]:
    """By parameter: the gradient of this rank, and that which `prepare` left."""
    with (
        mock.patch.object(buckets, "LEAST", bucket_values),
        mock.patch.object(reduction, "WHOLE", bucket_values),
    ):
        return _one_backward_of(data_parallel(tiny_gpt()), recipe)


def _one_backward_of(model: nn.Module, recipe: str) -> dict[str, tuple[Tensor, Tensor]]:
    model, _ = ng.prepare(model, torch.optim.AdamW(model.parameters()), recipe)
    own: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        p.register_hook(lambda grad, name=name: own.__setitem__(name, grad.detach().clone()))
    ids, targets = batch(dist.get_rank(), sequences=2)
    model(ids, targets)[1].backward()
    return {name: (own[name], values(p.grad)) for name, p in model.named_parameters()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_mean_is_that_of_its_formula(recipe: str) -> None:
    found = run(3, _one_backward, recipe, 1 << 22)
    for name in found[0]:
        grads = [each[name][0] for each in found]
        expected = expected_grad(ng.recipe(recipe), grads)
        for each in found:
            assert torch.equal(each[name][1], expected), name


def test_no_bit_depends_on_how_parameters_are_packed() -> None:
    for recipe in ("narrow8", "fp8_current"):
        whole, cut = (run(2, _one_backward, recipe, size)[0] for size in (1 << 22, 1000))
        for name in whole:
            assert torch.equal(whole[name][1], cut[name][1]), (recipe, name)


def _train(recipe: str, replicas: bool) -> tuple[list[Tensor], Tensor, wire.Count]:
    """Three steps: the parameters, the mean loss of each step, and what was sent."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if replicas else (0, 1)
    model = tiny_gpt(seed=rank)
    if replicas:
        data_parallel(model)
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe)
    losses = []
    with wire.counted() as count:
        for step in range(3):
            ids, targets = batch(step)
            loss = model(ids[rank::ranks], targets[rank::ranks])[1]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return [values(p) for p in model.parameters()], torch.stack(losses), count


@pytest.mark.parametrize("recipe", RECIPES)
def test_replicas_stay_equal_in_bits_and_go_the_way_of_one_process(recipe: str) -> None:
    (first, losses_0, count), (second, losses_1, _) = run(2, _train, recipe, True)
    assert all(map(torch.equal, first, second))
    one, losses, _ = _train(recipe, False)
    # float32 sums differ in their order only; else each step of Adam, lr 1e-3, may go the other way for a value, and
    # be rounded the other way to bfloat16
    bound = 1e-5 if recipe == "fp32" else 3 * (2e-3 + 2**-7 * max(float(p.abs().max()) for p in one))
    assert max(float((a - b).abs().max()) for a, b in zip(first, one, strict=True)) <= bound
    assert torch.allclose((losses_0 + losses_1) / 2, losses, rtol=0, atol=1e-5 if recipe == "fp32" else 0.03)
    large = sum(p.numel() for p in first if p.numel() >= ng.recipe(recipe).min_state_size)
    rows = {(row.collective, row.dtype): row.bytes for row in count.rows if row.role == "grad_comm"}
    dtype = {"fp32": torch.float32, "fp8_current": torch.float32, "bf16_pure": torch.bfloat16}.get(recipe, torch.uint8)
    for collective in ("all_to_all", "all_gather"):
        size = rows[collective, dtype]
        assert 3 * large * dtype.itemsize / 2 <= size <= 3 * large * dtype.itemsize / 2 * 1.02
        assert sum(row for (name, other), row in rows.items() if name == collective and other != dtype) < size / 50


def _no_elements() -> list[Tensor]:
    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.ones(1))
            self.none = nn.Parameter(torch.ones(0, 5))

    model, optimizer = prepared(EVERY_FORMAT["8 bits"].replace(min_state_size=0), Tiny())
    (model.one.float() * (1 + dist.get_rank()) + model.none.float().sum()).sum().backward()
    optimizer.step()
    return [values(p) for p in model.parameters()]


def test_ranks_without_a_part_of_a_small_parameter_take_part() -> None:
    """A parameter of one value on four ranks: three of them sum nothing; another has no values at all."""
    for one, none in run(4, _no_elements):
        assert one.tolist() == [1 - 2.5]
        assert none.shape == (0, 5)


def _initial() -> list[Tensor]:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].running_mean.uniform_()
    data_parallel(model)
    return [t.float() for t in (*model.parameters(), *model.buffers())]


def test_all_begin_with_the_values_of_the_first_rank() -> None:
    first, second = run(2, _initial)
    assert all(map(torch.equal, first, second))
    torch.manual_seed(0)
    assert torch.equal(first[0], nn.Linear(4, 4).weight)


def _ledger() -> list[int | None]:
    """Bytes on the wire by the ledger: before a step, and of the first one."""
    model = data_parallel(tiny_gpt())
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters()), "narrow8")
    found = [ng.ledger(model, optimizer).wire]
    model(*batch(0))[1].backward()
    return [*found, ng.ledger(model, optimizer).wire]


def test_the_ledger_does_not_count_the_first_values_as_part_of_a_step() -> None:
    parameters = sum(p.numel() for p in tiny_gpt().parameters())
    for before, step in run(2, _ledger):
        assert before == 0
        assert 1.0 < step / parameters < 1.05  # a byte and 1/128, and small ones in float32


def _average_of(recipe: Recipe, own: float, other: float, repeats: int = 1) -> tuple[Tensor, Tensor, bool]:
    """The mean gradients where all values of a rank are the same, and whether the step was skipped."""
    model, optimizer = prepared(recipe)
    grad = own if dist.get_rank() == 0 else other
    with ng.accumulate(model):
        for _ in range(repeats):
            model(grad, grad).backward()
    large, small = values(model.large.grad), values(model.small.grad)
    optimizer.step()
    return large, small, optimizer.step_was_skipped


def test_case_82_the_division_comes_before_the_rounding() -> None:
    for name, recipe in EVERY_FORMAT.items():
        for large, small, skipped in run(2, _average_of, recipe, 40000.0, 40000.0):
            assert not skipped
            relative = 2**-4 if "8 bits" in name else 2**-9 if name == "bfloat16" else 0.0
            assert ((large - 40000).abs() <= relative * 40000).all()
            assert ((small - 40000).abs() <= (2**-9 if name == "bfloat16" else 0.0) * 40000).all()
    # near the largest of all floats the sum of two is no longer one
    largest = torch.finfo(torch.float32).max / 1.5
    for large, _, skipped in run(2, _average_of, EVERY_FORMAT["8 bits"], largest / 2, largest / 2):
        assert not skipped and ((large - largest / 2).abs() <= 2**-4 * largest / 2).all()


def test_case_83_ranks_of_different_magnitudes_agree() -> None:
    recipe = EVERY_FORMAT["8 bits"]
    for own, other in ((1e-3, 1e3), (1e3, 0.0), (0.0, 0.0)):
        (first, _, skipped), (second, _, _) = run(2, _average_of, recipe, own, other)
        mean = (own + other) / 2
        assert torch.equal(first, second) and not skipped
        assert ((first - mean).abs() <= 0.0625 * mean).all()


def _one_bad(recipe: Recipe, bad: float) -> tuple[bool, Tensor]:
    model, optimizer = prepared(recipe)
    grad = torch.ones(SIDE, SIDE)
    if dist.get_rank() == 1:
        grad[3, 5] = bad
    model(grad, 1.0).backward()
    before = values(model.large)
    optimizer.step()
    assert torch.equal(values(model.large), before)
    return optimizer.step_was_skipped, values(model.small)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_case_80_and_83_what_is_not_finite_on_one_rank_skips_the_step_on_all(bad: float) -> None:
    for recipe in EVERY_FORMAT.values():
        assert [skipped for skipped, _ in run(2, _one_bad, recipe, bad)] == [True, True]


def _scaled_overflow() -> tuple[float, float, bool, Tensor]:
    model, optimizer = prepared("fp16")
    scaler = ng.LossScaler("fp16", device="cpu", init_scale=2.0**10)
    scaler.scale(model(math.inf if dist.get_rank() == 0 else 1.0, 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    after_first = scaler.get_scale()
    optimizer.zero_grad()
    scaler.scale(model(1.0 + dist.get_rank(), 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    return after_first, scaler.get_scale(), optimizer.step_was_skipped, values(model.large)


def test_case_80_the_loss_scale_is_halved_once_on_all_ranks() -> None:
    for after_first, after_second, skipped, large in run(2, _scaled_overflow):
        assert after_first == after_second == 2.0**9
        assert not skipped and (large == 1 - 1.5).all()


def _case_88(recipe: Recipe, averaged: bool) -> tuple[Tensor, Tensor, bool]:
    model, optimizer = prepared(recipe)
    with ng.accumulate(model):
        for _ in range(2):
            value = (1.0 if dist.get_rank() == 0 else 3.0) / (2 if averaged else 1)
            model(value, value).backward()
    optimizer.step()
    optimizer.zero_grad()
    no_gradients = all(p.grad is None for p in model.parameters())
    return 1 - values(model.large), 1 - values(model.small), no_gradients


@pytest.mark.parametrize("averaged", [False, True])
def test_case_88_the_optimizer_sees_the_mean_of_all_ranks(averaged: bool) -> None:
    for recipe in EVERY_FORMAT.values():
        for large, small, no_gradients in run(2, _case_88, recipe, averaged):
            assert (large == (2 if averaged else 4)).all() and (small == (2 if averaged else 4)).all()
            assert no_gradients


def _delayed() -> list[tuple[str, Tensor]]:
    model = data_parallel(tiny_gpt())
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "fp8_delayed")
    largest = GroupReducer.max_
    with mock.patch.object(GroupReducer, "max_", autospec=True, side_effect=largest) as maxima:
        for step in range(2):
            ids, targets = batch(10 * dist.get_rank() + step, sequences=2)
            model(ids, targets)[1].backward()
            optimizer.step()
            optimizer.zero_grad()
    # one collective a step for all amax values; others are single decisions
    assert sum(call.args[1].numel() > 1 for call in maxima.call_args_list) == 2
    return [(name, b.float()) for name, b in model.named_buffers() if "history" in name or "scale" in name]


def test_the_histories_of_delayed_scaling_hold_the_largest_of_all_ranks() -> None:
    first, second = run(2, _delayed)
    assert len(first) > 10
    for (name, mine), (_, theirs) in zip(first, second, strict=True):
        assert torch.equal(mine, theirs), name
