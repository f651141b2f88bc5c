"""Which models become replicas: frozen parts, copies, released gradients, and what is refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from models import batch, tiny_gpt
from ranks import run
from replicas import NARROW, SIDE, WIDE, Given, error_of, prepared, values
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.distributed import data_parallel, layout, parallelize_tensor, shard, wire
from narrowgauge.errors import ConversionError

pytestmark = pytest.mark.multiproc


def _frozen() -> tuple[bool, Tensor, str]:
    model = Given()
    model.small.requires_grad_(False)
    model, _ = prepared(NARROW, model)
    model(2.0, 1.0).backward()
    frozen = model.small.grad is None
    grad = values(model.large.grad)
    model.small.requires_grad_(True)
    model.zero_grad()
    return frozen, grad, error_of(lambda: model(2.0, 1.0).backward())


def test_what_thaws_later_is_not_left_out_unseen() -> None:
    for frozen, grad, message in run(2, _frozen):
        assert frozen and (grad == 2).all()
        assert "'small' has begun to require gradients" in message and "prepare again" in message


def _released() -> tuple[list[Tensor], list[Tensor]]:
    found = []
    for released in (False, True):
        model = data_parallel(tiny_gpt())
        model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "narrow8")
        if released:
            ng.optim.release_gradients(optimizer)
        for step in range(2):
            ids, targets = batch(10 * dist.get_rank() + step, sequences=2)
            model(ids, targets)[1].backward()
            assert all((p.grad is None) == released for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        found.append([values(p) for p in model.parameters()])
    return found[0], found[1]


def test_released_gradients_are_means() -> None:
    (kept, released), (other, _) = run(2, _released)
    assert all(map(torch.equal, kept, released)) and all(map(torch.equal, kept, other))


def _copies() -> tuple[Tensor, Tensor, Tensor, int]:
    """A copy and a pickle reduce nothing; the copy prepared again does."""
    model, _ = prepared(NARROW)
    rank = dist.get_rank()
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with wire.counted() as count:
        for each in (copied, loaded):
            each(1.0 + rank).backward()
    again, _ = ng.prepare(copied, torch.optim.SGD(copied.parameters()), NARROW, autocast=False)
    again.zero_grad()
    again(1.0 + rank).backward()
    return values(copied.large.grad), values(loaded.large.grad), values(again.large.grad), count.bytes


def test_copies_reduce_nothing_until_they_are_prepared() -> None:
    for rank, (copied, loaded, again, sent) in enumerate(run(2, _copies)):
        assert sent == 0
        assert (copied == 1.5).all() and (again == 1.5).all()
        assert (loaded == 1.0 + rank).all()


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4, sparse=True)


def _refused() -> list[str]:
    unprepared = data_parallel(Given())
    with torch.no_grad():
        unprepared(1.0)
    one, _ = ng.prepare(Given(), None, WIDE)
    wrapped = nn.parallel.DistributedDataParallel(Given())
    return [
        error_of(lambda: unprepared(1.0)),
        error_of(lambda: data_parallel(one)),
        error_of(lambda: data_parallel(wrapped)),
        error_of(lambda: data_parallel(Given().double())),
        error_of(lambda: data_parallel(_Sparse())),
    ]


def _too_late() -> list[str]:
    one, _ = ng.prepare(nn.Sequential(nn.Linear(SIDE, SIDE)), None, WIDE)
    shards, tensor = (layout(**{kind: 2}) for kind in ("shard", "tensor"))
    before = [id(p) for p in one.parameters()]
    told = [
        error_of(lambda: data_parallel(one)),
        error_of(lambda: shard(one, shards)),
        error_of(lambda: parallelize_tensor(one, tensor, {"0": "column"})),
    ]
    assert before == [id(p) for p in one.parameters()]
    parted = shard(nn.Sequential(nn.Linear(SIDE, SIDE)), shards)
    return [*told, error_of(lambda: shard(parted, shards))]


def test_a_prepared_model_is_not_spread_any_more() -> None:
    for messages in run(2, _too_late):
        calls = (f"prepared already: call {name} first" for name in ("data_parallel", "shard", "parallelize_tensor"))
        for words, message in zip((*calls, "sharded already"), messages, strict=True):
            assert message.startswith(ConversionError.__name__) and words in message


def test_what_cannot_be_averaged_is_refused() -> None:
    expected = ("nothing averages its gradients yet", "prepared already", "model.module", "float64", "sparse=False")
    for messages in run(2, _refused):
        for message, words in zip(messages, expected, strict=True):
            assert message.startswith(ConversionError.__name__) and words in message
