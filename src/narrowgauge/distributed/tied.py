"""One table on two stages: the embedding of the first, to which the head of the last is tied.

Each has a copy. The copies begin equal, get the sum of both gradients, and take the same steps, so they stay equal in
bits, with the optimizer's codes and scales of them. Source: Megatron-LM, arXiv:1909.08053.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.distributed import collectives, wire
from narrowgauge.distributed.pipeline_run import Places
from narrowgauge.distributed.stages import StagedGPT, StagedSequential
from narrowgauge.numerics.formats import FP32
from narrowgauge.recipes.spec import CastSpec
from narrowgauge.tensors.local import local
from narrowgauge.tensors.quantized import QuantizedTensor
from narrowgauge.tensors.shares import set_share
from narrowgauge.tensors.values import values_of


class TiedTable:
    """The copies of a table on two ranks of a pipeline.

    ranks: the global ranks of both, the one of the first stage first. name: the parameter's, on both.
    """

    def __init__(self, ranks: tuple[int, int], name: str, group: dist.ProcessGroup) -> None:
        self.ranks, self.name, self.group = ranks, name, group

    @property
    def is_copy(self) -> bool:
        """True on the last stage."""
        return dist.get_rank() == self.ranks[1]

    def mark(self, p: Tensor) -> None:
        """Let norms count the values once, and random bits of both copies be the same."""
        set_share(p, (), counted=not self.is_copy, name=self.name)

    @torch.no_grad()
    def broadcast(self, p: Tensor) -> None:
        """Give the last stage the values of the first."""
        values = local(p)
        if values.is_meta:
            return
        sent = (values_of(values) if isinstance(values, QuantizedTensor) else values).contiguous()
        dist.broadcast(sent, self.ranks[0], group=self.group)
        wire.record("param_comm", "broadcast", sent.dtype, 0 if self.is_copy else sent.nbytes)
        if self.is_copy:
            values.copy_(sent)

    def set_aside(self, p: Tensor) -> Tensor | None:
        """Take away the gradient of the steps before, which is a sum of both copies' already; None: there is none."""
        earlier, p.grad = p.grad, None
        return earlier

    @torch.no_grad()
    def sum_gradients(self, p: Tensor, spec: CastSpec | None, earlier: Tensor | None) -> None:
        """Replace the wide gradients of both copies by their sum, the same bits on both. spec: what travels.

        earlier: what `set_aside` took away, to which the sum is added.
        """
        if not p.requires_grad:
            return
        assert p.grad is not None
        grad, spec = local(p.grad), spec or CastSpec(FP32)
        total = collectives.all_reduce(grad.float(), spec, self.group, "grad_comm", average=False).wait()
        grad.copy_(total.view(grad.shape))
        if earlier is not None:
            kept = local(earlier)
            grad.add_(values_of(kept) if isinstance(kept, QuantizedTensor) else kept)


def tie_of(model: StagedGPT | StagedSequential, places: Places) -> TiedTable | None:
    """The table that this rank's stage shares with another rank's; None where there is none."""
    first, last = places.of_stage[0], places.of_stage[-1]
    if not isinstance(model, StagedGPT) or model.tied_copy is None or first == last:
        return None
    ranks = (dist.get_global_rank(places.group, first), dist.get_global_rank(places.group, last))
    # only these two call it
    is_all = dist.get_world_size(places.group) == 2
    group = places.group if is_all else dist.new_group(list(ranks), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)  # this rank is one of them
    return TiedTable(ranks, "embedding.weight", group)
