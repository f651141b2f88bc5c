"""Nothing that a training step makes outlives it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import narrowgauge as ng


class Gated(nn.Module):
    """Children that share casts, one of which reads what the others have made."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Births(TorchDispatchMode):
    """Weak references to the results of every operation inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self.seen += [weakref.ref(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        return result

    def alive(self, owned: Iterable[Tensor]) -> int:
        """How many live that are not `owned` (an in-place operation's result is its first operand)."""
        kept = {id(tensor) for tensor in owned}
        found = [reference() for reference in self.seen]
        return sum(tensor is not None and id(tensor) not in kept for tensor in found)


# case 89: quantized copies are freed
@pytest.mark.parametrize("recipe", ["bf16", "fp16", "fp8_current", "fp8_delayed"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_step_leaves_no_tensor_behind_without_the_collector(recipe: str, backward: bool) -> None:
    model = nn.Sequential(Gated(), Gated())
    ng.prepare(model, None, recipe)
    gc.collect()
    gc.disable()
    try:
        with Births() as births:
            loss = model(torch.randn(8, 32)).float().sum()
            if backward:
                loss.backward()
        made = len(births.seen)
        del loss
        model.zero_grad()
        assert made > 20
        assert births.alive((*model.parameters(), *model.buffers())) == 0
    finally:
        gc.enable()
