"""Whole parameters parted over replicas: each rank keeps the state of its own, steps them, and sends what they became.

FP8-LM's form of ZeRO stage 1 (Peng et al. 2023, arXiv:2310.18313, section 2.3): a tensor with one scale stays whole, so
that its scale does. Masters, moments and, where fewer bits travel than a parameter holds, a copy of all of its digits
stay with its owner; what the model holds is the same on all ranks, the owner's too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge.distributed import codec, wire, wire_watch
from narrowgauge.distributed.collectives import Group, Pending, start_gather
from narrowgauge.optim.base import MASTER, LowPrecisionOptimizer
from narrowgauge.optim.update import is_residual, read
from narrowgauge.recipes.spec import CastSpec, Recipe
from narrowgauge.tensors.local import local
from narrowgauge.tensors.quantized import QuantizedTensor
from narrowgauge.tensors.values import as_bytes

ROLE = "param_comm"
RECEIVED_BYTES = 1 << 26  # of all ranks at once: what an exchange takes beside the parameters, twice
_ATTRIBUTE = "_narrowgauge_partition"


def owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank of each tensor: in falling size, each to the least loaded rank, the first of several.

    Source: FP8-LM, algorithm 1.
    """
    loads, found = [0] * ranks, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):  # stable: equal ones in their order
        found[i] = loads.index(min(loads))
        loads[found[i]] += sizes[i]
    return found


class Mark:
    """What `request` leaves on a model. A pickled one has lost its group: that model is one of a single process."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> Mark:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def request(model: nn.Module, group: Group) -> None:
    """Let `prepare` part the optimizer's whole parameters over a group whose ranks have all of the model."""
    setattr(model, _ATTRIBUTE, Mark(group))


def partition_of(model: nn.Module, optimizer: LowPrecisionOptimizer | None, recipe: Recipe) -> WholeTensors | None:
    """What was requested for a model, for its optimizer; None where nothing was, or there is but one rank."""
    mark: Mark | None = model.__dict__.get(_ATTRIBUTE)
    if mark is None or optimizer is None or dist.get_world_size(mark.group) == 1:
        return None
    return WholeTensors(optimizer.parameters(), recipe, mark.group)


def is_requested(model: nn.Module) -> bool:
    """True where `prepare` is to part the optimizer's parameters."""
    return model.__dict__.get(_ATTRIBUTE) is not None


class _Entry(NamedTuple):
    """A parameter on the wire. spec: by which it is encoded; None: as it is stored."""

    p: Tensor
    spec: CastSpec | None
    size_bytes: int


class WholeTensors:
    """`optim.state.Partition`: whose each parameter is, and what travels after a step.

    Parameters below `recipe.min_state_size` values, those of at most 8 bits (FP8-LM's O3) and those that have the dtype
    of the recipe's `param_comm` travel as they are stored, all others by `param_comm`.
    """

    def __init__(self, parameters: Iterable[Tensor], recipe: Recipe, group: Group) -> None:
        self._recipe, self._group = recipe, group
        self._spec = codec.spec_of(recipe, ROLE)
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        listed = list(parameters)
        found = owners([p.numel() for p in listed], self._ranks)
        self._owner: dict[Tensor, int] = dict(zip(listed, found, strict=True))

    def owner(self, p: Tensor) -> int:
        """The rank in the group that steps `p`: for one that came later, the rank with the least."""
        if p not in self._owner:
            loads = [0] * self._ranks
            for each, rank in self._owner.items():
                loads[rank] += each.numel()
            self._owner[p] = loads.index(min(loads))
        return self._owner[p]

    def owns(self, p: Tensor) -> bool:
        """True where this rank steps `p`."""
        return self.owner(p) == self._rank

    def hand_over(self, old: Tensor, new: Tensor) -> None:
        """Let `new`, which is to replace `old`, have its owner."""
        self._owner = {new if p is old else p: rank for p, rank in self._owner.items()}

    def needs_copy(self, p: Tensor) -> bool:
        """True where less of `p` travels than it holds."""
        return self._travels_by(p) is not None

    def _travels_by(self, p: Tensor) -> CastSpec | None:
        held = local(p)
        is_narrow = isinstance(held, QuantizedTensor) and held.spec.format.bits <= 8
        is_plain = not isinstance(held, QuantizedTensor) and self._spec == CastSpec(self._spec.format)
        if p.numel() < self._recipe.min_state_size or is_narrow:
            return None
        return None if is_plain and held.dtype is self._spec.format.dtype else self._spec

    @torch.no_grad()
    def exchange(self, optimizer: LowPrecisionOptimizer) -> None:
        """Send what this rank has stepped, and take what others have: all ranks call it."""
        waiting: tuple[list[list[_Entry]], Pending] | None = None
        for sent in self._rounds(optimizer.parameters()):
            size = max(sum(entry.size_bytes for entry in entries) for entries in sent)
            own = [_encoded(entry, optimizer) for entry in sent[self._rank]]
            buffer = torch.zeros(size, dtype=torch.uint8, device=next(filter(None, sent))[0].p.device)
            if own:
                torch.cat(own, out=buffer[: sum(map(len, own))])
            received = buffer.new_empty(self._ranks * size)
            work = start_gather(received, buffer, group=self._group, async_op=True)
            self._record(sent[self._rank])
            if waiting is not None:
                self._take(*waiting, optimizer)
            waiting = (sent, Pending(work, partial(received.view, self._ranks, size)))
        if waiting is not None:
            self._take(*waiting, optimizer)

    def _rounds(self, parameters: Iterable[Tensor]) -> list[list[list[_Entry]]]:
        """The entries of each rank, so many bytes of each at a time: the same on all ranks."""
        limit = RECEIVED_BYTES // self._ranks
        rounds: list[list[list[_Entry]]] = []
        sent_bytes = [0] * self._ranks
        for p in parameters:
            rank, spec = self.owner(p), self._travels_by(p)
            size = codec.wire_bytes(p.numel(), spec) if spec else sum(part.nbytes for part in _parts(local(p)))
            at = sent_bytes[rank] // limit
            while len(rounds) <= at:
                rounds.append([[] for _ in range(self._ranks)])
            rounds[at][rank].append(_Entry(p, spec, size))
            sent_bytes[rank] += size
        return [each for each in rounds if any(each)]

    def _record(self, entries: list[_Entry]) -> None:
        for p, spec, size in entries:
            dtype = codec.dtype_of(spec) if spec else _parts(local(p))[0].dtype
            wire.record(ROLE, "all_gather", dtype, size * (self._ranks - 1))

    def _take(self, sent: list[list[_Entry]], arriving: Pending, optimizer: LowPrecisionOptimizer) -> None:
        received = arriving.wait()
        for rank, entries in enumerate(sent):
            at = 0
            for entry in entries:
                if rank != self._rank or entry.spec is not None:
                    _decode(entry, received[rank, at : at + entry.size_bytes])
                if rank == self._rank and optimizer.state.get(entry.p):
                    optimizer.mark_written(entry.p)
                at += entry.size_bytes


def _parts(held: Tensor) -> list[Tensor]:
    """The tensors that hold what is stored."""
    return [held.codes, held.dequant_scale, held.amax] if isinstance(held, QuantizedTensor) else [held.detach()]


def _encoded(entry: _Entry, optimizer: LowPrecisionOptimizer) -> Tensor:
    """What travels of a parameter of this rank: uint8 [size_bytes]."""
    held = optimizer.held(entry.p)
    if entry.spec is None:
        return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in _parts(held)])
    master = optimizer.state.get(entry.p, {}).get(MASTER)
    # a residual completes the value, so that it is rounded once; of a copy the parameter is the rounded value
    digits = master.to(held.device) if master is not None and is_residual(master) else None
    wire_watch.sends(entry.p)
    return codec.encode(read(held, digits).reshape(1, -1), entry.spec)[0]


def _decode(entry: _Entry, received: Tensor) -> None:
    """Write what has travelled into a parameter."""
    held = local(entry.p)
    if entry.spec is not None:
        held.detach().copy_(codec.decode(received.unsqueeze(0), held.numel(), entry.spec).view(held.shape))
        return
    at = 0
    for part in _parts(held):
        raw = received[at : at + part.nbytes].clone()  # at an address that suits the dtype
        as_bytes(part).copy_(as_bytes(raw.view(part.dtype)).view(part.shape))
        at += part.nbytes
    torch.autograd.graph.increment_version(entry.p)  # of a QuantizedTensor the parts alone were written
