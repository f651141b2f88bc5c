"""What is asked of a group of processes: maxima, for scales and for decisions, and single values of all of them."""

from __future__ import annotations

import zlib
from typing import Any, Protocol, Self

import torch
from torch import Tensor

TEXT_BYTES = 256  # of a name that ranks agree on


class Reducer(Protocol):
    """Combines values over a group, so that every rank takes the same scale, and the same decision."""

    def max_(self, amax: Tensor) -> Tensor:
        """Replace `amax` (float32, any shape, the same on every rank) by its maximum over the group, and return it.

        A NaN on any rank must arrive on all of them: a maximum that drops NaN lets the ranks disagree about a step.
        """
        ...

    def gather(self, values: Tensor) -> Tensor:
        """The values of all ranks (any shape and dtype, the same on every rank), in the order of ranks: [ranks, ...].

        What is computed from them has the same bits on every rank, which a sum by the backend need not.
        """
        ...


class SingleProcess:
    """The group of one: the maximum over it is the value itself."""

    def max_(self, amax: Tensor) -> Tensor:
        """Return `amax` as it is."""
        return amax

    def gather(self, values: Tensor) -> Tensor:
        """Return `values` as those of the one rank."""
        return values.unsqueeze(0)


SINGLE_PROCESS = SingleProcess()


class GroupReducer:
    """The reducer over a torch.distributed process group; None: all processes."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def max_(self, amax: Tensor) -> Tensor:
        """Replace non-negative float32 values by their maximum over the group, and return them; NaN reaches all.

        As integers: the bits of non-negative floats are in their order, NaN above infinity, on every backend.
        """
        import torch.distributed as dist

        bits = amax.detach().abs().view(torch.int32).contiguous()
        dist.all_reduce(bits, dist.ReduceOp.MAX, group=self.group)
        ranks = dist.get_world_size(self.group)
        self.sent("all_reduce", torch.int32, 2 * bits.nbytes * (ranks - 1) // ranks)
        return amax.copy_(bits.view(torch.float32))

    def gather(self, values: Tensor) -> Tensor:
        """The values of all ranks, in the order of ranks: [ranks, ...]."""
        import torch.distributed as dist

        values = values.detach().contiguous()
        found = [torch.empty_like(values) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(found, values, group=self.group)
        self.sent("all_gather", values.dtype, values.nbytes * (len(found) - 1))
        return torch.stack(found)

    def over(self, group: Any) -> Self:
        """The same over another group."""
        return type(self)(group)

    def sent(self, collective: str, dtype: torch.dtype, size: int) -> None:
        """Told of every collective, and of the bytes that this rank sent: for who counts them."""


def any_of(flag: bool, reducer: Reducer, device: torch.device | str) -> bool:
    """True on all ranks where `flag` is on one of them. device: one that the group's backend works on."""
    if reducer is SINGLE_PROCESS:
        return flag
    return bool(reducer.max_(torch.full((1,), float(flag), device=device)))


def agreed_text(text: str, reducer: Reducer, device: torch.device | str) -> str:
    """The text of one of the ranks that have one, cut to 256 bytes, the same on all; "" where none has."""
    if reducer is SINGLE_PROCESS:
        return text
    raw = text.encode()[:TEXT_BYTES]
    # a number below 2^24, which float32 holds; where it is the same on two ranks, so is the text
    ticket = 1.0 + (zlib.crc32(raw) >> 9) if raw else 0.0
    highest = reducer.max_(torch.full((1,), ticket, device=device)).item()
    letters = torch.zeros(TEXT_BYTES, device=device)
    if raw and ticket == highest:
        letters[: len(raw)] = torch.tensor(list(raw), dtype=torch.float32)
    return bytes(reducer.max_(letters).int().tolist()).rstrip(b"\0").decode(errors="replace")
