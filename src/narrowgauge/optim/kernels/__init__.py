"""The fused optimizer step: read, update and write in one pass over memory, for many parameters in one call.

The same bits as `optim.update`, for the formats that `takes` is True for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from narrowgauge.optim.kernels.items import takes
from narrowgauge.optim.rules import Rule
from narrowgauge.optim.update import Item

if TYPE_CHECKING:
    from narrowgauge.optim.kernels.cpu import Plan

__all__ = ["plan", "step", "takes"]


def plan(rule: Rule) -> Plan:
    """Steps of the same parameters again and again, see `cpu.Plan`."""
    from narrowgauge.optim.kernels.cpu import Plan  # Numba is loaded on first use

    return Plan(rule)


def step(rule: Rule, items: Sequence[Item], key: Tensor | None) -> None:
    """Take the step of all `items`, each of which the kernels take, in place: see `cpu.Plan`, which is for many."""
    plan(rule).run(items, key)
