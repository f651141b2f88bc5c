"""Copies of a model's state, and their comparison."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of parameters and buffers."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same_state(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
