"""Parts of saved tensors put together anew, for a process that holds other parts than those that were saved.

The piece that a process had before is taken bit for bit. Plain tensors are so in every layout. Codes are, where tiles
are parts of rows and the pieces were and are cut into whole rows of tiles, or where all pieces have one and the same
scale. Everything else is decoded: float32, for the caller to cast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.errors import CheckpointError
from narrowgauge.numerics.scaling import NVFP4
from narrowgauge.recipes.serialize import spec_from_dict
from narrowgauge.recipes.spec import CastSpec
from narrowgauge.tensors.packed import PackedTensor
from narrowgauge.tensors.quantized import QuantizedTensor
from narrowgauge.train.distributed_checkpoint_index import PARTS, Entry, Index, Piece, Stored, keys_of
from narrowgauge.train.distributed_checkpoint_pieces import Box, Place
from narrowgauge.train.state import restore

Build = Callable[[], Tensor]


class Fetch(NamedTuple):
    """A part of a stored tensor to be read."""

    key: str
    box: Box


@dataclass
class Request:
    """What one process reads: ask first, let `targets` be filled, then build.

    index: of the checkpoint. rank: whose variants are meant.
    """

    index: Index
    rank: int
    targets: dict[Fetch, Tensor] = field(default_factory=dict)

    def node(self, node: Any) -> Callable[[], Any]:
        """A node with all of its tensors, whole."""
        fetches = {key: self._fetch(key) for key in keys_of(node)}
        return lambda: restore(node, {key: self.targets[fetch] for key, fetch in fetches.items()})

    def part(self, name: str, entry: Entry, place: Place) -> Build:
        """The values of an entry at a place: a plain tensor, QuantizedTensor or PackedTensor, of the place's sizes."""
        for piece in entry.pieces:
            if piece.place == place:
                return self.node(piece.node)
        if not place.numel:
            return lambda: torch.empty(place.sizes)
        met = [(piece, *boxes) for piece in entry.pieces for boxes in piece.place.common(place)]
        if sum(there.numel for _, _, there in met) != place.numel:
            raise CheckpointError(
                f"'{name}': expected the values {place} of {list(entry.shape)}, found no part with them"
            )
        cuts = [(there, self._cut(piece, inside)) for piece, inside, there in met]
        return lambda: _join(Box.whole(place.sizes), [(there, cut()) for there, cut in cuts])

    def _stored(self, key: str) -> Stored:
        stored = self.index.stored.get(self.index.key_for(key, self.rank))
        if stored is None:
            raise CheckpointError(f"tensor '{key}' is missing from the checkpoint")
        return stored

    def _fetch(self, key: str, box: Box | None = None) -> Fetch:
        key = self.index.key_for(key, self.rank)
        stored = self._stored(key)
        fetch = Fetch(key, box or Box.whole(stored.shape))
        if fetch not in self.targets:
            self.targets[fetch] = torch.empty(fetch.box.sizes, dtype=stored.dtype)
        return fetch

    def _cut(self, piece: Piece, inside: Box) -> Callable[[], _Cut]:
        """The values in a box of a piece's local tensor, or as many whole rows of tiles as hold them."""
        sizes = piece.place.sizes
        if "$tensor" in piece.node:
            key = piece.node["$tensor"]
            if self._stored(key).shape == sizes:
                fetch = self._fetch(key, inside)
                return lambda: _Cut(self.targets[fetch], Box.whole(inside.sizes))
            fetch = self._fetch(key)
            return lambda: _Cut(self.targets[fetch].reshape(sizes), inside)
        (mark,) = piece.node
        about = piece.node[mark]
        unit = _rows_of_tiles(spec_from_dict(about["spec"]), len(self._stored(about[PARTS[mark][0]]).shape))
        start, stop, rows = inside.offsets[0], inside.offsets[0] + inside.sizes[0], sizes[0]
        start, stop = (0, rows) if unit is None else (start // unit * unit, min(-(-stop // unit) * unit, rows))
        parts = {name: self._fetch(about[name], self._rows(about, name, start, stop, unit)) for name in PARTS[mark]}
        within = Box((inside.offsets[0] - start, *inside.offsets[1:]), inside.sizes)

        def build() -> _Cut:
            tensors = {about[name]: self.targets[fetch] for name, fetch in parts.items()}
            node = about if mark == "$quantized" else {**about, "shape": [stop - start, *about["shape"][1:]]}
            return _Cut(restore({mark: node}, tensors), within, (stop - start, *sizes[1:]))

        return build

    def _rows(self, about: Any, name: str, start: int, stop: int, unit: int | None) -> Box | None:
        """The part of codes or scales that belongs to rows start to stop; None: all."""
        shape = self._stored(about[name]).shape
        if unit is None or not shape:  # one scale for all
            return None
        step = unit if name == "dequant_scale" else 1
        rows = -(-stop // step) - start // step
        return Box((start // step,) + (0,) * (len(shape) - 1), (rows, *shape[1:]))


class _Cut(NamedTuple):
    """A value, whose shape may also be given, and the part of it that is meant."""

    value: Tensor
    inside: Box
    shape: tuple[int, ...] | None = None


def _rows_of_tiles(spec: CastSpec, dimensions: int) -> int | None:
    """Rows that can be cut off codes of so many dimensions without cutting a tile: a multiple; None: none can."""
    if dimensions < 2:
        return None
    if not spec.in_blocks or dimensions > 2:  # the first dimension is one of matrices
        return 1
    return spec.granularity.rows  # type: ignore[union-attr]


def _join(box: Box, cuts: list[tuple[Box, _Cut]]) -> Tensor:
    """The values of a local tensor, whose `box` is all of it, from pieces of given places there."""
    if len(cuts) == 1 and type(cuts[0][1].value) is Tensor and cuts[0][1].inside.sizes == cuts[0][1].value.shape:
        return cuts[0][1].value
    joined = _join_codes(box, sorted(cuts, key=lambda cut: cut[0].offsets))
    if joined is not None:
        return joined
    plain = all(type(cut.value) is Tensor for _, cut in cuts)
    result = torch.empty(box.sizes, dtype=cuts[0][1].value.dtype if plain else torch.float32)
    for there, cut in cuts:
        values = cut.value if type(cut.value) is Tensor else cut.value.dequantize(torch.float32)  # type: ignore[operator]
        values = values.reshape(cut.shape or values.shape)
        result[there.slices] = values[cut.inside.slices]
    return result


def _join_codes(box: Box, cuts: list[tuple[Box, _Cut]]) -> Tensor | None:
    """The codes of the pieces side by side, with their scales; None where they do not fit together."""
    first = cuts[0][1].value
    kind, values = type(first), [cut.value for _, cut in cuts]
    if not isinstance(first, QuantizedTensor | PackedTensor) or any(type(value) is not kind for value in values):
        return None
    held: list[Any] = values
    if any(value.spec != first.spec for value in held):
        return None
    # what all codes of a tensor are multiplied by; NaN is equal to nothing, and is cast anew
    common = [value.dequant_scale for value in held] if not first.spec.in_blocks else []
    common = [value.amax for value in held] if first.spec.scale is NVFP4 else common
    if any(not torch.equal(each, common[0]) for each in common):
        return None
    amax = torch.stack([value.amax for value in held]).amax()
    if not first.spec.in_blocks:
        return None if isinstance(first, PackedTensor) else _side_by_side(box, cuts, first, amax)
    return _below_one_another(box, cuts, first, amax)


def _side_by_side(box: Box, cuts: list[tuple[Box, _Cut]], first: QuantizedTensor, amax: Tensor) -> Tensor:
    """Codes of one scale."""
    codes = torch.empty(box.sizes, dtype=first.codes.dtype)
    for there, cut in cuts:
        held: Any = cut.value
        codes[there.slices] = held.codes.reshape(cut.shape or held.shape)[cut.inside.slices]
    return QuantizedTensor(codes, first.dequant_scale, first.spec, first.dtype, amax)


def _below_one_another(
    box: Box, cuts: list[tuple[Box, _Cut]], first: QuantizedTensor | PackedTensor, amax: Tensor
) -> Tensor | None:
    """Codes in tiles, where every piece has whole rows of what is wanted, and whole tiles."""
    unit = _rows_of_tiles(first.spec, first.ndim)
    if unit is None:
        return None
    for there, cut in cuts:
        is_whole = cut.inside == Box.whole(cut.shape or cut.value.shape) and there.sizes[1:] == box.sizes[1:]
        if not is_whole or there.offsets[0] % unit:
            return None
    values: list[Any] = [cut.value for _, cut in cuts]
    scales = torch.cat([value.dequant_scale for value in values])
    if isinstance(first, PackedTensor):
        shape = (sum(len(value) for value in values), *first.shape[1:])
        return PackedTensor(torch.cat([value.packed for value in values]), scales, amax, first.spec, shape)
    codes = torch.cat([value.codes.contiguous().view(torch.uint8) for value in values]).view(first.spec.format.dtype)
    return QuantizedTensor(codes, scales, first.spec, first.dtype, amax)
