"""FP8-LM's own gradient reduction, to compare with: one scale for all ranks, and sums that are E4M3FN at every hop.

Source: Peng et al. 2023, "FP8-LM: Training FP8 Large Language Models", arXiv:2310.18313, section 2.2. Every rank casts
mu * s * gradient, s the least scale of all ranks; codes are added around a ring, each sum cast again at the same scale;
the result stands for the mean at the scale mu * s * ranks. What mu is: see `Scaling`. `collectives.all_reduce` sends
the same bytes and sums in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from narrowgauge.distributed import wire
from narrowgauge.distributed.collectives import Group, start_gather
from narrowgauge.distributed.layout import GroupReducer
from narrowgauge.errors import CheckpointError
from narrowgauge.numerics import kernels, scaling
from narrowgauge.numerics.formats import E4M3FN
from narrowgauge.numerics.scaling import CURRENT

MOST_AT_MAXIMUM = 1e-5  # 0.001 % of the values
GROWTH = 2.0 ** (1 / 1000)  # twofold in 1000 steps


class Scaling(Enum):
    """By what gradients are multiplied before the sum, beside their scale."""

    PRE = "divided by the number of ranks before the sum: small values underflow"
    POST = "divided by the number of ranks after the sum: large sums saturate"
    AUTO = "by mu, which is halved where sums saturate, and else grows slowly"


class Fp8LmReduction:
    """The reduction of one bucket of gradients, with the mu of its steps so far.

    mu: float32, 0-dimensional, the same on every rank; of AUTO it begins with 1 and follows from every reduction, of
    PRE and POST it is constant. A reduction that is not finite leaves it.
    """

    def __init__(self, kind: Scaling, ranks: int, device: torch.device | str = "cpu") -> None:
        self.kind = kind
        self.ranks = ranks
        self.mu = torch.tensor(1.0 / ranks if kind is Scaling.PRE else 1.0, dtype=torch.float32, device=device)

    def all_reduce(self, values: Tensor, group: Group, role: str) -> Tensor:
        """The mean of `values` (floating [n]) over the group, the same bits on each rank: float32 [n].

        NaN on all ranks where a value on any of them is not finite.
        """
        amax = GroupReducer(group).max_(kernels.amax(values).view(1))[0]
        scale, codes = self._cast(values, amax)
        part = -(-values.numel() // self.ranks)
        sent = F.pad(codes.view(torch.uint8), (0, part * self.ranks - values.numel())).view(self.ranks, part)
        total = _ring_sum(sent, group, role)
        return self._finish(total.flatten()[: values.numel()].view(E4M3FN.dtype), scale, amax)

    def mean_of(self, values: Tensor, in_ring: bool = True) -> Tensor:
        """What ranks would get of `values` [ranks, n], all in this process: float32 [n].

        in_ring: as `all_reduce`, the first rank first; False: summed in float32, and cast once.
        """
        amax = kernels.amax(values)
        scale, codes = self._cast(values, amax)
        if in_ring:
            total = codes[0]
            for row in codes[1:]:
                total = _added(total, row)
        else:
            total = _encoded(kernels.dequantize(codes, None, E4M3FN).sum(0))
        return self._finish(total, scale, amax)

    def state_dict(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {"mu": self.mu}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the mu of a checkpoint. Raises CheckpointError where there is none."""
        mu = state.get("mu")
        if not isinstance(mu, Tensor) or mu.numel() != 1:
            raise CheckpointError(f"FP8-LM's reduction: expected one 'mu', found {', '.join(state) or 'nothing'}")
        self.mu = mu.detach().to(self.mu).reshape(()).clone()

    def _cast(self, values: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
        """The scale of all ranks, mu in it, and the codes of `values`."""
        scale = scaling.quant_scale_of(amax, E4M3FN, CURRENT) * self.mu
        codes = kernels.quantize(values, scale, E4M3FN).codes
        assert codes is not None
        return scale, codes

    def _finish(self, total: Tensor, scale: Tensor, amax: Tensor) -> Tensor:
        """The mean that the codes of a sum stand for; mu follows."""
        finite = amax.isfinite()
        if self.kind is Scaling.AUTO:
            at_maximum = (total.view(torch.uint8) & 0x7F) == 0x7E  # 448 and -448
            saturates = at_maximum.float().mean() > MOST_AT_MAXIMUM
            self.mu = torch.where(finite, torch.where(saturates, self.mu / 2, self.mu * GROWTH), self.mu)
        factor = torch.where(finite, scaling.dequant_scale_of(scale * self.ranks), torch.nan)
        return kernels.dequantize(total, factor, E4M3FN)


def _encoded(values: Tensor) -> Tensor:
    codes = kernels.quantize(values, None, E4M3FN).codes
    assert codes is not None
    return codes


def _added(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two tensors of codes, rounded to a code: saturating."""
    return _encoded(kernels.dequantize(a, None, E4M3FN) + kernels.dequantize(b, None, E4M3FN))


def _ring_sum(sent: Tensor, group: Group, role: str) -> Tensor:
    """The sum over ranks of codes, uint8 [ranks, n]: part r begins at rank r and is complete at the rank before it."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    left, right = (rank - 1) % ranks, (rank + 1) % ranks
    total = sent[rank]
    for hop in range(1, ranks):
        received = torch.empty_like(total)
        ends = [
            dist.P2POp(dist.isend, total, group=group, group_peer=right),
            dist.P2POp(dist.irecv, received, group=group, group_peer=left),
        ]
        for work in dist.batch_isend_irecv(ends):
            work.wait()
        wire.record(role, "send", torch.uint8, total.numel())
        own = sent[(rank - hop) % ranks]
        total = _added(received.view(E4M3FN.dtype), own.view(E4M3FN.dtype)).view(torch.uint8)
    gathered = torch.empty_like(sent)
    work = start_gather(gathered.view(-1), total.contiguous(), group=group, async_op=True)
    wire.record(role, "all_gather", torch.uint8, total.numel() * (ranks - 1))
    if work is not None:
        work.wait()
    return gathered.roll(1, 0)  # rank r has the part after its own
