"""torch's DistributedDataParallel after `prepare`: 8 bits on the wire, and the bits of our own reducer."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from models import batch, tiny_gpt
from ranks import run
from replicas import NARROW, WIDE, Given, error_of, expected_grad, values
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng
from narrowgauge.distributed import data_parallel, wire

pytestmark = pytest.mark.multiproc


def _wrapped(recipe: ng.Recipe, **options: object) -> tuple[nn.Module, torch.optim.SGD]:
    model = DistributedDataParallel(Given(), **options)
    return ng.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), recipe, autocast=False)


def _train(recipe: str, by_ddp: bool) -> tuple[list[list[Tensor]], list[Tensor], set[torch.dtype]]:
    """Gradients of three steps, the parameters after them, and what travelled."""
    torch.manual_seed(dist.get_rank())
    model = tiny_gpt(seed=dist.get_rank())
    # buckets of about one matrix each
    model = DistributedDataParallel(model, bucket_cap_mb=0.05) if by_ddp else data_parallel(model)
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe)
    grads = []
    with wire.counted() as count:
        for step in range(3):  # DDP builds its buckets anew after the first
            ids, targets = batch(10 * dist.get_rank() + step, sequences=2)
            model(ids, targets)[1].backward()
            grads.append([values(p.grad) for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
    sent = {row.dtype for row in count.rows if row.role == "grad_comm" and row.bytes > 50_000}
    return grads, [values(p) for p in model.parameters()], sent


@pytest.mark.parametrize("recipe", ["fp32", "fp8_lm_o2"])
def test_the_hook_has_the_bits_of_our_reducer(recipe: str) -> None:
    (grads, parameters, sent), (_, other, _) = run(2, _train, recipe, True)
    ours, expected, _ = run(2, _train, recipe, False)[0]
    assert sent == {torch.uint8 if recipe == "fp8_lm_o2" else torch.float32}
    for step in range(3):
        assert all(map(torch.equal, grads[step], ours[step])), step
    assert all(map(torch.equal, parameters, expected)) and all(map(torch.equal, parameters, other))


def test_parameters_in_16_bits_pass_through_buckets_in_16_bits() -> None:
    """A rounding to bfloat16 before ours, and one after the mean: 2^-9 each, beside three of E4M3, 2^-4 each."""
    (grads, parameters, sent), (_, other, _) = run(2, _train, "narrow8", True)
    ours, _, _ = run(2, _train, "narrow8", False)[0]
    assert sent == {torch.uint8} and all(map(torch.equal, parameters, other))
    for found, expected in zip(grads[0], ours[0], strict=True):
        assert (found - expected).norm() <= 2 * (2**-9 + 2**-4) * expected.norm()


def _formula(recipe: ng.Recipe) -> tuple[Tensor, Tensor, bool]:
    model, _ = _wrapped(recipe)
    grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(grad, 1.0).backward()
    return grad, values(model.module.large.grad), isinstance(model.module.large.grad, ng.QuantizedTensor)


def test_the_mean_of_the_hook_is_that_of_its_formula() -> None:
    for recipe in (WIDE, NARROW):
        found = run(2, _formula, recipe)
        expected = expected_grad(recipe, [grad for grad, _, _ in found])
        for _, mean, is_cast in found:
            assert torch.equal(mean, expected) and is_cast == (recipe is NARROW)


def _accumulation(recipe: ng.Recipe) -> tuple[Tensor, list[int], Tensor]:
    model, optimizer = _wrapped(recipe)
    rank = dist.get_rank()
    sent = []
    with wire.counted() as count:
        with ng.accumulate(model):
            for i in range(3):
                model(1.0 + rank + i, 0.5).backward()
            sent.append(count.bytes)
        sent.append(count.bytes)
    first = values(model.module.large.grad)
    optimizer.zero_grad()
    model(4.0 * rank, 0.5).backward()  # and DDP goes on
    return first, sent, values(model.module.large.grad)


def test_accumulate_averages_at_its_end_under_ddp_too() -> None:
    for recipe in (WIDE, NARROW):
        for first, (inside, after), second in run(2, _accumulation, recipe):
            assert inside == 0 and after > 0
            assert (first == 7.5).all() and (second == 2).all()


def _no_sync() -> tuple[Tensor, bool, Tensor]:
    model, _ = _wrapped(NARROW.replace(grad_accumulation="stochastic"))
    rank = dist.get_rank()
    with model.no_sync():
        model(1.0 + rank).backward()
    local, is_wide = values(model.module.large.grad), type(model.module.large.grad) is Tensor
    model(2.0 + rank, 1.0).backward()
    return local, is_wide, values(model.module.large.grad)


def test_no_sync_leaves_gradients_wide_and_local() -> None:
    for rank, (local, is_wide, total) in enumerate(run(2, _no_sync)):
        assert is_wide and (local == 1 + rank).all()
        assert (total == 4).all()


def _unused() -> list[Tensor | None]:
    model, optimizer = _wrapped(NARROW, find_unused_parameters=True)
    model(4.0, None if dist.get_rank() else 6.0).backward()
    first = values(model.module.small.grad)
    optimizer.zero_grad()
    model(4.0).backward()
    return [first, model.module.small.grad, values(model.module.large.grad)]


def test_unused_parameters_under_ddp() -> None:
    for small, unused, large in run(2, _unused):
        assert small is not None and (small == 3).all()
        assert unused is None
        assert large is not None and (large == 4).all()


def _bad() -> tuple[bool, Tensor]:
    model, optimizer = _wrapped(NARROW)
    model(torch.nan if dist.get_rank() else 1.0, 1.0).backward()
    optimizer.step()
    return optimizer.step_was_skipped, values(model.module.large)


def test_case_83_nan_on_one_rank_skips_the_step_on_all_under_ddp() -> None:
    for skipped, large in run(2, _bad):
        assert skipped and (large == 1).all()


def _prepared_twice() -> tuple[Tensor, set[torch.dtype]]:
    model, optimizer = _wrapped(WIDE)
    model, optimizer = ng.prepare(model, optimizer, NARROW, autocast=False)
    with wire.counted() as count:
        model(1.0 + dist.get_rank(), 1.0).backward()
    return values(model.module.large.grad), {row.dtype for row in count.rows}


def test_preparing_again_replaces_the_hook() -> None:
    for grad, sent in run(2, _prepared_twice):
        assert (grad == 1.5).all() and sent == {torch.uint8, torch.float32}


def _delayed_buffers() -> list[list[float]]:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)))
    model, optimizer = ng.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), "fp8_delayed")
    found = []
    for step in range(2):
        x = torch.ones(4, 64) * (1 + step) * (1 + dist.get_rank())
        for part in (x, x / 4):  # DDP sends buffers before a forward: what the first has recorded would be lost
            model(part).sum().backward()
        found.append([float(model.module[0].get_buffer("input_amax_history")[0])])
        optimizer.step()
    found.append(model.module[0].get_buffer("input_amax_history")[1:].tolist()[-2:])
    return found


def test_ddp_does_not_send_the_histories_of_its_first_rank() -> None:
    """Before the step each rank has its own amax, after it the largest of all."""
    for rank, found in enumerate(run(2, _delayed_buffers)):
        assert found == [[1.0 + rank], [2.0 + 2 * rank], [2.0, 4.0]]


def _refused() -> list[str]:
    hooked = DistributedDataParallel(Given())
    hooked.register_comm_hook(None, _other_hook)
    views = DistributedDataParallel(Given(), gradient_as_bucket_view=True)
    return [error_of(lambda m=m: ng.prepare(m, None, NARROW, autocast=False)) for m in (hooked, views)]


def _other_hook(state, bucket):
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def test_what_the_hook_cannot_join_is_refused() -> None:
    for hooked, views in run(2, _refused):
        assert "has a communication hook" in hooked
        assert "gradient_as_bucket_view=False" in views


ROUNDED = WIDE.replace(name="rounded", param=ng.CastSpec(ng.formats.BF16, rounding=ng.STOCHASTIC))


def _wrapped_late() -> list[str]:
    found = []
    for recipe in (NARROW, WIDE, ROUNDED):
        with warnings.catch_warnings():  # prepared without the optimizer that rounds
            warnings.simplefilter("ignore")
            model, _ = ng.prepare(Given(), None, recipe)
        wrapped = DistributedDataParallel(model)
        found.append(error_of(lambda wrapped=wrapped: wrapped(torch.ones(64, 64), 1.0)))
    wrapped, _ = ng.prepare(DistributedDataParallel(ng.prepare(Given(), None, NARROW)[0]), None, NARROW)
    wrapped(torch.ones(64, 64), 1.0).backward()  # prepared again, around the wrapper
    return found


def test_a_prepared_model_that_ddp_wraps_is_refused_where_ranks_would_part() -> None:
    for narrow, wide, rounded in run(2, _wrapped_late):
        assert "gradients are cast to 8 bits before" in narrow
        assert not wide
        assert "random bits of its own" in rounded
        assert all("wrap the model first, then call narrowgauge.prepare" in told for told in (narrow, rounded))


def _prepared_inside(recipe: str) -> tuple[str, bool]:
    """What a forward says where the model in a wrapper was prepared, and whether ranks have equal gradients."""
    wrapped = DistributedDataParallel(tiny_gpt())
    model, _ = ng.prepare(wrapped.module, torch.optim.AdamW(wrapped.parameters()), recipe)
    told = error_of(lambda: wrapped(*batch(dist.get_rank()))[1].backward())
    if told:
        return told, False
    mine = values(model.lm_head.weight.grad)
    largest = mine.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return told, torch.equal(mine, largest)


def test_a_model_that_was_prepared_inside_its_wrapper_is_averaged_or_refused() -> None:
    for told, _ in run(2, _prepared_inside, "narrow8"):
        assert "wrap the model first, then call narrowgauge.prepare" in told
    # torch's own gradients, of parameters as DDP found them
    assert run(2, _prepared_inside, "fp8_current") == [("", True)] * 2
