"""A checkpoint of one recipe in the model and the optimizer of another: parameters by all of their digits.

What is stored alike is taken bit for bit; anything else goes through float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import CheckpointError
from narrowgauge.optim.base import MASTER, LowPrecisionOptimizer
from narrowgauge.optim.state import COPY
from narrowgauge.optim.storage import decode, spec_of
from narrowgauge.optim.update import read
from narrowgauge.tensors.local import as_part_of, local
from narrowgauge.tensors.packed import PackedTensor
from narrowgauge.tensors.quantized import QuantizedTensor
from narrowgauge.train.weights import names_of_parameters

State = Mapping[str, Any]
# what torch's own optimizers keep for a parameter
_OF_TORCH = (
    (torch.optim.Adam, {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    (torch.optim.SGD, {"momentum_buffer"}),
)


def saved_states(key: str, model: State, optimizer: State | None) -> dict[str, Tensor]:
    """The state `key`, MASTER or COPY, of every parameter that has one, by name.

    model: a state dict. optimizer: {"state": the optimizer's state dict, "parameters": names in its groups' order}.
    """
    if optimizer is None:
        return {}
    entries = optimizer["state"]["state"]
    return {
        name: entries[index][key]
        for name, index in _indices(optimizer)
        if name in model and isinstance(entries.get(index, {}).get(key), Tensor)
    }


def for_model(
    model: nn.Module, saved: State, masters: Mapping[str, Tensor], copies: Mapping[str, Tensor]
) -> dict[str, Any]:
    """`saved` with the values of parameter and master together, where `model` stores a parameter in another format.

    copies: what owners of parted parameters have of them, in place of what travelled to all.
    """
    own = model.state_dict()
    state = dict(saved)
    for names in names_of_parameters(model):
        held = next((name for name in names if name in masters), None)
        if held is not None and kind(saved[held]) != kind(local(own[held])):
            state |= dict.fromkeys(
                (name for name in names if name in saved), read(copies.get(held, saved[held]), masters[held])
            )
    return state


def complete_masters(
    optimizer: LowPrecisionOptimizer, parameters: State, saved: State, masters: Mapping[str, Tensor]
) -> None:
    """Give the optimizer's masters the digits that the parameters alone do not hold, where its formats are others.

    parameters: the model's, by name; model and optimizer have been loaded.
    """
    for name, p in parameters.items():
        if name not in saved or optimizer.formats_of(p).master is None or not optimizer.is_own(p):
            continue
        own, master = optimizer.state.get(p, {}).get(MASTER), masters.get(name)
        if kind(saved[name]) != kind(local(p)) or _kind_of_master(own) != _kind_of_master(master):
            optimizer.set_values(p, read(saved[name], master))


def for_torch(optimizer: torch.optim.Optimizer, names: Mapping[Any, str], state: dict[str, Any]) -> dict[str, Any]:
    """A state dict for one of torch's own optimizers: moments decoded, masters left out, groups completed.

    names: of the optimizer's parameters, by the parameter. Raises CheckpointError for a state that does not fit.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [index for group in state["param_groups"] for index in group["params"]]
    entries: dict[int, dict[str, Any]] = {}
    for index, p in zip(indices, parameters, strict=True):
        found = {key: value for key, value in state["state"].get(index, {}).items() if key not in (MASTER, COPY)}
        if found:
            _check_names(optimizer, names.get(p, ""), found)
            plain = {key: _plain(key, value, local(p), names.get(p, "")) for key, value in found.items()}
            # torch keeps the moments of a parted parameter parted
            entries[index] = {k: as_part_of(p, v) if _is_moment(v, local(p)) else v for k, v in plain.items()}
    pairs = zip(optimizer.param_groups, state["param_groups"], strict=True)
    groups = [{**{k: v for k, v in own.items() if k != "params"}, **saved} for own, saved in pairs]
    return {**state, "state": entries, "param_groups": groups}


def kind(value: Tensor) -> Any:
    """What must be equal for the bits of a parameter to be taken as they are: the format."""
    return value.spec if isinstance(value, QuantizedTensor) else value.dtype


def _kind_of_master(master: Tensor | None) -> Any:
    return None if master is None else spec_of(master)


def _indices(optimizer: State) -> Iterator[tuple[str, int]]:
    groups = optimizer["state"]["param_groups"]
    for names, group in zip(optimizer["parameters"], groups, strict=True):
        yield from zip(names, group["params"], strict=True)


def _is_moment(value: Any, p: Tensor) -> bool:
    return isinstance(value, Tensor) and (value.ndim > 0 or p.ndim == 0)


def _check_names(optimizer: torch.optim.Optimizer, name: str, found: State) -> None:
    known = next((names for kind, names in _OF_TORCH if isinstance(optimizer, kind)), None)
    unknown = [] if known is None else sorted(found.keys() - known)
    if unknown:
        raise CheckpointError(
            f"'{name}': {type(optimizer).__name__} has no state '{unknown[0]}': build the optimizer that it was saved "
            "from"
        )


def _plain(key: str, value: Any, p: Tensor, name: str) -> Any:
    if key == "step":
        return value if isinstance(value, Tensor) else torch.tensor(float(value))
    if not isinstance(value, Tensor):
        return value
    is_moment = _is_moment(value, p)
    if is_moment and value.numel() != p.numel():
        raise CheckpointError(
            f"'{name}': expected a state '{key}' of shape {list(p.shape)}, as the parameter has, found "
            f"{list(value.shape)}: it belongs to another model"
        )
    if isinstance(value, QuantizedTensor | PackedTensor):
        return decode(value, p.shape)
    # torch's steps want moments of a float32 parameter in float32; those of one in 16 bits stay as they were saved
    return value.to(p.dtype) if is_moment and p.dtype in (torch.float32, torch.float64) else value
