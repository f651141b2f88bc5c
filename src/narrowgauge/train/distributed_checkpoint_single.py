"""A checkpoint of one process as if it were one of many that one rank wrote, so that many can read parts of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from narrowgauge.errors import CheckpointError
from narrowgauge.train.distributed_checkpoint_index import (
    INDEX,
    MODEL,
    OPTIMIZER,
    PARTS,
    Entry,
    Index,
    OptimizerIndex,
    Piece,
    Stored,
    keys_of,
    renamed,
)
from narrowgauge.train.distributed_checkpoint_pieces import Place
from narrowgauge.train.state import restore


def open_index(folder: Path) -> Index:
    """The index of a folder, whoever wrote it. Raises CheckpointError where it is no checkpoint."""
    return Index.read(folder) if (folder / INDEX).is_file() else index_of_one_process(folder)


def index_of_one_process(folder: Path) -> Index:
    """The index of a folder that one process wrote. Raises CheckpointError where it is no such folder."""
    try:
        document = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        stored = {key: each for part in (MODEL, OPTIMIZER, "extra") for key, each in _headers(folder, part)}
        nodes = {part: _with_part(document[part], part) for part in (MODEL, OPTIMIZER, "extra")}
        tensors = {f"{MODEL}/{name}": _entry(node, stored, None) for name, node in _items(nodes[MODEL])}
        optimizer = None if nodes[OPTIMIZER] is None else _optimizer(nodes[OPTIMIZER], tensors, stored)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: expected a checkpoint of narrowgauge, found {error!r}") from error
    return Index(1, tensors, optimizer, [nodes["extra"]], [0], stored=stored)


def _headers(folder: Path, part: str) -> list[tuple[str, Stored]]:
    name = f"{part}.safetensors"
    found = []
    with safe_open(folder / name, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118  # it is no dict
            whole = file.get_slice(key)
            shape = tuple(whole.get_shape())
            first: torch.Tensor = whole[:0] if shape else file.get_tensor(key)
            found.append((f"{part}/{key}", Stored(name, key, first.dtype, shape)))
    return found


def _with_part(node: Any, part: str) -> Any:
    return renamed(node, {key: f"{part}/{key}" for key in keys_of(node)})


def _items(node: Any) -> list[tuple[Any, Any]]:
    """Pairs of a dict that was written as one, or with keys that are integers."""
    return [(key, item) for key, item in node["$items"]] if "$items" in node else list(node.items())


def _optimizer(node: Any, tensors: dict[str, Entry], stored: dict[str, Stored]) -> OptimizerIndex:
    """Take apart what `train.checkpoint` wrote; the states go into `tensors`."""
    state = dict(_items(node["state"]))
    entries = dict(_items(state.pop("state")))
    values: dict[str, dict[str, Any]] = {}
    groups = []
    for group, names in zip(state.pop("param_groups"), node["parameters"], strict=True):
        indices = restore(group["params"], {})
        fields = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({"fields": fields, "names": names})
        for name, index in zip(names, indices, strict=True):
            own = dict(_items(entries.get(index, {})))
            values[name] = {key: value for key, value in own.items() if not _is_tensor(value)}
            for key, value in own.items():
                if _is_tensor(value):
                    tensors[f"{OPTIMIZER}/{name}/{key}"] = _entry(value, stored, tensors.get(f"{MODEL}/{name}"))
    return OptimizerIndex(groups, values, state)


def _is_tensor(node: Any) -> bool:
    return isinstance(node, dict) and ("$tensor" in node or any(mark in node for mark in PARTS))


def _entry(node: Any, stored: dict[str, Stored], parameter: Entry | None) -> Entry:
    """An entry of one piece: of its parameter's shape where it has as many values."""
    mark = next(iter(node))
    shape = (
        stored[node["$tensor"]].shape if mark == "$tensor"
        else tuple(node[mark]["shape"]) if mark == "$packed"
        else stored[node[mark]["codes"]].shape
    )  # fmt: skip
    if parameter is not None and shape and math.prod(shape) == math.prod(parameter.shape):
        shape = parameter.shape
    return Entry(shape, [Piece(Place.whole(shape), node)])
