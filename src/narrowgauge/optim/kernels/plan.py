"""Steps of the same parameters, again and again, each on the device that it lives on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.optim.kernels.items import parts_of, takes
from narrowgauge.optim.rules import Rule
from narrowgauge.optim.update import Item
from narrowgauge.tensors.local import has_no_values


class Plan:
    """Takes steps, and remembers from one to the next what of the parameters on the CPU stays as it is.

    It keeps the tensors of the last step's items, but for the gradients, alive.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._on_cpu: Any = None

    def run(self, items: Sequence[Item], key: Tensor | None = None) -> list[Item]:
        """Take the step of those of the `items` that `takes` is True for, in place; return the others.

        The same bits as `update.update` of each. A tensor may be in one item only. key: as in `update.update`.
        """
        if items and any(map(has_no_values, parts_of(items[0]))):
            return []  # simulated: what the step would write has its place already
        on_cpu = [item for item in items if item.param.device.type == "cpu"]
        rest: list[Item] = []
        if on_cpu:
            if self._on_cpu is None:
                from narrowgauge.optim.kernels.cpu import CpuPlan  # Numba is loaded on first use

                self._on_cpu = CpuPlan(self._rule)
            rest = self._on_cpu.run(on_cpu, key)
        for item in items if len(on_cpu) < len(items) else ():
            if item.param.device.type == "cpu":
                continue
            if not takes(self._rule, item):
                rest.append(item)
                continue
            from narrowgauge.optim.kernels import cuda  # as Triton is

            cuda.step(self._rule, item, None if key is None else key.to(item.param.device))
            torch.autograd.graph.increment_version(parts_of(item))  # autograd cannot see the kernel's writes
        return rest
