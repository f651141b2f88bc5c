"""What reductions round away, kept and sent the next time: error feedback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import CheckpointError, NarrowgaugeError

_PARTS = ("sent", "reduced")


class ErrorFeedback:
    """The residuals of one reduction that every step repeats, e.g. of one bucket of gradients: float32.

    Each of the two casts of a reduction, of what this rank sends and of its part of the mean, adds what its last cast
    lost, and keeps what this one loses: over steps nothing is lost, however few bits travel. 4 bytes a value, and 4 a
    value over the ranks. Blocks that are not finite leave their residuals as they are. Source: Seide et al. 2014,
    "1-bit stochastic gradient descent"; for both casts: Tang et al. 2019, arXiv:1905.05957.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def sent(self, values: Tensor) -> Tensor:
        """The residual of what this rank sends: float32 of the number of values, on their device."""
        return self._residual("sent", values.numel(), values.device)

    def reduced(self, numel: int, device: torch.device) -> Tensor:
        """The residual of this rank's part of the mean: float32 [numel]."""
        return self._residual("reduced", numel, device)

    def state_dict(self) -> dict[str, Tensor]:
        """The residuals, for a checkpoint of this rank: they are not those of other ranks. Empty before the first."""
        return dict(self._kept)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the residuals of a checkpoint. Raises CheckpointError for what `state_dict` does not give."""
        for name, value in state.items():
            if name not in _PARTS or not isinstance(value, Tensor) or value.dtype is not torch.float32:
                raise CheckpointError(f"error feedback: expected float32 tensors {', '.join(_PARTS)}, found {name!r}")
        self._kept = {name: value.detach().flatten().clone() for name, value in state.items()}

    def _residual(self, name: str, numel: int, device: torch.device) -> Tensor:
        kept = self._kept.get(name)
        if kept is None:
            kept = self._kept[name] = torch.zeros(numel, dtype=torch.float32, device=device)
        elif kept.numel() != numel:
            raise NarrowgaugeError(
                f"error feedback: expected the {kept.numel()} values of the steps before, found {numel}: keep one "
                "ErrorFeedback for each reduction"
            )
        elif kept.device != device:
            kept = self._kept[name] = kept.to(device)
        return kept
