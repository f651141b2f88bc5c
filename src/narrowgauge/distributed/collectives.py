"""Collectives of quantized values over any process group: codes and scales travel as bytes, sums are float32.

A reduction is an all-to-all of codes, a sum in float32 in the order of ranks, one division, one requantization with
fresh scales, and an all-gather of those codes: the bytes of a ring in that format, with neither under- nor overflow in
the sum, and the same bits on every rank and backend. Each function starts its communication and returns a `Pending`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from narrowgauge.distributed import codec, wire
from narrowgauge.recipes.spec import CastSpec

Group = dist.ProcessGroup | None  # None: all processes
# its name from torch 2.13 on; the older one is deprecated there
start_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending:
    """A collective under way. `wait` ends it and gives its result, once computed; `advance` goes one phase further."""

    def __init__(self, work: dist.Work | None, finish: Callable[[], Tensor | Pending]) -> None:
        self._work = work
        self._finish: Callable[[], Tensor | Pending] | None = finish
        self._result: Tensor | Pending | None = None

    def advance(self) -> None:
        """Wait for the phase under way and start the next: on every rank in the same order."""
        if self._finish is None:
            return
        if self._work is not None:
            self._work.wait()
        finish, self._finish = self._finish, None
        self._result = finish()

    def wait(self) -> Tensor:
        """The result."""
        self.advance()
        assert self._result is not None
        return self._result.wait() if isinstance(self._result, Pending) else self._result


def padded(numel: int, spec: CastSpec, ranks: int) -> int:
    """The length to which a reduction fills `numel` values with zeros: every rank's part is whole blocks."""
    multiple = ranks * codec.block_of(spec)
    return -(-numel // multiple) * multiple


def all_gather(values: Tensor, spec: CastSpec, group: Group, role: str, *, key: Tensor | None = None) -> Pending:
    """The values of all ranks, one row each: `values` [n], the same n on every rank, give float32 [ranks, n]."""
    ranks = dist.get_world_size(group)
    sent = codec.encode(values.reshape(1, -1), spec, key)
    received = sent.new_empty(ranks * sent.numel())
    work = start_gather(received, sent.flatten(), group=group, async_op=True)
    wire.record(role, "all_gather", codec.dtype_of(spec), sent.numel() * (ranks - 1))
    numel = values.numel()
    return Pending(work, lambda: codec.decode(received.view(ranks, -1), numel, spec))


def reduce_scatter(
    values: Tensor, spec: CastSpec, group: Group, role: str, *, average: bool = True, key: Tensor | None = None
) -> Pending:
    """This rank's part of the mean (or sum) over ranks: `values` [ranks * n] give float32 [n]; rank r has part r."""
    ranks = dist.get_world_size(group)
    sent = codec.encode(values.reshape(ranks, -1), spec, key)
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received, sent, group=group, async_op=True)
    wire.record(role, "all_to_all", codec.dtype_of(spec), sent.numel() * (ranks - 1) // ranks)
    numel = values.numel() // ranks
    return Pending(work, lambda: codec.reduce(received, numel, spec, ranks if average else 1))


def all_reduce(
    values: Tensor, spec: CastSpec, group: Group, role: str, *, average: bool = True, key: Tensor | None = None
) -> Pending:
    """The mean (or sum) over ranks, the same bits on each: `values` [n] give float32 [n]. Two phases, see `advance`."""
    ranks, numel = dist.get_world_size(group), values.numel()
    whole = F.pad(values.flatten(), (0, padded(numel, spec, ranks) - numel))
    first = reduce_scatter(whole, spec, group, role, average=average, key=key)

    def gather() -> Pending:
        second = all_gather(first.wait(), spec, group, role, key=key)
        return Pending(None, lambda: second.wait().flatten()[:numel])

    return Pending(first._work, gather)


def all_to_all(values: Tensor, spec: CastSpec, group: Group, role: str, *, key: Tensor | None = None) -> Pending:
    """Rows for every rank: `values` [ranks, n], row r to rank r, give float32 [ranks, n], row r from rank r."""
    ranks = dist.get_world_size(group)
    sent = codec.encode(values, spec, key)
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received, sent, group=group, async_op=True)
    wire.record(role, "all_to_all", codec.dtype_of(spec), sent.numel() * (ranks - 1) // ranks)
    numel = values.shape[1]
    return Pending(work, lambda: codec.decode(received, numel, spec))


def send(values: Tensor, spec: CastSpec, to: int, group: Group, role: str, *, key: Tensor | None = None) -> None:
    """Send values of any shape to rank `to` of the group; it calls `recv` with their shape."""
    buffer = codec.encode(values.reshape(1, -1), spec, key).flatten()
    dist.send(buffer, group=group, group_dst=to)
    wire.record(role, "send", codec.dtype_of(spec), buffer.numel())


def recv(shape: torch.Size, spec: CastSpec, source: int, group: Group, device: torch.device | str = "cpu") -> Tensor:
    """Values of `shape` from rank `source` of the group: float32."""
    buffer = torch.empty(codec.wire_bytes(shape.numel(), spec), dtype=torch.uint8, device=device)
    dist.recv(buffer, group=group, group_src=source)
    return codec.decode(buffer.view(1, -1), shape.numel(), spec).view(shape)
