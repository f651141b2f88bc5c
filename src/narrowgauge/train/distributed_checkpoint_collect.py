"""What each process has to save, and one index of it all."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.distributed.tensor_parallel import sections
from narrowgauge.errors import CheckpointError
from narrowgauge.tensors.local import local
from narrowgauge.train.distributed_checkpoint_index import (
    MODEL,
    OPTIMIZER,
    Entry,
    Index,
    OptimizerIndex,
    Piece,
    check_covered,
    keys_of,
)
from narrowgauge.train.distributed_checkpoint_pieces import Located, Place, located
from narrowgauge.train.state import Flattener

_EXTRA = "extra"


@dataclass
class Holding:
    """What one process tells of its part, fit to be sent.

    entries: by key: shape of the whole, and this process's piece, None where it holds no value. optimizer: see `Index`.
    digests: of tensors that all processes should have alike: those that are not parameters and their state.
    """

    entries: dict[str, tuple[tuple[int, ...], Piece | None]]
    optimizer: OptimizerIndex | None
    extra: Any
    digests: dict[str, str]


def collect(
    model: nn.Module, state: Mapping[str, Any] | None, names: Sequence[Sequence[str]], extra: Mapping[str, Any],
    *, copies: bool,
) -> tuple[Holding, dict[str, Tensor]]:  # fmt: skip
    """The part of this process: what it tells, and its plain tensors by key.

    state: the optimizer's state dict; None: none is saved. names: of its parameters, in the groups' order. copies: True
    gives tensors that share no memory with model and optimizer. Raises CheckpointError for what is no plain state.
    """
    flattener = Flattener(copies=copies)
    holding = Holding({}, None, None, {})
    values = model.state_dict()  # before the parameters: sharded ones may have to be parted again
    parameters = parameters_of(model)
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"'{name}' in the model's state dict is a {type(value).__name__}: expected tensors alone on several "
                "processes: keep it in `extra`"
            )
        _add(holding, flattener, f"{MODEL}/{name}", parameters.get(name) or located(name, value))
    if state is not None:
        holding.optimizer = _optimizer(holding, flattener, state, names, parameters)
    holding.extra = flattener.flatten(dict(extra), _EXTRA)
    parted = {f"{MODEL}/{name}" for name in parameters}
    pieces = [p for key, (_, p) in holding.entries.items() if key in parted or key.startswith(f"{OPTIMIZER}/")]
    common = flattener.tensors.keys() - {key for piece in pieces if piece for key in keys_of(piece.node)}
    holding.digests = {key: _digest(flattener.tensors[key]) for key in sorted(common)}
    return holding, flattener.tensors


def merge(holdings: Sequence[Holding]) -> Index:
    """One index of what all processes hold; `stored` is left empty. Raises CheckpointError where parts are missing."""
    documents: list[str] = []
    extra_of = []
    for holding in holdings:
        text = json.dumps(holding.extra, allow_nan=False)
        if text not in documents:
            documents.append(text)
        extra_of.append(documents.index(text))
    tensors: dict[str, Entry] = {}
    for holding in holdings:
        for key, (shape, piece) in holding.entries.items():
            entry = tensors.setdefault(key, Entry(shape))
            if entry.shape != shape:
                raise CheckpointError(
                    f"'{key}': expected one shape on all ranks, found {list(entry.shape)} and {list(shape)}: part it "
                    "as a DTensor"
                )
            if piece is not None and all(piece.place != known.place for known in entry.pieces):
                entry.pieces.append(piece)
    for key, entry in tensors.items():
        check_covered(f"'{key}'", entry)
    found = [holding.optimizer for holding in holdings if holding.optimizer is not None]
    optimizer = _merged(found) if found else None
    return Index(len(holdings), tensors, optimizer, [json.loads(text) for text in documents], extra_of)


def variants(holdings: Sequence[Holding]) -> dict[str, dict[int, str]]:
    """Keys whose tensor differs among the ranks that have it -> rank -> the key that its own is to have."""
    by_key: dict[str, dict[int, str]] = defaultdict(dict)
    for rank, holding in enumerate(holdings):
        for key, digest in holding.digests.items():
            by_key[key][rank] = digest
    found: dict[str, dict[int, str]] = {}
    for key, digests in by_key.items():
        if len(set(digests.values())) > 1:
            first = {digest: rank for rank, digest in reversed(digests.items())}
            found[key] = {rank: f"{key}#{first[digest]}" for rank, digest in digests.items()}
    return found


def parameters_of(model: nn.Module) -> dict[str, Located]:
    """What a process holds of every parameter, by all of its names."""
    parted = sections(model)
    named = model.named_parameters(remove_duplicate=False)
    return {name: located(name, p.detach(), parted.get(name)) for name, p in named}


def _add(holding: Holding, flattener: Flattener, key: str, where: Located) -> None:
    whole = where.place == Place.whole(where.shape)
    piece = None
    if where.value.numel():
        path = key if whole else f"{key}@{','.join(map(str, where.place.boxes[0].offsets))}"
        piece = Piece(where.place, flattener.flatten(where.value, path))
    holding.entries[key] = (where.shape, piece)


def _optimizer(
    holding: Holding,
    flattener: Flattener,
    state: Mapping[str, Any],
    names: Sequence[Sequence[str]],
    parameters: Mapping[str, Located],
) -> OptimizerIndex:
    values: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for at, (group, own) in enumerate(zip(state["param_groups"], names, strict=True)):
        if "" in own:
            raise CheckpointError(
                f"group {at} of the optimizer holds a parameter that is not the model's: expected the model's own, "
                "whose names all ranks know: save the model that the optimizer trains"
            )
        fields = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        groups.append({"fields": flattener.flatten(fields, f"{OPTIMIZER}.groups.{at}"), "names": list(own)})
        for name, index in zip(own, group["params"], strict=True):
            values[name] = {}
            for key, value in state["state"].get(index, {}).items():
                if isinstance(value, Tensor):
                    _add(holding, flattener, f"{OPTIMIZER}/{name}/{key}", _state_at(name, key, value, parameters[name]))
                else:
                    values[name][key] = flattener.flatten(value, f"{OPTIMIZER}/{name}/{key}")
    rest = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    return OptimizerIndex(groups, values, flattener.flatten(rest, f"{OPTIMIZER}.rest"))


def _state_at(name: str, key: str, value: Tensor, parameter: Located) -> Located:
    """Where a state of a parameter lies: beside the parameter's own values, or alone where it has one number."""
    held = local(value)
    if held.numel() == parameter.value.numel() and (held.ndim or not parameter.value.ndim):
        return Located(held, parameter.shape, parameter.place)
    if held.ndim and parameter.place != Place.whole(parameter.shape):
        raise CheckpointError(
            f"'{name}': expected a state '{key}' of shape {list(parameter.value.shape)}, as this rank's part of the "
            f"parameter has, found {list(held.shape)}: a state of another shape cannot be cut with its parameter"
        )
    return located(f"{name}.{key}", value)


def _merged(found: Sequence[OptimizerIndex]) -> OptimizerIndex:
    """Groups of the same fields are one: stages have parts of each."""
    groups: dict[str, dict[str, Any]] = {}
    values: dict[str, dict[str, Any]] = {}
    for each in found:
        for group in each.groups:
            merged = groups.setdefault(json.dumps(group["fields"]), {"fields": group["fields"], "names": []})
            merged["names"] += [name for name in group["names"] if name not in merged["names"]]
        for name, own in each.values.items():
            values[name] = {**own, **values.get(name, {})}
    return OptimizerIndex(list(groups.values()), values, found[0].rest)


def _digest(tensor: Tensor) -> str:
    head = f"{tensor.dtype}{list(tensor.shape)}".encode()
    return hashlib.sha256(head + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
