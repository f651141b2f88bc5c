"""A vocabulary parted over ranks: look-ups, loss and logits against torch on one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from models import batch, tiny_gpt
from ranks import run
from torch import Tensor, nn
from torch.nn import functional as F

import narrowgauge as ng
from narrowgauge.distributed import tensor_parallel, vocabulary, wire
from narrowgauge.distributed.tensor_group import TensorGroup, group_of
from narrowgauge.errors import DataError

pytestmark = pytest.mark.multiproc


def _group(sequence: bool = False) -> TensorGroup:
    return TensorGroup(ng.distributed.layout(tensor=dist.get_world_size()), sequence)


def _own(whole: Tensor, size: int, group: TensorGroup) -> Tensor:
    part = -(-size // group.ranks)
    return whole[..., part * group.rank : part * (group.rank + 1)]


def _loss(size: int, ignored: int) -> tuple[float, float, float]:
    """(loss here, torch's, largest error of a gradient) of 3 x 5 tokens, the first `ignored` of which do not count."""
    torch.manual_seed(3)
    logits, targets = 10 * torch.randn(3, 5, size), torch.randint(size, (3, 5))
    targets.flatten()[:ignored] = -100
    group = _group()
    part = _own(logits, size, group).clone().requires_grad_()
    loss = vocabulary.cross_entropy(part, targets, group, size)
    (2 * loss).backward()
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), targets.flatten())
    (2 * expected).backward()
    assert part.grad is not None and whole.grad is not None
    error = (part.grad - _own(whole.grad, size, group)).abs().max() if part.numel() else torch.zeros(())
    return loss.item(), expected.item(), error.item()


@pytest.mark.parametrize(("ranks", "size", "ignored"), [(2, 64, 0), (3, 100, 4), (3, 4, 1), (4, 3, 0)])
def test_the_loss_and_its_gradient_are_those_of_one_process(ranks: int, size: int, ignored: int) -> None:
    found = run(ranks, _loss, size, ignored)
    assert len({loss for loss, _, _ in found}) == 1  # the same bits on all
    for loss, expected, error in found:
        assert loss == pytest.approx(expected, rel=1e-6) and error < 1e-6


def _no_target() -> bool:
    loss, expected, _ = _loss(64, 15)
    return loss != loss and expected != expected


def test_a_batch_without_targets_has_no_mean() -> None:
    assert run(2, _no_target) == [True, True]


def _large() -> tuple[float, float]:
    group = _group()
    logits = torch.tensor([[3e4, -3e4, 3e4, 1e4]])
    part = _own(logits, 4, group)
    target = torch.tensor([2])
    return vocabulary.cross_entropy(part, target, group, 4).item(), F.cross_entropy(logits, target).item()


def test_large_logits_do_not_overflow() -> None:
    for found, expected in run(2, _large):
        assert found == pytest.approx(expected, rel=1e-6)


class _Table(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 6, padding_idx=1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


def _lookup(rows: int, dtype: torch.dtype) -> tuple[bool, bool, str]:
    torch.manual_seed(1)
    one = _Table(rows)
    two = _Table(rows)
    two.load_state_dict(one.state_dict())
    one, two = one.to(dtype), two.to(dtype)
    tensor_parallel.parallelize_tensor(two, ng.distributed.layout(tensor=dist.get_world_size()), {"table": "embedding"})
    ids = torch.arange(12).reshape(3, 4) % rows
    grad = torch.randn(3, 4, 6)
    found, expected = two(ids), one(ids)
    found.backward(grad.to(dtype))
    expected.backward(grad.to(dtype))
    gradient = tensor_parallel.whole_gradient(two, "table.weight")
    assert gradient is not None and one.table.weight.grad is not None
    return torch.equal(found, expected), torch.allclose(gradient, one.table.weight.grad, rtol=2**-7), str(two.table)


@pytest.mark.parametrize(("rows", "dtype"), [(8, torch.float32), (7, torch.float32), (7, torch.bfloat16)])
def test_a_lookup_and_its_gradient_are_those_of_one_process(rows: int, dtype: torch.dtype) -> None:
    for same, same_gradient, shown in run(2, _lookup, rows, dtype):
        assert same and same_gradient
        assert shown == f"Embedding({rows}, 6, padding_idx=1)"  # the whole table's


def _refused() -> list[str]:
    model = tiny_gpt()
    tensor_parallel.parallelize_tensor(model, ng.distributed.layout(tensor=2))
    ids, targets = batch(1)
    found = []
    for wrong_ids, wrong_targets in ((ids + 1000, targets), (ids, targets - 1000)):
        with pytest.raises(DataError) as error:
            model(wrong_ids, wrong_targets)
        found.append(str(error.value))
    return found


def test_numbers_outside_of_the_vocabulary_are_refused_on_every_rank() -> None:
    for ids, targets in run(2, _refused):
        assert ids.startswith("token ids: expected numbers from 0 to 63, found 10")
        assert targets.startswith("targets: expected numbers from 0 to 63, found -1000 to -9")


def _logits() -> tuple[list[int], list[int], bool, bool]:
    one, two = tiny_gpt(vocab_size=63), tiny_gpt(vocab_size=63)
    tensor_parallel.parallelize_tensor(two, ng.distributed.layout(tensor=2))
    ids, targets = (t.clamp(max=62) for t in batch(1))
    part, _ = two(ids, targets)
    whole, loss = two(ids)
    assert loss is None
    expected, _ = one(ids)
    group = group_of(two)
    assert group is not None
    whole.square().sum().backward()  # a loss of the user's own
    expected.square().sum().backward()
    gradient = tensor_parallel.whole_gradient(two, "blocks.0.mlp.down.weight")
    assert gradient is not None and one.blocks[0].mlp.down.weight.grad is not None
    error = (gradient - one.blocks[0].mlp.down.weight.grad).norm() / gradient.norm()
    return list(part.shape), list(whole.shape), torch.allclose(whole, expected, atol=1e-5), bool(error < 1e-5)


def test_logits_are_parted_beside_a_loss_and_whole_without() -> None:
    parts = [([4, 16, 32], [4, 16, 63], True, True), ([4, 16, 31], [4, 16, 63], True, True)]
    assert run(2, _logits) == parts


def _sent() -> list[tuple[str, str, torch.dtype, int]]:
    group = _group()
    logits = torch.randn(128, 1000)
    with wire.counted() as count:
        vocabulary.cross_entropy(logits, torch.zeros(128, dtype=torch.int64), group, 2000)
    return [row[:3] + (row.bytes,) for row in count.rows]


def test_a_loss_sends_three_numbers_a_token() -> None:
    for rows in run(2, _sent):
        assert rows == [
            ("control", "all_reduce", torch.float32, 128 * 4),  # maxima
            ("control", "all_to_all", torch.float32, 128 * 4),  # of sums and target logits, half of both
            ("control", "all_gather", torch.float32, 128 * 4),
        ]
