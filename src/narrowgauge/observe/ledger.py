"""Bytes per role, counted from the storages that are really there: scales, padding and residuals are in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from narrowgauge.layers.delayed import is_state_name
from narrowgauge.tensors.local import local

ACTIVATION = "activation"
WIRE = "wire"
SCALING = "scaling"  # delayed scaling's histories and scales
BUFFER = "buffer"
KEYS = ("parameters", "bytes", "bytes_per_parameter", "bytes_by_device")  # of `Ledger.to_dict`
_STATE_ROLES = {"momentum_buffer": "momentum"}  # torch's name -> the role's
_ORDER = ("param", "master", "grad", "exp_avg", "exp_avg_sq", "momentum")  # the design's; others follow as they come


@dataclass(frozen=True)
class Ledger:
    """Bytes per role of a model in training.

    roles: role -> bytes, in the design's order of roles; a role without bytes is left out. Storage that two roles share
    is counted once, for the first. parameters: number of parameters, shared ones once. activation: bytes saved for one
    backward pass, where they were measured: they follow the batch, not the parameters, and are not in `total`.
    wire: bytes that this rank has sent to other ranks, see `ledger`; None for one process; they are not in `total`.
    devices: the same bytes as `roles` by device, e.g. moments on "cpu" under offload beside parameters on "cuda:0".
    """

    roles: Mapping[str, int]
    parameters: int
    activation: int | None = None
    devices: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    wire: int | None = None

    @property
    def total(self) -> int:
        """Bytes of all roles, without activations."""
        return sum(self.roles.values())

    @property
    def per_parameter(self) -> float:
        """`total` divided by the number of parameters; 0 for a model without parameters."""
        return self.total / self.parameters if self.parameters else 0.0

    def rows(self) -> list[tuple[str, int, float]]:
        """(role, bytes, bytes a parameter), the total, the activations and what was sent at the end."""
        count = max(self.parameters, 1)
        rows = [(role, size, size / count) for role, size in self.roles.items()]
        rows.append(("total", self.total, self.per_parameter))
        for role, size in ((ACTIVATION, self.activation), (WIRE, self.wire)):
            if size is not None:
                rows.append((role, size, size / count))
        return rows

    def to_dict(self) -> dict[str, Any]:
        """For JSON: `parameters`, `bytes` and `bytes_per_parameter` by role as in `rows`, and `bytes_by_device`."""
        sizes = {role: size for role, size, _ in self.rows()}
        shares = {role: share for role, _, share in self.rows()}
        by_device = {device: dict(roles) for device, roles in self.devices.items()}
        return dict(zip(KEYS, (self.parameters, sizes, shares, by_device), strict=True))

    def row(self) -> dict[str, Any]:
        """The fields of a journal's row of bytes."""
        return {
            "roles": dict(self.roles),
            "parameters": self.parameters,
            "activation": self.activation,
            "wire": self.wire,
        }

    def __str__(self) -> str:
        # on one device, which it is goes without saying
        places = self.devices if len(self.devices) > 1 else {}
        lines = [f"{'role':<14} {'bytes':>15} {'a parameter':>12}" + "".join(f" {f'on {d}':>15}" for d in places)]
        for role, size, share in self.rows():
            on = [sum(roles.values()) if role == "total" else roles.get(role, 0) for roles in places.values()]
            there = "" if role in (ACTIVATION, WIRE) else "".join(f" {part:>15,}" for part in on)
            lines.append(f"{role:<14} {size:>15,} {share:>12.3f}{there}")
        return "\n".join(lines)


def ledger(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, activation: int | None = None
) -> Ledger:
    """Count the bytes of parameters, masters, gradients, moments, scaling state and buffers as they are now.

    Gradients count where `.grad` is there: call it between backward and `zero_grad`; released ones take nothing. States
    count once there are some: after the first step. activation: bytes measured by `SavedActivations`, if any. A
    QuantizedTensor or PackedTensor counts with all that it holds, scales and amax among it; a view with the whole
    storage that it keeps alive. wire: what this rank has sent in the step under way; right after `optimizer.step()`, in
    the one just ended.
    """
    counter = _Counter()
    parameters = list(model.parameters())
    for parameter in parameters:
        counter.add("param", parameter)
    for parameter in parameters:
        if parameter.grad is not None:
            counter.add("grad", parameter.grad)
    if optimizer is not None:
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    counter.add(_STATE_ROLES.get(str(key), str(key)), value)
    for name, buffer in model.named_buffers():
        counter.add(SCALING if is_state_name(name.rpartition(".")[2]) else BUFFER, buffer)
    return Ledger(counter.roles(), sum(p.numel() for p in parameters), activation, counter.by_device, _sent_bytes())


def _sent_bytes() -> int | None:
    """Bytes sent in the step under way, or the one just ended; None for one process."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    from narrowgauge.distributed.wire import SINCE_STEP  # loads much of torch.distributed

    return SINCE_STEP.bytes


class SavedActivations(saved_tensors_hooks):
    """A context that measures what autograd saves for backward in the forward passes inside it.

    Every storage is counted once, those of the model's parameters not at all. Values are handed through unchanged.
    """

    def __init__(self, model: nn.Module) -> None:
        self._seen = {key for p in model.parameters() for key, _ in _storages(p)}
        # held, because a freed storage's address may come back as another tensor's
        self._held: list[torch.UntypedStorage] = []
        self.bytes = 0
        super().__init__(self._pack, lambda value: value)

    def __enter__(self) -> SavedActivations:
        super().__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self._held.clear()

    def _pack(self, tensor: Tensor) -> Tensor:
        for key, storage in _storages(tensor):
            if key not in self._seen:
                self._seen.add(key)
                self._held.append(storage)
                self.bytes += storage.nbytes()
        # an output that its own node saves would hold that node, for ever where no backward pass frees it
        return tensor.detach()


@dataclass
class _Counter:
    by_device: dict[str, dict[str, int]] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)

    def add(self, role: str, tensor: Tensor) -> None:
        for key, storage in _storages(tensor):
            if key not in self.seen:
                self.seen.add(key)
                roles = self.by_device.setdefault(str(storage.device), {})
                roles[role] = roles.get(role, 0) + storage.nbytes()

    def roles(self) -> dict[str, int]:
        """Bytes of each role on all devices together."""
        found: dict[str, int] = {}
        for roles in self.by_device.values():
            for role, size in roles.items():
                found[role] = found.get(role, 0) + size
        known = [role for role in _ORDER if role in found]
        return {role: found[role] for role in (*known, *(role for role in found if role not in _ORDER))}


def _storages(tensor: Tensor) -> Iterator[tuple[int, torch.UntypedStorage]]:
    """(key, storage) of every plain tensor inside; the key is the same for tensors that share a storage."""
    for plain in _plain_tensors(tensor):
        storage = plain.untyped_storage()
        yield storage._cdata, storage


def _plain_tensors(tensor: Tensor) -> Iterable[Tensor]:
    tensor = local(tensor)  # of a distributed tensor what lies here
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor.detach()]
    names, _ = flatten()
    return [inner for name in names for inner in _plain_tensors(getattr(tensor, name))]
