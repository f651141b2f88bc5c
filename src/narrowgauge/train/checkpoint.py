"""`ng.save` and `ng.load`: model, optimizer and anything plain in one folder of safetensors and JSON.

One process writes a file for each part; several write a file each, through torch.distributed.checkpoint. Either is read
by any number of processes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal, overload

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from narrowgauge import __version__
from narrowgauge.distributed.layout import layout_of
from narrowgauge.distributed.meeting_point import has_peers
from narrowgauge.errors import CheckpointError
from narrowgauge.layers.delayed import is_state_name
from narrowgauge.optim.base import MASTER, LowPrecisionOptimizer
from narrowgauge.optim.guard import STEPS, StepGuard
from narrowgauge.optim.replace import current
from narrowgauge.optim.state import COPY
from narrowgauge.tensors.local import is_distributed, local
from narrowgauge.train import crossing
from narrowgauge.train.distributed_checkpoint_index import INDEX
from narrowgauge.train.folder import verify, whole_folder
from narrowgauge.train.save_handle import SaveHandle, wait_for_last
from narrowgauge.train.state import Flattener, restore
from narrowgauge.train.weights import is_weights, load_weights

STATE = "state.json"
PARTS = ("model", "optimizer", "extra")  # each with a safetensors file of its own

_NO_OPTIMIZER = "holds no optimizer state: load it with optimizer=None, or start a new optimizer"

PathLike = str | os.PathLike[str]


@overload
def save(
    path: PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    asynchronous: Literal[False] = False,
    **extra: Any,
) -> Path: ...


@overload
def save(
    path: PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    asynchronous: Literal[True],
    **extra: Any,
) -> SaveHandle: ...


@overload
def save(
    path: PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    asynchronous: bool,
    **extra: Any,
) -> Path | SaveHandle: ...


def save(
    path: PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    asynchronous: bool = False,
    **extra: Any,
) -> Path | SaveHandle:
    """Write a checkpoint folder, whole or not at all. In a run of several processes, all of them call it.

    Holds plain tensors only: `model.safetensors` under the model's own names, `optimizer.safetensors`,
    `extra.safetensors`, `state.json` for everything that is no tensor, and `manifest.json` with sizes and SHA-256 sums.
    Tied tensors are stored once. Quantized parameters and optimizer states are stored as codes and scale.

    Several processes write `rank-00000.safetensors` and so on, each its shards and its share of what all have, and one
    `index.json`. What differs among them beyond that (random states, a buffer) is kept for each. The folder must be on
    a file system that all of them see. It is read in any layout: see `load`.

    Args:
        path: the folder; one that exists is replaced only when the new one is whole.
        model: its `state_dict`, which holds delayed-scaling buffers too.
        optimizer: its `state_dict`; None leaves it out.
        asynchronous: copy everything, let a thread write it, and return at once: training may go on.
        extra: what else to keep: tensors, numbers, strings, lists, dicts, or objects with `state_dict()`, such as a
            loss scaler or a learning-rate schedule (their state is stored; give it back with `load_state_dict`).

    Returns:
        the folder; of an asynchronous save, a handle: `handle.wait()` gives the folder.

    Raises:
        CheckpointError: something is no plain state, or the disk refuses the files (older checkpoints stay). All
            processes raise what one of them found. Of an asynchronous save, `wait` raises what the thread found.
    """
    path = Path(path)
    model, optimizer = _plain(model), current(optimizer)
    wait_for_last()
    if _is_spread(model):
        from narrowgauge.train import distributed_checkpoint  # on first use: torch's is slow to load

        state = None if optimizer is None else optimizer.state_dict()
        names = [] if optimizer is None else _parameter_names(model, optimizer)
        about = {**_versions(), "layout": str(layout_of(model) or "not laid out")}
        handle = distributed_checkpoint.write(path, model, state, names, extra, about, asynchronous=asynchronous)
        return handle or path
    values = {
        "model": model.state_dict(),
        "optimizer": None if optimizer is None else _optimizer_state(model, optimizer),
        "extra": extra,
    }
    document: dict[str, Any] = {"versions": _versions()}
    tensors: dict[str, dict[str, Tensor]] = {}
    for part in PARTS:
        flattener = Flattener(copies=asynchronous)
        document[part] = flattener.flatten(values[part], "")
        tensors[part] = flattener.tensors
    if asynchronous:
        return SaveHandle(path, lambda: _write(path, document, tensors))
    _write(path, document, tensors)
    return path


def _write(path: Path, document: dict[str, Any], tensors: dict[str, dict[str, Tensor]]) -> None:
    """The folder of one process. Raises CheckpointError."""
    try:
        with whole_folder(path) as folder:
            for part in PARTS:
                save_file(tensors[part], folder / f"{part}.safetensors", metadata={"format": "pt"})
            (folder / STATE).write_text(json.dumps(document, allow_nan=False), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"{path} was not written: {error.strerror}; nothing that was there before is lost. "
            "Make room, or choose another place"
        ) from error


def _is_spread(model: nn.Module) -> bool:
    """True in a run of several processes, and for a model whose parameters are made for one."""
    return has_peers() or any(map(is_distributed, model.parameters()))


def _versions() -> dict[str, str]:
    return {"narrowgauge": __version__, "torch": torch.__version__}


def load(
    path: PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, is_verified: bool = False
) -> dict[str, Any]:
    """Read what `save` wrote into a model and an optimizer, in place: parameters and ties keep identity.

    Any layout reads what any other wrote, on one process or many; in a run of several processes, all of them call it.
    In the layout that was saved, all bits are the same. In another one, plain tensors are (float32, bfloat16, residuals
    of 8 and 16 bits), and codes whose blocks lie in whole rows of the new part, or whose one scale goes on; others are
    decoded and cast anew, as between recipes. A process gets the `extra` that the process of its number gave, modulo
    the number of those that saved.

    Prepared by the recipe that they were saved in, model and optimizer get the same bits. By another one, or not at
    all, parameters come by their full values, residuals and masters included, each cast once to what the model stores,
    with new residuals and masters where the optimizer keeps them; moments are cast anew; delayed scaling's state is
    left out where the model keeps none, and fresh where the checkpoint has none. An optimizer that is not loaded with
    its model takes masters from the new parameters. A recipe with a schedule goes on from the optimizer's count of
    steps.

    path: also a safetensors file, or a folder as Hugging Face lays it out: then see `load_weights`; it holds no
    optimizer state and no extra.

    is_verified: the sums of its files have been looked at, and are not taken again.

    Returns:
        the `extra` of `save`.

    Raises:
        CheckpointError: the folder is missing, truncated or corrupt, does not fit the model or the optimizer, or the
            file holds pickled code.
    """
    path = Path(path)
    model, optimizer = _plain(model), current(optimizer)
    wait_for_last()
    if is_weights(path):
        if optimizer is not None:
            raise CheckpointError(f"{path} {_NO_OPTIMIZER}")
        load_weights(path, model)
        return {}
    saved = _read(path, model, optimizer, is_verified)
    masters, copies = (crossing.saved_states(key, saved["model"], saved["optimizer"]) for key in (MASTER, COPY))
    if not isinstance(optimizer, LowPrecisionOptimizer):  # which none of this process will hold beside the parameters
        saved["model"] |= copies
    if optimizer is not None:
        if saved["optimizer"] is None:
            raise CheckpointError(f"{path} {_NO_OPTIMIZER}")
        _check_parameters(path, model, optimizer, saved["optimizer"]["parameters"])
        guard = StepGuard.on(optimizer)
        if guard is not None and STEPS in saved["optimizer"]["state"]:
            # before the model's state, which is that of the recipe in force
            guard.go_on_from(saved["optimizer"]["state"][STEPS])
    _load_model(path, model, crossing.for_model(model, saved["model"], masters, copies))
    if optimizer is not None:
        _load_optimizer(path, model, optimizer, saved["optimizer"]["state"])
        if isinstance(optimizer, LowPrecisionOptimizer):
            whole = saved["model"] | copies
            crossing.complete_masters(optimizer, dict(model.named_parameters()), whole, masters)
    return saved["extra"]


def _read(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, is_verified: bool) -> dict[str, Any]:
    """The parts of a checkpoint, restored; of several processes' this one's part, in local tensors."""
    if _is_spread(model) or (path / INDEX).is_file():
        from narrowgauge.train import distributed_checkpoint  # on first use: torch's is slow to load

        names = None if optimizer is None else _parameter_names(model, optimizer)
        return distributed_checkpoint.read(path, model, names, is_verified)
    if not is_verified:
        verify(path)
    try:
        document = json.loads((path / STATE).read_text(encoding="utf-8"))
        saved = {part: restore(document[part], load_file(path / f"{part}.safetensors")) for part in PARTS}
        if saved["optimizer"] is not None:
            crossing.saved_states(MASTER, saved["model"], saved["optimizer"])  # looks at all that `load` relies on
    except (ValueError, KeyError, TypeError, AttributeError, OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: expected a checkpoint of narrowgauge, found {error!r}") from error
    return saved


def _plain(model: nn.Module) -> nn.Module:
    """The module itself where torch.compile or DDP wrapped it: the wrapper would prefix every name."""
    model = getattr(model, "_orig_mod", model)
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _load_model(path: Path, model: nn.Module, state: dict[str, Any]) -> None:
    # scaling histories mean nothing to a model that keeps none, and stand in no one's way
    own = model.state_dict().keys()
    state = {name: value for name, value in state.items() if name in own or not is_state_name(name.rpartition(".")[2])}
    try:
        parted = _load_parted(model, state)
        rest = {name: value for name, value in state.items() if name not in parted}
        found = model.load_state_dict(rest, strict=not parted)
        if missing := [name for name in found.missing_keys if name not in parted]:
            raise RuntimeError(f"Missing key(s): {', '.join(missing)}")
        if found.unexpected_keys:
            raise RuntimeError(f"Unexpected key(s): {', '.join(found.unexpected_keys)}")
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} does not fit the model: {error}; build the model with the same configuration, and prepare it with "
            "the same recipe, before loading"
        ) from error


@torch.no_grad()
def _load_parted(model: nn.Module, state: dict[str, Any]) -> set[str]:
    """Load local values into the parameters that are parted over processes; returns their names."""
    parted = {name: p for name, p in model.named_parameters(remove_duplicate=False) if is_distributed(p)}
    for name, p in parted.items():
        local(p).copy_(state[name])
    return set(parted)


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = optimizer.state_dict()
    # the order in which parameters got their states is no part of them: equal states give equal files
    state = {**state, "state": dict(sorted(state["state"].items()))}
    return {"state": state, "parameters": _parameter_names(model, optimizer)}


def _parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Names of the parameters of every group, in the optimizer's order; "" for one that the model does not hold."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]


def _check_parameters(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, saved: list[list[str]]) -> None:
    found = _parameter_names(model, optimizer)
    if found != saved:
        pairs = [(a, b) for ours, theirs in zip(saved, found, strict=False) for a, b in zip(ours, theirs, strict=False)]
        first = next((f"'{a}' was saved where '{b}' is now" for a, b in pairs if a != b), "their number differs")
        raise CheckpointError(
            f"{path}: the optimizer's parameters are not those that were saved: {first}; "
            "build the optimizer with the same groups in the same order"
        )


def _load_optimizer(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    is_ours = isinstance(optimizer, LowPrecisionOptimizer)
    try:
        if not is_ours:
            state = crossing.for_torch(optimizer, {p: name for name, p in model.named_parameters()}, state)
        optimizer.load_state_dict(state)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} does not fit the optimizer: {error}; build it with the same groups") from error
    if is_ours:
        return
    # torch casts floating state to its parameter's dtype: put back what was saved
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, entries in state["state"].items():
        loaded = optimizer.state[parameters[index]]
        for key, saved in entries.items():
            if isinstance(saved, Tensor) and loaded[key].dtype != saved.dtype:
                loaded[key] = saved.to(loaded[key].device)
