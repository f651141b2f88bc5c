"""`ng.save` and `ng.load`: model, optimizer and anything plain in one folder of safetensors and JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from narrowgauge import __version__
from narrowgauge.errors import CheckpointError
from narrowgauge.layers.delayed import is_state_name
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.optim.guard import STEPS, StepGuard
from narrowgauge.optim.replace import current
from narrowgauge.train import crossing
from narrowgauge.train.folder import verify, whole_folder
from narrowgauge.train.state import Flattener, restore
from narrowgauge.train.weights import is_weights, load_weights

STATE = "state.json"
PARTS = ("model", "optimizer", "extra")  # each with a safetensors file of its own

_NO_OPTIMIZER = "holds no optimizer state: load it with optimizer=None, or start a new optimizer"

PathLike = str | os.PathLike[str]


def save(path: PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **extra: Any) -> Path:
    """Write a checkpoint folder, whole or not at all.

    Holds plain tensors only: `model.safetensors` under the model's own names, `optimizer.safetensors`,
    `extra.safetensors`, `state.json` for everything that is no tensor, and `manifest.json` with sizes and SHA-256 sums.
    Tied tensors are stored once. Quantized parameters and optimizer states are stored as codes and scale.

    Args:
        path: the folder; one that exists is replaced only when the new one is whole.
        model: its `state_dict`, which holds delayed-scaling buffers too.
        optimizer: its `state_dict`; None leaves it out.
        extra: what else to keep: tensors, numbers, strings, lists, dicts, or objects with `state_dict()`, such as a
            loss scaler or a learning-rate schedule (their state is stored; give it back with `load_state_dict`).

    Returns:
        the folder.

    Raises:
        CheckpointError: something is no plain state, or the disk refuses the files (older checkpoints stay).
    """
    path = Path(path)
    model = _plain(model)
    optimizer = current(optimizer)
    values = {
        "model": model.state_dict(),
        "optimizer": None if optimizer is None else _optimizer_state(model, optimizer),
        "extra": extra,
    }
    document: dict[str, Any] = {"versions": {"narrowgauge": __version__, "torch": torch.__version__}}
    try:
        with whole_folder(path) as folder:
            for part in PARTS:
                flattener = Flattener()
                document[part] = flattener.flatten(values[part], "")
                save_file(flattener.tensors, folder / f"{part}.safetensors", metadata={"format": "pt"})
            (folder / STATE).write_text(json.dumps(document, allow_nan=False), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"{path} was not written: {error.strerror}; nothing that was there before is lost. "
            "Make room, or choose another place"
        ) from error
    return path


def load(path: PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Read what `save` wrote into a model and an optimizer, in place: parameters and ties keep identity.

    Prepared by the recipe that they were saved in, model and optimizer get the same bits. By another one, or not at
    all, parameters come by their full values, residuals and masters included, each cast once to what the model stores,
    with new residuals and masters where the optimizer keeps them; moments are cast anew; delayed scaling's state is
    left out where the model keeps none, and fresh where the checkpoint has none. An optimizer that is not loaded with
    its model takes masters from the new parameters. A recipe with a schedule goes on from the optimizer's count of
    steps.

    path: also a safetensors file, or a folder as Hugging Face lays it out: then see `load_weights`; it holds no
    optimizer state and no extra.

    Returns:
        the `extra` of `save`.

    Raises:
        CheckpointError: the folder is missing, truncated or corrupt, does not fit the model or the optimizer, or the
            file holds pickled code.
    """
    path = Path(path)
    model, optimizer = _plain(model), current(optimizer)
    if is_weights(path):
        if optimizer is not None:
            raise CheckpointError(f"{path} {_NO_OPTIMIZER}")
        load_weights(path, model)
        return {}
    saved = _read(path)
    masters = crossing.saved_masters(saved["model"], saved["optimizer"])
    if optimizer is not None:
        if saved["optimizer"] is None:
            raise CheckpointError(f"{path} {_NO_OPTIMIZER}")
        _check_parameters(path, model, optimizer, saved["optimizer"]["parameters"])
        guard = StepGuard.on(optimizer)
        if guard is not None and STEPS in saved["optimizer"]["state"]:
            # before the model's state, which is that of the recipe in force
            guard.go_on_from(saved["optimizer"]["state"][STEPS])
    _load_model(path, model, crossing.for_model(model, saved["model"], masters))
    if optimizer is not None:
        _load_optimizer(path, model, optimizer, saved["optimizer"]["state"])
        if isinstance(optimizer, LowPrecisionOptimizer):
            crossing.complete_masters(optimizer, dict(model.named_parameters()), saved["model"], masters)
    return saved["extra"]


def _read(path: Path) -> dict[str, Any]:
    """The parts of a checkpoint, restored."""
    verify(path)
    try:
        document = json.loads((path / STATE).read_text(encoding="utf-8"))
        saved = {part: restore(document[part], load_file(path / f"{part}.safetensors")) for part in PARTS}
        if saved["optimizer"] is not None:
            crossing.saved_masters(saved["model"], saved["optimizer"])  # looks at all that `load` relies on
    except (ValueError, KeyError, TypeError, AttributeError, OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: expected a checkpoint of narrowgauge, found {error!r}") from error
    return saved


def _plain(model: nn.Module) -> nn.Module:
    """The module itself where torch.compile wrapped it: the wrapper would prefix every name."""
    return getattr(model, "_orig_mod", model)


def _load_model(path: Path, model: nn.Module, state: dict[str, Any]) -> None:
    # scaling histories mean nothing to a model that keeps none, and stand in no one's way
    own = model.state_dict().keys()
    state = {name: value for name, value in state.items() if name in own or not is_state_name(name.rpartition(".")[2])}
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} does not fit the model: {error}; build the model with the same configuration, and prepare it with "
            "the same recipe, before loading"
        ) from error


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
            if isinstance(saved, torch.Tensor) and loaded[key].dtype != saved.dtype:
                loaded[key] = saved.to(loaded[key].device)
