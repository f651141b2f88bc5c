"""Small models and helpers for the tests of converted layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

MakeMlp = Callable[..., nn.Sequential]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def mlp() -> MakeMlp:
    """Two linear layers and a GELU; the same weights for the same seed."""

    def make(width: int = 32, hidden: int = 48, seed: int = 0) -> nn.Sequential:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    return make


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of parameters and buffers."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same_state(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
