"""When the guard looks at a step, beside who else wants to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from narrowgauge.observe.observation import Observation

if TYPE_CHECKING:
    from narrowgauge.train.guard import Guard


class Looks(Observation):
    """An observation that looks where the guard is due, too. every, histograms_every: else, see `Observation`."""

    def __init__(
        self,
        guard: Guard,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int = 0,
        histograms_every: int | None = 0,
    ) -> None:
        super().__init__(model, optimizer, every, histograms_every)
        self._guard = guard

    def due(self, step: int) -> bool:
        return super().due(step) or self._guard.due(step)

    def begin(self, step: int, *, has_state: bool = True) -> None:
        has_state = has_state and (super().due(step) or self._guard.weighs_moments)
        super().begin(step, has_state=has_state)
