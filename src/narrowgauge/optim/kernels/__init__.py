"""The fused optimizer step: read, update and write in one pass over memory, for many parameters in one call.

The same bits as `optim.update`, for the formats that `takes` is True for.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from narrowgauge.optim.kernels.items import takes
from narrowgauge.optim.rules import Rule
from narrowgauge.optim.update import Item

__all__ = ["step", "takes"]


def step(rule: Rule, items: Sequence[Item], key: Tensor | None) -> None:
    """Take the step of all `items`, each of which the kernels take, in place: see `cpu.Plan`, which is for many."""
    from narrowgauge.optim.kernels.cpu import Plan  # Numba is loaded on first use

    Plan(rule).run(items, key)
