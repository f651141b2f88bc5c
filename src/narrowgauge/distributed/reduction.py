"""The mean of one bucket of gradients over a group, in three steps that every rank takes in the same order.

`launch` starts an all-to-all of the parts; `gather` waits for it, sums this rank's part in float32, divides, rounds
once, and starts the all-gather of the parts; `finish` waits for that. In front of each part that goes out stands a
byte for every piece: whether this rank has a gradient of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.distributed import codec, wire, wire_watch
from narrowgauge.distributed.buckets import ALIGNMENT, Bucket, Segment
from narrowgauge.distributed.collectives import Group, start_gather
from narrowgauge.numerics import kernels, philox, scaling
from narrowgauge.numerics.scaling import ScaleRule
from narrowgauge.recipes.spec import CastSpec
from narrowgauge.tensors.quantized import QuantizedTensor, quantize

ROLE = "grad_comm"
WHOLE = 1 << 18  # values of a parameter that are cast at once: 1 MiB in float32


class Row(NamedTuple):
    """`numel` values of a parameter from value `start` on, as the bytes of one row of the codec."""

    start: int
    numel: int
    data: Tensor


class Reduction:
    """One bucket under way. Pieces that are not put count as zeros."""

    def __init__(self, bucket: Bucket, group: Group, device: torch.device) -> None:
        self.bucket = bucket
        self._group = group
        self._ranks = dist.get_world_size(group)
        # one for all casts: every rank draws as often, or their generators would part
        self._key = philox.draw_key(device) if bucket.spec.is_stochastic else None
        self._head = -(-len(bucket.pieces) // ALIGNMENT) * ALIGNMENT
        # bytes of zeros are values of zero in every codec
        self._sent = torch.zeros(self._ranks, self._head + bucket.part_bytes, dtype=torch.uint8, device=device)
        self._received: Tensor | None = None
        self._work: dist.Work | None = None
        self._here: set[int] = set()

    @property
    def is_full(self) -> bool:
        """Whether every piece was put."""
        return len(self._here) == len(self.bucket.pieces)

    def put(self, place: int, values: Tensor) -> None:
        """Enter this rank's values of one piece: floating, flat, in logical order."""
        bucket = self.bucket
        first = bucket.pieces[place].start
        for rank, segment in bucket.segments[place]:
            row = values[segment.start - first : segment.start - first + segment.numel]
            start = self._head + segment.offset
            out = self._sent[rank, start : start + codec.wire_bytes(segment.numel, bucket.spec)]
            codec.encode(row.unsqueeze(0), bucket.spec, self._key, stream=self._stream(rank, segment, 0), out=out)
        self._sent[:, place] = 1
        self._here.add(place)

    def launch(self) -> None:
        """Send every rank its part."""
        self._received = torch.empty_like(self._sent)
        self._work = dist.all_to_all_single(self._received, self._sent, group=self._group, async_op=True)
        sent_bytes = self._sent[0].numel() * (self._ranks - 1)
        wire.record(ROLE, "all_to_all", codec.dtype_of(self.bucket.spec), sent_bytes)

    def gather(self) -> None:
        """Average this rank's part, and start to send it to all."""
        assert self._work is not None and self._received is not None
        self._work.wait()
        wire_watch.sends(ROLE)
        bucket, received = self.bucket, self._received
        mean = torch.zeros(bucket.part_bytes, dtype=torch.uint8, device=received.device)
        for segment in bucket.parts[dist.get_rank(self._group)]:
            size = codec.wire_bytes(segment.numel, bucket.spec)
            rows = received[:, self._head + segment.offset :][:, :size]
            out, stream = mean[segment.offset :][:size], self._stream(dist.get_rank(self._group), segment, 1)
            codec.reduce_and_encode(rows, segment.numel, bucket.spec, self._ranks, self._key, stream=stream, out=out)
        self._users = received[:, : len(bucket.pieces)].clone()
        self._sent, self._received = mean, mean.new_empty(self._ranks * mean.numel())
        self._work = start_gather(self._received, mean, group=self._group, async_op=True)
        wire.record(ROLE, "all_gather", codec.dtype_of(bucket.spec), mean.numel() * (self._ranks - 1))

    def finish(self) -> list[list[Row]]:
        """The mean of each piece, as rows of the codec that are views of one buffer."""
        assert self._work is not None and self._received is not None
        self._work.wait()
        gathered, spec = self._received.view(self._ranks, -1), self.bucket.spec
        found: list[list[Row]] = []
        for place in range(len(self.bucket.pieces)):
            rows = []
            for rank, segment in self.bucket.segments[place]:
                end = segment.offset + codec.wire_bytes(segment.numel, spec)
                rows.append(Row(segment.start, segment.numel, gathered[rank, segment.offset : end]))
            found.append(rows)
        return found

    def _stream(self, part: int, segment: Segment, phase: int) -> int:
        """The stream of a cast's random bits: no two casts of a bucket share one, not on other ranks either."""
        if self._key is None:
            return 0
        parts = self.bucket.parts
        number = sum(map(len, parts[:part])) + parts[part].index(segment)
        return 2 * (dist.get_rank(self._group) * sum(map(len, parts)) + number) + phase

    def is_used(self, place: int) -> bool:
        """After `gather`: whether any rank put the piece. Waits for the device only if this one did not."""
        return place in self._here or bool(self._users[:, place].any())


def wide_values(rows: Sequence[Row], sent: CastSpec, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The values of all rows of a parameter, in `dtype`. sent: the spec by which they travelled."""
    values = torch.empty(shape.numel(), dtype=dtype, device=rows[0].data.device)
    for row in rows:
        codec.decode(row.data.unsqueeze(0), row.numel, sent, out=values[row.start : row.start + row.numel])
    return values.view(shape)


def cast_values(
    rows: Sequence[Row], sent: CastSpec, shape: torch.Size, dtype: torch.dtype, spec: CastSpec
) -> QuantizedTensor:
    """`quantize(wide_values(...), spec)`, the same bits; of a large parameter without its wide values, row by row."""
    by_rows = shape.numel() > WHOLE and not spec.in_blocks and not spec.is_stochastic and spec.format.has_nan
    if not by_rows or not isinstance(spec.scale, ScaleRule) or not spec.is_scaled:
        return quantize(wide_values(rows, sent, shape, dtype), spec)
    amax = scaling.tensor_amax(torch.stack([kernels.amax(_values_of(row, sent)) for row in rows]))
    quant_scale = scaling.quant_scale_of(amax, spec.format, spec.scale)
    codes = torch.empty(shape.numel(), dtype=spec.format.dtype, device=amax.device)
    for row in rows:
        cast = kernels.quantize(_values_of(row, sent), quant_scale, spec.format, saturating=True)
        assert cast.codes is not None
        codes[row.start : row.start + row.numel].view(torch.uint8).copy_(cast.codes.view(torch.uint8))
    return QuantizedTensor(codes.view(shape), scaling.dequant_scale_of(quant_scale), spec, dtype, amax)


def _values_of(row: Row, sent: CastSpec) -> Tensor:
    return codec.decode(row.data.unsqueeze(0), row.numel, sent)[0]
