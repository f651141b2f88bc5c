"""What ranks may do unlike one another in a step: unused parameters, other numbers of samples, several backwards."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from models import batch, tiny_gpt
from ranks import run
from replicas import NARROW, SIDE, WIDE, error_of, prepared, values
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.distributed import data_parallel, share_of_batch, wire
from narrowgauge.recipes.spec import Recipe

pytestmark = pytest.mark.multiproc

BOTH = (WIDE, NARROW)


def _unused(recipe: Recipe) -> list[list[float] | None]:
    model, optimizer = prepared(recipe)
    found: list[list[float] | None] = []
    for step in range(3):
        first = dist.get_rank() == 0
        # on one rank only, on none, on both
        large = (4.0 if first else None, None, 2.0)[step]
        small = (None if first else 6.0, 1.0, None if first else 2.0)[step]
        model(large, small).backward()
        for p in (model.large, model.small):
            found.append(None if p.grad is None else values(p.grad).unique().tolist())
        optimizer.zero_grad()
    return found


def test_a_parameter_that_no_rank_used_has_no_gradient_and_one_that_some_used_has_their_mean() -> None:
    for recipe in BOTH:
        for found in run(2, _unused, recipe):
            assert found == [[2.0], [3.0], None, [1.0], [2.0], [1.0]]


def _accumulates(recipe: Recipe) -> tuple[list[int], Tensor, Tensor, list[bool]]:
    model, _ = prepared(recipe)
    rank = dist.get_rank()
    bytes_, wide = [], []
    with wire.counted() as count:
        with ng.accumulate(model):
            for i in range(3):
                with ng.accumulate(model):
                    model(1.0 + rank + i, 0.5).backward()
                bytes_.append(count.bytes)
                wide.append(type(model.large.grad) is Tensor and model.large.grad.dtype is torch.float32)
        bytes_.append(count.bytes)
    first = values(model.large.grad)
    with ng.accumulate(model):  # what was there is added to
        model(1.0, 0.5).backward()
    return bytes_, first, values(model.large.grad), wide


def test_accumulation_sends_nothing_before_its_end_and_adds_to_means() -> None:
    for recipe in BOTH:
        for bytes_, first, second, wide in run(2, _accumulates, recipe):
            assert bytes_[:3] == [0, 0, 0] and bytes_[3] > 0 and all(wide)
            assert (first == ((1 + 2 + 3) + (2 + 3 + 4)) / 2).all()
            rounding = 2**-4 if recipe is NARROW else 0.0
            assert ((second - 8.5).abs() <= rounding * 8.5).all()


def _fails_inside() -> tuple[str, int, Tensor]:
    model, _ = prepared(NARROW)
    message = ""
    with wire.counted() as count:
        try:
            with ng.accumulate(model):
                model(1.0).backward()
                raise KeyError("in the body")
        except KeyError as error:
            message = str(error)
    model.zero_grad()
    model(3.0).backward()
    return message, count.bytes, values(model.large.grad)


def test_an_error_in_an_accumulation_sends_nothing() -> None:
    for message, sent, grad in run(2, _fails_inside):
        assert "in the body" in message and sent == 0
        assert (grad == 3).all()


def _twice(recipe: Recipe) -> tuple[bool, Tensor, list[str]]:
    model, _ = prepared(recipe)
    rank = dist.get_rank()
    torch.manual_seed(rank)  # what ranks draw elsewhere does not part them
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.linspace(1, 2 + rank, SIDE * SIDE).view(SIDE, SIDE)).backward()
    assert model.large.grad is not None
    is_cast = isinstance(model.large.grad, ng.QuantizedTensor)
    return is_cast, values(model.large.grad), [str(warning.message) for warning in caught]


def test_a_second_backward_adds_its_mean() -> None:
    mean = torch.linspace(1, 2.5, SIDE * SIDE).view(SIDE, SIDE)
    for recipe in (*BOTH, NARROW.replace(grad_accumulation="stochastic")):
        (is_cast, first, caught), (_, second, _) = run(2, _twice, recipe)
        assert torch.equal(first, second)
        stochastic = recipe.grad_accumulation == "stochastic"
        assert is_cast == stochastic and bool(caught) == (recipe is NARROW)
        relative = 0.0 if recipe is WIDE else 2**-4 * 2.2 + (2**-3 if stochastic else 2**-4)
        assert ((first - 2 * mean).abs() <= relative * 2 * mean + 1e-6).all()


def _uneven(recipe: Recipe, samples: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    model, _ = prepared(recipe)
    mine = samples[dist.get_rank()]
    with share_of_batch(model, mine):
        if mine:
            model(float(2 + dist.get_rank()), 1.0).backward()
    large = model.large.grad
    return torch.empty(0) if large is None else values(large), model.small.grad


@pytest.mark.parametrize("samples", [(3, 1), (0, 5), (4, 0), (0, 0)])
def test_ranks_count_by_their_samples(samples: tuple[int, int]) -> None:
    for recipe in BOTH:
        for large, small in run(2, _uneven, recipe, samples):
            if sum(samples) == 0:
                assert not large.numel() and small is None
                continue
            expected = (2 * samples[0] + 3 * samples[1]) / sum(samples)
            assert ((large - expected).abs() <= (2**-4 * expected if recipe is NARROW else 0)).all()
            assert small is not None and torch.equal(small, torch.ones(3))


def _last_batch() -> tuple[list[Tensor], list[Tensor]]:
    """Five sequences: four for one rank, one for the other; and all five in one process."""
    ids, targets = batch(7, sequences=5)
    rank = dist.get_rank()
    mine = slice(0, 4) if rank == 0 else slice(4, 5)
    model = data_parallel(tiny_gpt())
    model, _ = ng.prepare(model, torch.optim.SGD(model.parameters()), "fp32")
    with share_of_batch(model, len(ids[mine])):
        model(ids[mine], targets[mine])[1].backward()
    one, _ = ng.prepare(alone := tiny_gpt(), torch.optim.SGD(alone.parameters()), "fp32")
    one(ids, targets)[1].backward()
    return [values(p.grad) for p in model.parameters()], [values(p.grad) for p in one.parameters()]


def test_an_uneven_last_batch_has_the_gradient_of_one_process() -> None:
    for replicas, one in run(2, _last_batch):
        for ours, theirs in zip(replicas, one, strict=True):
            assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def _empty_batch() -> Tensor:
    """A rank that runs backward on the mean of no samples: NaN, which counts for nothing."""
    model, _ = prepared(NARROW)
    mine = 0 if dist.get_rank() else 2
    with share_of_batch(model, mine):
        model(torch.nan if mine == 0 else 5.0).backward()
    return values(model.large.grad)


def test_the_gradient_of_no_samples_counts_for_nothing() -> None:
    for grad in run(2, _empty_batch):
        assert (grad == 5).all()


def _misuse() -> list[str]:
    model, _ = prepared(WIDE)

    def twice() -> None:
        with share_of_batch(model, 1):
            for _ in range(2):
                model(1.0).backward()

    messages = [error_of(twice), error_of(lambda: share_of_batch(model, -1).__enter__())]
    model.zero_grad()
    messages.append(error_of(lambda: model(model.large * 1.0).backward(create_graph=True)))
    sharded, _ = ng.prepare(fully_shard(nn.Linear(SIDE, SIDE)), None, WIDE)
    return [*messages, error_of(lambda: share_of_batch(sharded, 1).__enter__())]


def test_misuse_is_named() -> None:
    for twice, negative, graph, sharded in run(2, _misuse):
        assert "expected one backward in it, found 2" in twice
        assert "samples=-1" in negative
        assert "create_graph" in graph
        assert "fully_shard" in sharded and "multiply its loss by samples" in sharded


def _reentrant() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(3))
    plain, nested = copy.deepcopy(layers), layers
    grads = []
    x = torch.randn(4, SIDE, requires_grad=True) + dist.get_rank()
    for model, kinds in ((plain, None), (nested, True)):
        data_parallel(model)
        ng.prepare(model, torch.optim.SGD(model.parameters()), WIDE, autocast=False)
        y = x.detach().requires_grad_()
        for layer in model:
            y = layer(y) if kinds is None else checkpoint(layer, y, use_reentrant=kinds)
        y.square().sum().backward()
        grads.append(torch.cat([values(p.grad).flatten() for p in model.parameters()]))
    return grads[0], grads[1], x.detach()


def test_backwards_within_a_backward_add_up() -> None:
    (plain, nested, _), (other, _, _) = run(2, _reentrant)
    assert torch.equal(plain, nested) and torch.equal(plain, other)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("on the way")


def _failing_backward() -> Tensor:
    model, _ = prepared(NARROW)
    try:
        (model(1.0) + _Fails.apply(model.small * 1.0).sum()).backward()
    except RuntimeError as error:
        assert "on the way" in str(error)
    model.zero_grad()
    model(2.0, 2.0).backward()
    return values(model.large.grad)


def test_a_backward_after_one_that_failed_on_all_ranks_begins_anew() -> None:
    for grad in run(2, _failing_backward):
        assert (grad == 2).all()
