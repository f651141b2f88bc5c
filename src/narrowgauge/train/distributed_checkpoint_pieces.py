"""Which part of a tensor a process holds: boxes in the coordinates of the whole.

Mostly one. A rank of tensor parallelism has a part of each section of fused layers, of q, k and v or gate and up: then
its boxes lie one after the other in its local tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from narrowgauge.distributed.sections import Sections
from narrowgauge.errors import CheckpointError
from narrowgauge.tensors.local import is_distributed, local

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A part of a tensor: where it begins, and how far it reaches, in each dimension."""

    offsets: Shape
    sizes: Shape

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Values in it."""
        return math.prod(self.sizes)

    def meet(self, other: Box) -> Box | None:
        """What both hold; None where that is nothing."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = [min(a + n, b + m) for a, n, b, m in zip(*_fields(self), *_fields(other), strict=True)]
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Box) -> Box:
        """The same part, in the coordinates of `outer`, which holds it."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What indexes it."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    def at(self, offsets: Sequence[int]) -> Box:
        """The same part, in coordinates in which the present origin has these offsets."""
        return Box(tuple(a + b for a, b in zip(self.offsets, offsets, strict=True)), self.sizes)

    def __str__(self) -> str:
        ranges = (f"{start}:{start + size}" for start, size in zip(self.offsets, self.sizes, strict=True))
        return f"[{', '.join(ranges)}]"


@dataclass(frozen=True)
class Place:
    """Where the values of a local tensor lie in the whole: in boxes, which follow one another along its `axis`."""

    boxes: tuple[Box, ...]
    axis: int = 0

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Place:
        """All of a tensor of `shape`."""
        return cls((Box.whole(shape),))

    @property
    def sizes(self) -> Shape:
        """Of the local tensor."""
        first = self.boxes[0].sizes
        if len(self.boxes) == 1:
            return first
        return (*first[: self.axis], sum(box.sizes[self.axis] for box in self.boxes), *first[self.axis + 1 :])

    @property
    def numel(self) -> int:
        """Values in all boxes."""
        return sum(box.numel for box in self.boxes)

    def parts(self) -> Iterator[tuple[Box, Box]]:
        """Every box, in the whole and in the local tensor."""
        start = [0] * len(self.boxes[0].sizes)
        for box in self.boxes:
            yield box, Box(tuple(start), box.sizes)
            if start:
                start[self.axis] += box.sizes[self.axis]

    def common(self, other: Place) -> Iterator[tuple[Box, Box]]:
        """What both hold, piece by piece: in the local tensor of this one, and of the other."""
        for box, inside in self.parts():
            for theirs, there in other.parts():
                met = box.meet(theirs)
                if met is not None:
                    yield met.within(box).at(inside.offsets), met.within(theirs).at(there.offsets)

    def __str__(self) -> str:
        return " and ".join(map(str, self.boxes))


class Located(NamedTuple):
    """What a process holds of a tensor of `shape`: a plain value, QuantizedTensor or PackedTensor, and its place."""

    value: Tensor
    shape: Shape
    place: Place


def located(name: str, value: Tensor, sections: Sections | None = None) -> Located:
    """The local part of a tensor: of a DTensor its shard, of any other tensor all.

    sections: of one whose own order, rank after rank, is not that of the whole.

    Raises CheckpointError for a DTensor that is no single box, or that holds sums which are not taken yet.
    """
    if not is_distributed(value):
        held = local(value)
        return Located(held, tuple(held.shape), Place.whole(held.shape))
    held, shape = local(value), tuple(value.shape)
    try:
        # torch.distributed.checkpoint's own question to a tensor
        boxes = [Box(tuple(c.offsets), tuple(c.sizes)) for c in value.__create_chunk_list__()]  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise CheckpointError(f"'{name}': expected a tensor that is whole or cut, found {error}") from error
    if not held.numel():
        return Located(held, shape, Place((Box((0,) * len(shape), tuple(held.shape)),)))
    if len(boxes) != 1 or boxes[0].numel != held.numel():
        raise CheckpointError(
            f"'{name}': expected one contiguous part of {list(shape)} on each rank, found {len(boxes)} parts for "
            f"{held.numel()} values: cut it into equal parts"
        )
    return Located(held, shape, _in_whole(boxes[0], sections))


def _in_whole(box: Box, sections: Sections | None) -> Place:
    if sections is None:
        return Place((box,))
    dim = sections.dim
    first = box.offsets[dim]
    ranges = sections.in_whole(first, first + box.sizes[dim])

    def along(begin: int, end: int) -> Box:
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim], sizes[dim] = begin, end - begin
        return Box(tuple(offsets), tuple(sizes))

    joined: list[tuple[int, int]] = []
    for begin, end in ranges:  # those that touch are one
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return Place(tuple(along(*each) for each in joined), dim if len(joined) > 1 else 0)


def _fields(box: Box) -> tuple[Shape, Shape]:
    return box.offsets, box.sizes
