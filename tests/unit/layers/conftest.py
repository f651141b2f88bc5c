"""Small models and helpers for the tests of converted layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

MakeMlp = Callable[..., nn.Sequential]


@pytest.fixture(autouse=True)
def small_and_seeded(one_thread: None, seeded: None) -> None:
    """Applies to every test of this folder."""


@pytest.fixture
def mlp() -> MakeMlp:
    """Two linear layers and a GELU; the same weights for the same seed."""

    def make(width: int = 32, hidden: int = 48, seed: int = 0) -> nn.Sequential:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    return make
