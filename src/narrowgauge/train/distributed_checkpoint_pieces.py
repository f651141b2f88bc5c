"""Which part of a tensor a process holds: boxes in the coordinates of the whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

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

    def __str__(self) -> str:
        ranges = (f"{start}:{start + size}" for start, size in zip(self.offsets, self.sizes, strict=True))
        return f"[{', '.join(ranges)}]"


class Located(NamedTuple):
    """What a process holds of a tensor of `shape`: `value` (plain, QuantizedTensor or PackedTensor), its `box`."""

    value: Tensor
    shape: Shape
    box: Box


def located(name: str, value: Tensor) -> Located:
    """The local part of a tensor: of a DTensor its shard, of any other tensor all.

    Raises CheckpointError for a DTensor that is no single box, or that holds sums which are not taken yet.
    """
    if not is_distributed(value):
        held = local(value)
        return Located(held, tuple(held.shape), Box.whole(held.shape))
    held, shape = local(value), tuple(value.shape)
    try:
        # torch.distributed.checkpoint's own question to a tensor
        boxes = [Box(tuple(c.offsets), tuple(c.sizes)) for c in value.__create_chunk_list__()]  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise CheckpointError(f"'{name}': expected a tensor that is whole or cut, found {error}") from error
    if not held.numel():
        return Located(held, shape, Box((0,) * len(shape), tuple(held.shape)))
    if len(boxes) != 1 or boxes[0].numel != held.numel():
        raise CheckpointError(
            f"'{name}': expected one contiguous part of {list(shape)} on each rank, found {len(boxes)} parts for "
            f"{held.numel()} values: cut it into equal parts"
        )
    return Located(held, shape, boxes[0])


def _fields(box: Box) -> tuple[Shape, Shape]:
    return box.offsets, box.sizes
