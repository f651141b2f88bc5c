"""Which values of which parameters travel together in the reduction of gradients: a plan, the same on every rank.

A bucket is cut into as many parts as there are ranks, each of whole blocks, and rank r sums part r. Blocks begin at the
start of each parameter and never hold values of two, so that no bit of a result depends on how parameters are packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from narrowgauge.distributed import codec
from narrowgauge.recipes.spec import CastSpec

# values of a bucket: enough of them to outweigh a collective's latency, and a small part of a model's gradients
LEAST, MOST, OF_ALL = 1 << 18, 1 << 22, 1 / 32
ALIGNMENT = 16  # bytes, of the rows within a part: any dtype of scales can be viewed there


class Segment(NamedTuple):
    """Consecutive values of a parameter, in logical order, which travel as one row of the codec.

    start: the first value within the parameter. offset: the row's first byte within the part.
    """

    start: int
    numel: int
    offset: int


class Piece(NamedTuple):
    """Values `start` to `stop` of parameter number `parameter`."""

    parameter: int
    start: int
    stop: int


class Bucket(NamedTuple):
    """Pieces of parameters that travel by one spec. parts: the segments that each rank sums; part_bytes: of the longest
    part. segments: of each piece, (part, segment) in order."""

    spec: CastSpec
    pieces: tuple[Piece, ...]
    parts: tuple[tuple[Segment, ...], ...]
    part_bytes: int
    segments: tuple[tuple[tuple[int, Segment], ...], ...]


def bucket_values(parameters: int) -> int:
    """How many values a bucket holds, for a model of so many parameters."""
    return min(MOST, max(LEAST, int(parameters * OF_ALL)))


def plan(sizes: Sequence[int], specs: Sequence[CastSpec], ranks: int, most_values: int) -> list[Bucket]:
    """Buckets of about `most_values` values for parameters of these sizes, in the order in which they are launched.

    sizes, specs: values of each parameter and how they travel, in the order in which gradients are expected. A larger
    parameter is spread over several buckets, an empty one is in none. Those of one spec share a bucket; it comes where
    its last one is expected.
    """
    found: list[Bucket] = []
    begun: dict[CastSpec, list[Piece]] = {}
    for parameter, (size, spec) in enumerate(zip(sizes, specs, strict=True)):
        unit = codec.block_of(spec)
        most = max(most_values // unit, 1) * unit
        start = 0
        while start < size:
            pieces = begun.setdefault(spec, [])
            room = most - sum(-(-(piece.stop - piece.start) // unit) * unit for piece in pieces)
            stop = min(start + room, size)
            pieces.append(Piece(parameter, start, stop))
            start = stop
            if room - (stop - pieces[-1].start) < unit:
                found.append(_bucket(spec, begun.pop(spec), ranks))
    rest = sorted(begun.items(), key=lambda entry: entry[1][-1].parameter)
    return found + [_bucket(spec, pieces, ranks) for spec, pieces in rest]


def _bucket(spec: CastSpec, pieces: Sequence[Piece], ranks: int) -> Bucket:
    """Deal whole blocks to the ranks in order, as evenly as they go."""
    unit = codec.block_of(spec)
    units = sum(-(-(piece.stop - piece.start) // unit) for piece in pieces)
    share = -(-units // ranks)
    parts: list[list[Segment]] = [[] for _ in range(ranks)]
    segments: list[list[tuple[int, Segment]]] = [[] for _ in pieces]
    ends, dealt = [0] * ranks, 0
    for place, piece in enumerate(pieces):
        start = piece.start
        while start < piece.stop:
            rank = dealt // share
            numel = min(piece.stop - start, ((rank + 1) * share - dealt) * unit)
            segment = Segment(start, numel, ends[rank])
            parts[rank].append(segment)
            segments[place].append((rank, segment))
            ends[rank] += -(-codec.wire_bytes(numel, spec) // ALIGNMENT) * ALIGNMENT
            start += numel
            dealt += -(-numel // unit)
    return Bucket(spec, tuple(pieces), tuple(map(tuple, parts)), max(ends), tuple(map(tuple, segments)))
