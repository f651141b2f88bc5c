"""Which part of a parameter each tensor-parallel rank has, in the coordinates of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sections:
    """One dimension of a parameter in sections, such as the rows of q, k and v: each rank has a part of every section.

    dim: the dimension. sizes: of its sections, in order. ranks: parts of each section, by torch.chunk's rule: all but
    the last have ceil(size / ranks) entries. A rank's parts lie one after the other in its local tensor. With several
    sections a DTensor's own order, rank after rank, is not that of the whole: `join` is.
    """

    dim: int
    sizes: tuple[int, ...]
    ranks: int

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """Where in the whole the parts of `rank` begin and end, in the order of its local tensor."""
        found, start = [], 0
        for size in self.sizes:
            part = -(-size // self.ranks)
            begin, end = (min(at * part, size) for at in (rank, rank + 1))
            found.append((start + begin, start + end))
            start += size
        return found

    def in_whole(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Where in the whole the entries `begin` to `end` of a DTensor's own order are, rank after rank: the ranges in
        that order, for what reads a DTensor's chunks, such as a checkpoint."""
        found, at = [], 0
        for start, stop in (each for rank in range(self.ranks) for each in self.ranges(rank)):
            first, last = max(begin - at, 0), min(end - at, stop - start)
            if first < last:
                found.append((start + first, start + last))
            at += stop - start
        return found

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """The part of `rank`: a copy, so that the whole can be freed."""
        parts = [whole.narrow(self.dim, begin, end - begin) for begin, end in self.ranges(rank)]
        return torch.cat(parts, dim=self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole, from the local tensors of all ranks in order."""
        shape = list(parts[0].shape)
        shape[self.dim] = sum(self.sizes)
        whole = parts[0].new_empty(shape)
        for rank, part in enumerate(parts):
            at = 0
            for begin, end in self.ranges(rank):
                whole.narrow(self.dim, begin, end - begin).copy_(part.narrow(self.dim, at, end - begin))
                at += end - begin
        return whole
