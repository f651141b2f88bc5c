"""The fused optimizer step: read, update and write in one pass over memory; on CPUs many parameters in one call.

The same bits as `optim.update`, for the formats that `takes` is True for.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from narrowgauge.optim.kernels.items import takes
from narrowgauge.optim.kernels.plan import Plan
from narrowgauge.optim.rules import Rule
from narrowgauge.optim.update import Item

__all__ = ["Plan", "step", "takes"]


def step(rule: Rule, items: Sequence[Item], key: Tensor | None) -> list[Item]:
    """`Plan(rule).run(items, key)`: a plan is for doing so again and again."""
    return Plan(rule).run(items, key)
