"""Activations between tensor-parallel ranks: sums, and parts of sequences, by the recipe's `activation_comm`.

What a layer casts to 8 bits anyway moves as those codes: `Exchange.gather_bytes`. All else goes by the wire's cast, and
every sum is float32. Sequences are the last but one dimension of an activation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.distributed import collectives, wire
from narrowgauge.distributed.two_way import two_way
from narrowgauge.numerics.formats import BF16, FP32
from narrowgauge.ops.ranked import from_ranked_rows, ranked_rows
from narrowgauge.recipes.spec import CastSpec

ROLE = "activation_comm"


class Exchange(NamedTuple):
    """`ops.parted.Exchange` over a process group. spec: what travels; None: values as they are."""

    group: dist.ProcessGroup
    ranks: int
    spec: CastSpec | None = None

    def gather_bytes(self, sent: Tensor) -> Tensor:
        """Bytes of all ranks: uint8 [n] give [ranks, n]."""
        received = sent.new_empty(self.ranks * sent.numel())
        collectives.start_gather(received, sent, group=self.group)
        wire.record(ROLE, "all_gather", torch.uint8, sent.numel() * (self.ranks - 1))
        return received.view(self.ranks, -1)

    def gather_values(self, rows: Tensor) -> Tensor:
        """The ranked rows of all: [m, n] give [ranks * m, n] in the same dtype."""
        values = collectives.all_gather(rows, self._spec(rows), self.group, ROLE).wait()
        return values.view(-1, rows.shape[1]).to(rows.dtype)

    def sum_scattered(self, ranked: Tensor) -> Tensor:
        """This rank's rows of the sum: [ranks * m, n] give float32 [m, n]."""
        spec = self._spec(ranked)
        values = collectives.reduce_scatter(ranked, spec, self.group, ROLE, average=False).wait()
        return values.view(-1, ranked.shape[1])

    def sum_of_all(self, x: Tensor) -> Tensor:
        """The sum over ranks, on each of them the same bits: shape and dtype of `x`."""
        values = collectives.all_reduce(x, self._spec(x), self.group, ROLE, average=False).wait()
        return values.view(x.shape).to(x.dtype)

    def gather_sequences(self, x: Tensor) -> Tensor:
        """Whole sequences [..., T, n] from this rank's part [..., T / ranks, n]."""
        rows = self.gather_values(x.reshape(-1, x.shape[-1]))
        return from_ranked_rows(rows, x.shape, self.ranks)

    def sum_sequences(self, x: Tensor) -> Tensor:
        """This rank's part [..., T / ranks, n] of the sum over ranks of [..., T, n]."""
        *lead, tokens, features = x.shape
        rows = self.sum_scattered(ranked_rows(x, self.ranks))
        return rows.view(*lead, tokens // self.ranks, features).to(x.dtype)

    def _spec(self, values: Tensor) -> CastSpec:
        return self.spec or CastSpec(BF16 if values.dtype is torch.bfloat16 else FP32)


def enter(x: Tensor, exchange: Exchange) -> Tensor:
    """`x`, the same on all ranks, whose gradient is the sum of theirs."""
    return two_way(x, lambda x: x.view_as(x), exchange.sum_of_all)


def leave(x: Tensor, exchange: Exchange) -> Tensor:
    """The sum over ranks, whose gradient, the same on all ranks, is that of each term."""
    return _Leave.apply(x, exchange)  # type: ignore[no-any-return]


def gather(x: Tensor, exchange: Exchange) -> Tensor:
    """Whole sequences from parts; the gradient of a part is the sum over ranks."""
    return two_way(x, exchange.gather_sequences, exchange.sum_sequences)


def scatter(x: Tensor, exchange: Exchange) -> Tensor:
    """This rank's part of the sum over ranks; the gradient of each term is that of the whole."""
    return two_way(x, exchange.sum_sequences, exchange.gather_sequences)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        return exchange.sum_of_all(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
