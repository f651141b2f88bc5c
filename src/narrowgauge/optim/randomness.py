"""Random bits that ranks agree on, whatever their own seeds: the same for replicas, others for other parts."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from narrowgauge.tensors.shares import coordinates, share_of

if TYPE_CHECKING:
    from narrowgauge.ops.reduce import Reducer

SEED = "narrowgauge_seed"  # in the optimizer's state dict, where ranks have agreed on one
_DIGITS = 4  # of 16 bits, which float32 holds, in a seed


class SharedSeed:
    """A seed that all ranks of a group have, and what follows from it. It is a part of the optimizer's state dict."""

    def __init__(self, optimizer: Optimizer, reducer: Reducer, seed: int, device: torch.device | str) -> None:
        digits = [float(seed >> 16 * i & 0xFFFF) for i in range(_DIGITS)]
        agreed = reducer.max_(torch.tensor(digits, device=device)).tolist()  # that of all, where it is one
        self.seed = sum(int(digit) << 16 * i for i, digit in enumerate(agreed))
        self._handles: list[Any] = [
            optimizer.register_state_dict_post_hook(self._write),
            optimizer.register_load_state_dict_pre_hook(self._read),
        ]

    def remove(self) -> None:
        """Take it out of the state dict again."""
        for handle in self._handles:
            handle.remove()

    def key(self, step: int) -> Tensor:
        """The key of a step: int64, 0-dimensional."""
        return torch.tensor(_number(f"{self.seed}:{step}", 8, signed=True))

    def stream(self, p: Tensor, name: str) -> int:
        """The stream of this rank's part of a parameter: by the name of its values, and which part it is."""
        return _number(f"{share_of(p).name or name}:{coordinates(p)}", 4) >> 1  # kernels take 31 bits

    def _write(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        state[SEED] = self.seed

    def _read(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        self.seed = state.get(SEED, self.seed)


def _number(text: str, size_bytes: int, *, signed: bool = False) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size_bytes).digest(), "little", signed=signed)
