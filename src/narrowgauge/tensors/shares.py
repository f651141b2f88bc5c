"""Which ranks hold a parameter's values, and which of them counts each: for norms over all processes.

The values of a parameter may be parted over ranks (shards), or be the same on several (replicas, tied copies). A norm
over all parameters of all ranks counts every value once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from narrowgauge.tensors.local import is_distributed

_GIVEN, _PLACED = "_narrowgauge_share", "_narrowgauge_place"


@dataclass(frozen=True)
class Share:
    """What of a norm this rank contributes for a parameter.

    groups: over which contributions add up, the same ones in the same order on all ranks of each: process groups (None:
    all processes), or Reducers over them. counted: False for values that another rank of these groups counts. name: of
    the values, the same on every rank that has them; "": the parameter's own name.
    """

    groups: tuple[Any, ...] = ()
    counted: bool = True
    name: str = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> Share:
        return self  # process groups cannot be copied

    def __reduce__(self) -> tuple[Any, ...]:
        return Share, ((), self.counted, self.name)  # nor do they mean anything to another process


def set_share(p: Tensor, groups: Sequence[Any], counted: bool = True, name: str = "") -> None:
    """Mark a parameter. For one of two tied copies, on the stages of a pipeline: counted=False, and the name of both.

    `distributed.counting.count_once` goes on from there: it knows the replicas.
    """
    setattr(p, _GIVEN, Share(tuple(groups), counted, name))


def place_share(p: Tensor, groups: Sequence[Any], counted: bool) -> None:
    """What follows from where the ranks of a run stand, beside the mark that `set_share` made: for `count_once`."""
    setattr(p, _PLACED, Share(tuple(groups), counted, given_share(p).name))


def given_share(p: Tensor) -> Share:
    """What `set_share` said; else a whole parameter of one process."""
    return getattr(p, _GIVEN, None) or Share()


def share_of(p: Tensor) -> Share:
    """What is known of a parameter: from where the ranks stand, from `set_share`, or from a DTensor's placements."""
    known = getattr(p, _PLACED, None) or getattr(p, _GIVEN, None)
    return known or Share(tuple(group for _, group in parted(p)))


def parted(p: Tensor) -> list[tuple[int, Any]]:
    """The mesh dimensions over which a DTensor's values are parted, each with its process group; else nothing."""
    if not is_distributed(p):
        return []
    whole: Any = p
    mesh = whole.device_mesh
    dims = [dim for dim, placement in enumerate(whole.placements) if not placement.is_replicate()]
    return [(dim, mesh.get_group(dim)) for dim in dims if mesh.size(dim) > 1]


def coordinates(p: Tensor) -> tuple[int, ...]:
    """Which of its parts this rank has: its place along each dimension over which the values are parted."""
    whole: Any = p
    return tuple(whole.device_mesh.get_local_rank(dim) for dim, _ in parted(p))
