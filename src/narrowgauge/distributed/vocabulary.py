"""Embedding, head and loss whose vocabulary is parted over tensor-parallel ranks.

No rank ever has all logits of a sequence: the maximum and the sums of the softmax are reduced over the ranks, in
float32. The vocabulary need not divide: the last rank then has fewer rows. Source: Shoeybi et al. 2019,
arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from narrowgauge.distributed import collectives, wire
from narrowgauge.distributed.activations import ROLE, leave, scatter
from narrowgauge.distributed.parallel_layers import PartedParameters
from narrowgauge.distributed.tensor_group import TensorGroup
from narrowgauge.errors import DataError
from narrowgauge.layers.embedding import Embedding, lookup_part
from narrowgauge.numerics.formats import FP32
from narrowgauge.recipes.spec import CastSpec
from narrowgauge.tensors.local import local


class VocabularyEmbedding(PartedParameters):
    """A table whose rows are parted: each rank looks up its own, and the rows are summed over the ranks."""

    def run(self, layer: Embedding, ids: Tensor) -> Tensor:
        """ids int64 [B, T] -> [B, T, width], in sequence-parallel training this rank's part of the sequences."""
        group = self.group
        check_ids(ids, layer.num_embeddings, "token ids")
        begin, end = self.sections["weight"].ranges(group.rank)[0]
        is_own = (ids >= begin) & (ids < end)
        padding = -1 if layer.padding_idx is None else layer.padding_idx - begin
        rows = (
            lookup_part(layer.weight, torch.where(is_own, ids - begin, 0), padding)
            if end > begin
            else _no_rows(layer, ids)
        )
        rows = rows.masked_fill(~is_own.unsqueeze(-1), 0.0)
        return (scatter if group.parts_sequences else leave)(rows, group.exchange)

    def reset(self, layer: Embedding) -> None:
        """As nn.Embedding's, of the whole."""
        device = local(layer.weight).device
        self.load_all(layer, nn.Embedding(layer.num_embeddings, layer.embedding_dim, layer.padding_idx, device=device))


class SequencePositions(PartedParameters):
    """A whole table of positions, of which a rank looks up those of its part of the sequence.

    It has no sections: every rank sees the gradient of a part.
    """

    def run(self, layer: Embedding, ids: Tensor) -> Tensor:
        """Positions [T] -> [T, width], in sequence-parallel training [T / ranks, width]."""
        group = self.group
        if not group.parts_sequences:
            return layer.lookup(ids)
        own = ids.chunk(group.ranks, dim=-1)[group.rank]
        table = group.sums.of(layer.weight, layer, wide=True)
        return F.embedding(own, table).to(layer.weight.dtype)

    def reset(self, layer: Embedding) -> None:
        """As nn.Embedding's."""
        nn.Embedding.reset_parameters(layer)


class VocabularyLoss:
    """Mean cross entropy over logits that are parted over the ranks: `GPT.loss` of a parallelized model."""

    def __init__(self, group: TensorGroup, vocabulary: int, ignored: int) -> None:
        self.group, self.vocabulary, self.ignored = group, vocabulary, ignored

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits [..., this rank's part of the vocabulary], targets int64 [...]: 0-dim float32 nats on every rank."""
        return cross_entropy(logits, targets, self.group, self.vocabulary, self.ignored)

    def __deepcopy__(self, memo: dict[int, Any]) -> VocabularyLoss:
        return self  # process groups cannot be copied


def cross_entropy(logits: Tensor, targets: Tensor, group: TensorGroup, vocabulary: int, ignored: int = -100) -> Tensor:
    """The mean over targets that are not `ignored` of log(sum(exp(logits))) - logit of the target, in float32.

    logits: [..., part], this rank's part of the `vocabulary`, in torch.chunk's order. NaN without any target, as
    torch's. Raises DataError for a target outside of the vocabulary.
    """
    check_ids(torch.where(targets == ignored, 0, targets), vocabulary, "targets")
    part = -(-vocabulary // group.ranks)
    return _CrossEntropy.apply(  # type: ignore[no-any-return]
        logits.float().flatten(0, -2), targets.flatten(), group, part * group.rank, ignored
    )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: TensorGroup, begin: int, ignored: int) -> Tensor:
        counts = targets != ignored
        at = targets - begin
        is_own = (at >= 0) & (at < logits.shape[1]) & counts
        at = torch.where(is_own, at, 0)
        largest = logits.amax(dim=1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group.group)
        wire.record(wire.CONTROL, "all_reduce", torch.float32, 2 * largest.nbytes * (group.ranks - 1) // group.ranks)
        total = (logits - largest.unsqueeze(1)).exp().sum(dim=1)
        chosen = torch.zeros_like(total)
        if logits.shape[1]:
            chosen = torch.where(is_own, logits.gather(1, at.unsqueeze(1)).squeeze(1) - largest, 0.0)
        both = torch.stack([total, chosen])  # one collective
        sums = collectives.all_reduce(both, CastSpec(FP32), group.group, wire.CONTROL, average=False).wait()
        total, chosen = sums.view(both.shape)
        count = counts.sum()
        ctx.save_for_backward(logits, largest + total.log(), at, is_own, counts, count)
        return torch.where(counts, total.log() - chosen, 0.0).sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, normalizer, at, is_own, counts, count = ctx.saved_tensors
        slope = torch.where(counts, grad / count, 0.0)
        grad_logits = (logits - normalizer.unsqueeze(1)).exp() * slope.unsqueeze(1)
        if logits.shape[1]:
            grad_logits.scatter_add_(1, at.unsqueeze(1), -(slope * is_own).unsqueeze(1))
        return grad_logits, None, None, None, None


def gather_logits(part: Tensor, vocabulary: int, group: TensorGroup) -> Tensor:
    """All logits [..., vocabulary] of parts [..., part], the same on every rank; so must be their gradients."""
    return _GatherLogits.apply(part, vocabulary, group)  # type: ignore[no-any-return]


class _GatherLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, vocabulary: int, group: TensorGroup) -> Tensor:
        size = -(-vocabulary // group.ranks)
        ctx.place = size * group.rank, part.shape[-1]
        rows = F.pad(part.flatten(0, -2), (0, size - part.shape[-1])).contiguous()
        received = rows.new_empty(group.ranks * rows.numel())
        collectives.start_gather(received, rows.view(-1), group=group.group)
        wire.record(ROLE, "all_gather", rows.dtype, rows.nbytes * (group.ranks - 1))
        whole = received.view(group.ranks, len(rows), size).transpose(0, 1).reshape(len(rows), -1)
        return whole[:, :vocabulary].reshape(*part.shape[:-1], vocabulary)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.narrow(-1, *ctx.place).contiguous(), None, None


def check_ids(ids: Tensor, count: int, what: str) -> None:
    """Raise DataError for an id that no rank has a row for: on a CPU by what it is, elsewhere as torch asserts."""
    is_known = ((ids >= 0) & (ids < count)).all()
    if ids.device.type == "cpu":
        if not is_known:
            raise DataError(f"{what}: expected numbers from 0 to {count - 1}, found {ids.min()} to {ids.max()}")
    elif not ids.is_meta:
        torch._assert_async(is_known)


def _no_rows(layer: Embedding, ids: Tensor) -> Tensor:
    """Zeros in the place of rows, for a rank that has none."""
    return local(layer.weight).new_zeros(*ids.shape, layer.embedding_dim)
