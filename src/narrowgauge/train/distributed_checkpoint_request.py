"""What a process wants of a checkpoint: its parts of the model, of the optimizer's state, and its extra."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from narrowgauge.errors import CheckpointError
from narrowgauge.layers.delayed import is_state_name
from narrowgauge.optim.base import MASTER
from narrowgauge.optim.state import COPY
from narrowgauge.train.distributed_checkpoint_assembly import Request
from narrowgauge.train.distributed_checkpoint_collect import parameters_of
from narrowgauge.train.distributed_checkpoint_index import MODEL, OPTIMIZER, Entry, Index
from narrowgauge.train.distributed_checkpoint_pieces import Located, Place
from narrowgauge.train.weights import names_of_parameters

Builds = dict[str, Callable[[], Any]]


class Claims(NamedTuple):
    """Names that a process has a place for. optimizer: None where it has no optimizer to load."""

    model: frozenset[str]
    optimizer: frozenset[str] | None


def ask(
    request: Request, path: Path, model: nn.Module, names: Sequence[Sequence[str]] | None
) -> tuple[Callable[[], dict[str, Any]], Claims]:
    """Ask for this process's parts; returns what gives them once they have been read, and what it has a place for.

    names: of the optimizer's parameters, in the groups' order; None: of its state only what completes the parameters
    is wanted.

    What is given: "model": local values by name, plain or quantized. "optimizer": None, or {"state": a state dict of
    this process's parameters with local values, "parameters": their names}. "extra". Raises CheckpointError where the
    checkpoint does not fit.
    """
    index, own = request.index, model.state_dict()
    parameters = parameters_of(model)
    values: Builds = {}
    entries = index.names(MODEL)
    if missing := [name for name in own if name not in entries and not is_state_name(name.rpartition(".")[2])]:
        raise CheckpointError(
            f"{path} does not fit the model: it lacks {len(missing)} of its tensors, the first '{missing[0]}' (missing "
            "keys); build the model with the same configuration"
        )
    for name, entry in entries.items():
        where = parameters.get(name)
        if where is None and name in own:
            values[name] = request.part(name, entry, Place.whole(entry.shape))
        elif where is not None:
            if entry.shape != where.shape:
                raise CheckpointError(
                    f"{path} does not fit the model: '{name}' has shape {list(where.shape)}, and {list(entry.shape)} "
                    "was saved (size mismatch); build the model with the same configuration"
                )
            values[name] = request.part(name, entry, where.place)
    tied = {name: names for names in names_of_parameters(model) for name in names}
    wanted = [list(tied)] if names is None else names
    optimizer = None if index.optimizer is None else _ask_optimizer(request, path, parameters, tied, wanted, names)
    extra = request.node(index.extra_for(request.rank))

    def build() -> dict[str, Any]:
        return {
            "model": {name: value() for name, value in values.items()},
            "optimizer": None if optimizer is None else optimizer(),
            "extra": extra(),
        }

    claimed = None if names is None else frozenset(name for group in names for each in group for name in tied[each])
    return build, Claims(frozenset(own), claimed)


def check_claims(path: Path, index: Index, claims: Sequence[Claims]) -> None:
    """Raise CheckpointError where the checkpoint holds what none of the processes has a place for."""
    held = frozenset().union(*(each.model for each in claims))
    lost = [name for name in index.names(MODEL) if name not in held and not is_state_name(name.rpartition(".")[2])]
    if lost:
        raise CheckpointError(
            f"{path} does not fit the model: it holds {len(lost)} tensors more, the first '{lost[0]}'; build the model "
            "with the same configuration"
        )
    if index.optimizer is None or any(each.optimizer is None for each in claims):
        return
    held = frozenset().union(*(each.optimizer or () for each in claims))
    saved = (name for group in index.optimizer.groups for name in group["names"])
    lost = [name for name in saved if name not in held and held.isdisjoint(index.aliases(name))]
    if lost:
        raise CheckpointError(
            f"{path}: the optimizer's parameters are not those that were saved: '{lost[0]}' is in no group now; build "
            "the optimizer with the same groups"
        )


def _ask_optimizer(
    request: Request,
    path: Path,
    parameters: Mapping[str, Located],
    tied: Mapping[str, Sequence[str]],
    wanted: Sequence[Sequence[str]],
    names: Sequence[Sequence[str]] | None,
) -> Callable[[], dict[str, Any]]:
    """The state of the wanted parameters; names None: what completes them."""
    saved = request.index.optimizer
    assert saved is not None
    by_name: dict[str, dict[str, Entry]] = {}
    for key, entry in request.index.names(OPTIMIZER).items():
        name, _, last = key.rpartition("/")
        by_name.setdefault(name, {})[last] = entry
    states: list[tuple[int, Builds]] = []
    groups: list[dict[str, Any]] = []
    first = 0
    for own in wanted:
        found = [_saved_name(request.index, name, tied.get(name, [name])) for name in own]
        fields = {} if names is None else _fields(path, saved.groups, own, found)
        groups.append({"fields": request.node(fields), "params": list(range(first, first + len(own)))})
        for at, (name, source) in enumerate(zip(own, found, strict=True), first):
            entries = {k: e for k, e in by_name.get(source, {}).items() if names is not None or k in (MASTER, COPY)}
            builds = {key: _ask_state(request, f"{source}/{key}", e, parameters[name]) for key, e in entries.items()}
            if names is not None:
                builds |= {key: request.node(value) for key, value in saved.values.get(source, {}).items()}
            states.append((at, builds))
        first += len(own)
    rest = request.node(saved.rest if names is not None else {})

    def build() -> dict[str, Any]:
        state = {at: {key: value() for key, value in builds.items()} for at, builds in states if builds}
        restored = [{**group["fields"](), "params": group["params"]} for group in groups]
        return {"state": {"state": state, "param_groups": restored, **rest()}, "parameters": [list(n) for n in wanted]}

    return build


def _ask_state(request: Request, name: str, entry: Entry, parameter: Located) -> Callable[[], Any]:
    """The part of a state that goes with this process's part of the parameter; all of one that has another shape."""
    place = parameter.place if entry.shape == parameter.shape else Place.whole(entry.shape)
    return request.part(name, entry, place)


def _saved_name(index: Index, name: str, tied: Sequence[str]) -> str:
    """The name under which the state of a parameter was saved: its own, or that of a tensor it is tied with."""
    assert index.optimizer is not None
    known = index.optimizer.values
    return next((each for each in (name, *tied, *index.aliases(name)) if each in known), name)


def _fields(path: Path, groups: Sequence[Mapping[str, Any]], own: Sequence[str], found: Sequence[str]) -> Any:
    """The fields of the saved group that has these parameters."""
    for group in groups:
        if found and found[0] in group["names"]:
            strange = [mine for mine, name in zip(own, found, strict=True) if name not in group["names"]]
            if not strange:
                return group["fields"]
            raise CheckpointError(
                f"{path}: the optimizer's parameters are not those that were saved: '{strange[0]}' was in another "
                "group; build the optimizer with the same groups"
            )
    if not found:  # a stage may have nothing of a group
        return {}
    raise CheckpointError(
        f"{path}: the optimizer's parameters are not those that were saved: '{own[0]}' was in no group; build the "
        "optimizer with the same groups"
    )
