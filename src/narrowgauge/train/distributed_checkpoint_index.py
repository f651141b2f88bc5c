"""What is in a checkpoint of many processes: `index.json`, and how the processes' parts of it are put together.

Every stored tensor is a plain one under a key of its own, `model/NAME` or `optimizer/NAME/KEY`, with `@` and the
offsets behind it where it is a part. A tensor of the run is an entry: its shape, and pieces, each with its place and a
node as `train.state` writes them, so that codes, scales and amax are separate plain tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from narrowgauge.errors import CheckpointError
from narrowgauge.train.distributed_checkpoint_pieces import Box, Place, Shape

INDEX = "index.json"
MODEL, OPTIMIZER = "model", "optimizer"
_TENSOR, _QUANTIZED, _PACKED = "$tensor", "$quantized", "$packed"
PARTS = {_QUANTIZED: ("codes", "dequant_scale", "amax"), _PACKED: ("packed", "dequant_scale", "amax")}


@dataclass(frozen=True)
class Stored:
    """A plain tensor in a file of the folder."""

    file: str
    name: str  # in the file
    dtype: torch.dtype
    shape: Shape


@dataclass(frozen=True)
class Piece:
    """A part of an entry. node: {"$tensor": key}, {"$quantized": ...} or {"$packed": ...}."""

    place: Place
    node: Any


@dataclass
class Entry:
    """A tensor of the run: its shape, and the pieces that are its parts, without overlaps."""

    shape: Shape
    pieces: list[Piece] = field(default_factory=list)


@dataclass
class OptimizerIndex:
    """groups: {"fields": node, "names": [...]} each. values: name -> key -> what is no tensor. rest: all else."""

    groups: list[dict[str, Any]]
    values: dict[str, dict[str, Any]]
    rest: Any


@dataclass
class Index:
    """What a folder holds.

    ranks: processes that wrote it. tensors: by `model/NAME` and `optimizer/NAME/KEY`. optimizer: None where none was
    saved. extra: the documents of `save`'s extra, each once. extra_of: which of them each rank gave. variants: keys
    whose tensor was not the same on all ranks -> rank -> the key under which its own is stored. stored: by key.
    """

    ranks: int
    tensors: dict[str, Entry]
    optimizer: OptimizerIndex | None
    extra: list[Any]
    extra_of: list[int]
    variants: dict[str, dict[int, str]] = field(default_factory=dict)
    stored: dict[str, Stored] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)  # versions and layout, for the reader of the file

    def extra_for(self, rank: int) -> Any:
        """The document of a rank; one of a larger world gets that of the rank modulo the number that wrote."""
        return self.extra[self.extra_of[rank % self.ranks]]

    def key_for(self, key: str, rank: int) -> str:
        """The key under which what a rank gave as `key` is stored; where it gave none, the lowest one's that did."""
        variants = self.variants.get(key)
        if variants is None:
            return key
        return variants.get(rank % self.ranks) or variants[min(variants)]

    def names(self, part: str) -> dict[str, Entry]:
        """Entries by their name below `model/` or `optimizer/`."""
        return {key.partition("/")[2]: entry for key, entry in self.tensors.items() if key.startswith(f"{part}/")}

    def aliases(self, name: str) -> Iterator[str]:
        """Other names of the model's tensor `name`, which share its memory."""
        own = self.tensors.get(f"{MODEL}/{name}")
        for key, entry in self.tensors.items():
            if own is not None and entry is not own and key.startswith(f"{MODEL}/") and entry == own:
                yield key.partition("/")[2]

    def to_json(self) -> str:
        """As `index.json` has it."""
        document = asdict(self)
        document["stored"] = {
            key: {**asdict(each), "dtype": str(each.dtype).removeprefix("torch.")} for key, each in self.stored.items()
        }
        return json.dumps({"format": "narrowgauge distributed", **document}, allow_nan=False)

    @classmethod
    def read(cls, folder: Path) -> Index:
        """Read `index.json`. Raises CheckpointError where it is not one, or a part of a tensor is nowhere."""
        try:
            document = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            tensors = {
                key: Entry(
                    tuple(entry["shape"]), [Piece(_place(piece["place"]), piece["node"]) for piece in entry["pieces"]]
                )
                for key, entry in document["tensors"].items()
            }
            stored = {
                key: Stored(each["file"], each["name"], _dtype(each["dtype"]), tuple(each["shape"]))
                for key, each in document["stored"].items()
            }
            variants = {key: {int(r): k for r, k in each.items()} for key, each in document["variants"].items()}
            optimizer = document["optimizer"]
            index = cls(
                document["ranks"],
                tensors,
                None if optimizer is None else OptimizerIndex(**optimizer),
                document["extra"],
                document["extra_of"],
                variants,
                stored,
                document["about"],
            )
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise CheckpointError(f"{folder / INDEX}: expected a checkpoint's index, found {error!r}") from error
        for key, entry in index.tensors.items():
            check_covered(f"{folder}: '{key}'", entry)
        return index


def check_covered(what: str, entry: Entry) -> None:
    """Raise CheckpointError where the pieces of an entry are not all of it, each value once."""
    boxes = [box for piece in entry.pieces for box in piece.place.boxes]
    whole = Box.whole(entry.shape)
    outside = [box for box in boxes if box.meet(whole) != box]
    held = sum(box.numel for box in boxes)
    if outside or held != whole.numel:
        found = ", ".join(map(str, boxes)) or "nothing"
        raise CheckpointError(
            f"{what} of shape {list(entry.shape)}: expected parts that are all of it, found {found}: a rank's part is "
            "missing"
        )


def keys_of(node: Any) -> Iterator[str]:
    """The keys of all tensors in a node."""
    if isinstance(node, list):
        for item in node:
            yield from keys_of(item)
    elif isinstance(node, dict):
        if _TENSOR in node:
            yield node[_TENSOR]
            return
        for mark, names in PARTS.items():
            if mark in node:
                yield from (node[mark][name] for name in names)
                return
        yield from keys_of(list(node.values()))


def renamed(node: Any, names: dict[str, str]) -> Any:
    """A node with other keys."""
    if isinstance(node, list):
        return [renamed(item, names) for item in node]
    if not isinstance(node, dict):
        return node
    if _TENSOR in node:
        return {_TENSOR: names[node[_TENSOR]]}
    for mark, parts in PARTS.items():
        if mark in node:
            return {mark: {**node[mark], **{part: names[node[mark][part]] for part in parts}}}
    return {key: renamed(item, names) for key, item in node.items()}


def _place(document: Any) -> Place:
    boxes = tuple(Box(tuple(each["offsets"]), tuple(each["sizes"])) for each in document["boxes"])
    return Place(boxes, document["axis"])


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found
