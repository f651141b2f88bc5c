"""Bytes per role, counted from the storages that are really there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from narrowgauge.layers.delayed import is_state_name

ACTIVATION = "activation"
SCALING = "scaling"  # delayed scaling's histories and scales
BUFFER = "buffer"
_STATE_ROLES = {"momentum_buffer": "momentum"}  # torch's name -> the role's


@dataclass(frozen=True)
class Ledger:
    """Bytes per role of a model in training.

    roles: role -> bytes, in the design's order of roles; a role without bytes is left out. Storage that two roles share
    is counted once, for the first. parameters: number of parameters, shared ones once. activation: bytes saved for one
    backward pass, where they were measured: they follow the batch, not the parameters, and are not in `total`.
    """

    roles: Mapping[str, int]
    parameters: int
    activation: int | None = None

    @property
    def total(self) -> int:
        """Bytes of all roles, without activations."""
        return sum(self.roles.values())

    @property
    def per_parameter(self) -> float:
        """`total` divided by the number of parameters; 0 for a model without parameters."""
        return self.total / self.parameters if self.parameters else 0.0

    def rows(self) -> list[tuple[str, int, float]]:
        """(role, bytes, bytes a parameter), the total and the activations at the end."""
        count = max(self.parameters, 1)
        rows = [(role, size, size / count) for role, size in self.roles.items()]
        rows.append(("total", self.total, self.per_parameter))
        if self.activation is not None:
            rows.append((ACTIVATION, self.activation, self.activation / count))
        return rows

    def __str__(self) -> str:
        lines = [f"{'role':<14} {'bytes':>15} {'a parameter':>12}"]
        lines += [f"{role:<14} {size:>15,} {share:>12.3f}" for role, size, share in self.rows()]
        return "\n".join(lines)


def ledger(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, activation: int | None = None
) -> Ledger:
    """Count the bytes of parameters, gradients, optimizer states, scaling state and buffers as they are now.

    Gradients count where `.grad` is there: call it between backward and `zero_grad`. activation: bytes measured by
    `SavedActivations`, if any. A wrapper such as QuantizedTensor counts with the tensors that it holds.
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
    return Ledger(counter.bytes, sum(p.numel() for p in parameters), activation)


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
        return tensor


@dataclass
class _Counter:
    bytes: dict[str, int] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)

    def add(self, role: str, tensor: Tensor) -> None:
        for key, storage in _storages(tensor):
            if key not in self.seen:
                self.seen.add(key)
                self.bytes[role] = self.bytes.get(role, 0) + storage.nbytes()


def _storages(tensor: Tensor) -> Iterator[tuple[int, torch.UntypedStorage]]:
    """(key, storage) of every plain tensor inside; the key is the same for tensors that share a storage."""
    for plain in _plain_tensors(tensor):
        storage = plain.untyped_storage()
        yield storage._cdata, storage


def _plain_tensors(tensor: Tensor) -> Iterable[Tensor]:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor.detach()]
    names, _ = flatten()
    return [inner for name in names for inner in _plain_tensors(getattr(tensor, name))]
