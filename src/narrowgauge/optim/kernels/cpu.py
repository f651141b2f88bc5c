"""The optimizer step of many parameters by the Numba kernels, on torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from narrowgauge.numerics.kernels import stale
from narrowgauge.numerics.kernels.cpu_threads import in_threads
from narrowgauge.optim.kernels import whole_scales
from narrowgauge.optim.kernels.items import address_of, grad_kind, is_scaled, parts_of, row_of
from narrowgauge.optim.kernels.table import NUMBERS, Column, GradKind, ParamKind, RuleCode, numbers_of
from narrowgauge.optim.rules import Muon, Rule, orthogonalized
from narrowgauge.optim.update import Item
from narrowgauge.tensors.quantized import QuantizedTensor


@njit(cache=True)
def _probe() -> int:
    """Never called: a function whose cache is where those of the kernels are."""
    return 0


def _drop_stale_kernels() -> None:
    here = Path(__file__).resolve().parent
    folder = Path(_probe.stats.cache_path)  # type: ignore[attr-defined]
    stale.drop_stale(folder.glob("numba_*.nbi"), [*here.glob("*.py"), *stale.sources()])


_drop_stale_kernels()  # before the first of them is loaded
from narrowgauge.optim.kernels import numba_step  # noqa: E402


class CpuPlan:
    """`plan.Plan` for parameters on the CPU: what stays from step to step is looked up once."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._seen: tuple[list[Any], ...] = ()  # what the table follows from, of all items
        self._parts: list[Tensor] = []  # kept alive, so that no other tensor takes the place of one in memory
        self._rows: list[list[int] | None] = []

    def run(self, items: Sequence[Item], key: Tensor | None = None) -> list[Item]:
        """`Plan.run`, in one call."""
        self._look_up(items)
        grads = [None if row is None else _gradient(item, row) for item, row in zip(items, self._rows, strict=True)]
        known = [i for i, grad in enumerate(grads) if grad is not None]
        if known:
            table = np.array([self._rows[i] for i in known], np.int64)
            table[:, Column.GRAD_KIND : Column.GRAD_SCALE + 1] = [grads[i][:3] for i in known]  # type: ignore[index]
            bits = 0 if key is None else int(key.item())
            stepped = self._step([items[i] for i in known], table, bits)
            for i in [i for i, is_stepped in zip(known, stepped, strict=True) if not is_stepped]:
                grads[i] = None
            known = [i for i in known if grads[i] is not None]
        if len(known) == len(items):
            torch.autograd.graph.increment_version(self._parts)  # autograd cannot see the kernels' writes
            return []
        torch.autograd.graph.increment_version([part for i in known for part in parts_of(items[i])])
        return [item for item, grad in zip(items, grads, strict=True) if grad is None]

    def _look_up(self, items: Sequence[Item]) -> None:
        """The rows without their gradients, anew where a tensor is another one, or has other memory."""
        parts = list(chain.from_iterable(map(parts_of, items)))
        seen = (
            list(map(id, parts)),
            list(map(address_of, parts)),
            [(item.stochastic, item.stream) for item in items],
        )
        if seen != self._seen:
            self._rows = [row_of(self._rule, item) for item in items]
            self._seen, self._parts = seen, parts

    def _step(self, items: Sequence[Item], table: np.ndarray, key: int) -> np.ndarray:
        """Returns whether each was stepped, or is left as it was."""
        stepped = np.ones(len(items), bool)
        if self._rule is Rule.MUON:
            self._run_muon(items, table, key)
            return stepped
        rule, numbers = RuleCode.of(self._rule), _numbers(items)
        twice = np.array([is_scaled(row) for row in table])
        if not twice.all():
            _run(rule, table[~twice], numbers[~twice], key)
        if twice.any():
            stepped[twice] = _run_twice(rule, table[twice], numbers[twice], key)
        return stepped

    def _run_muon(self, items: Sequence[Item], table: np.ndarray, key: int) -> None:
        """Momentum and descent by the kernels, between them the iteration of matrix products, one by one."""
        for at, item in enumerate(items):
            assert isinstance(item.hyper, Muon)
            row, numbers = table[at : at + 1], _numbers([item])
            update = torch.empty(item.param.shape, dtype=torch.float32)
            momentum = row.copy()
            momentum[0, Column.PARAM_KIND], momentum[0, Column.PARAM] = ParamKind.FLOAT, update.data_ptr()
            _run(RuleCode.MUON, momentum, numbers, key)
            update = orthogonalized(update, item.hyper).contiguous()
            descent = row.copy()
            descent[0, Column.GRAD_KIND], descent[0, Column.GRAD] = GradKind.FLOAT, update.data_ptr()
            descent[0, Column.FIRST_KIND : Column.SECOND_AMAX + 1] = 0
            _run(RuleCode.DESCEND, descent, numbers, key)


def _run(rule: RuleCode, table: np.ndarray, numbers: np.ndarray, key: int, scales: np.ndarray | None = None) -> None:
    """The step in one pass. scales: see `numba_step.step_values`; None where nothing has one for the whole."""
    scales = np.ones((len(table), 5), np.float32) if scales is None else scales
    amax = _pass(rule, table, numbers, key, scales)[:, :2]
    addresses = table[:, [Column.FIRST_AMAX, Column.SECOND_AMAX]]
    numba_step.write_floats(addresses.ravel(), amax.copy().view(np.float32).ravel())


def _run_twice(rule: RuleCode, table: np.ndarray, numbers: np.ndarray, key: int) -> np.ndarray:
    """The step of what has one scale for a whole tensor; returns whether each was stepped, or is left as it was."""
    found = _pass(rule, table, numbers, key, None)
    scales = whole_scales.scales_of(table, found, _read)
    known = scales.known
    if known.any():
        _run(rule, table[known], numbers[known], key, scales.quant[known])
        numba_step.write_floats(scales.addresses[known].ravel(), scales.values[known].ravel())
    return known


def _pass(
    rule: RuleCode, table: np.ndarray, numbers: np.ndarray, key: int, scales: np.ndarray | None
) -> np.ndarray:  # fmt: skip
    """Step, or without scales measure the step; returns what `numba_step.step_values` finds, int32 [parameters, 4]."""
    starts = np.concatenate([[0], np.cumsum(table[:, Column.VALUES])])
    total, is_measuring = int(starts[-1]), scales is None
    scales = np.empty((len(table), 5), np.float32) if scales is None else scales

    def step(first: int, last: int) -> np.ndarray:
        found = np.zeros((len(table), 4), np.int32)
        numba_step.step_values(int(rule), table, numbers, starts, first, last, key, scales, is_measuring, found)
        return found

    return np.maximum.reduce(in_threads(step, total, 8 * total))


def _read(addresses: np.ndarray) -> np.ndarray:
    values = np.ones(addresses.shape, np.float32)
    numba_step.read_floats(addresses.ravel(), values.reshape(-1))
    return values


def _numbers(items: Sequence[Item]) -> np.ndarray:
    """The numbers of each item's step, in float32."""
    known: dict[Any, int] = {}
    index = [known.setdefault(item.hyper, len(known)) for item in items]
    rows = np.zeros((len(known), NUMBERS), np.float32)
    for row, hyper in zip(rows, known, strict=True):
        plain = numbers_of(hyper)
        row[: len(plain)] = plain
    return rows[index]


def _gradient(item: Item, row: list[int]) -> tuple[int, int, int, Tensor] | None:
    """Kind, address and address of the scale of a gradient, and what holds them; None where the kernels lack it."""
    grad, kind, scale = item.grad, grad_kind(item.grad), 0
    # the row's size, since a parameter may have shrunk in place: its memory is where it was
    if kind is None or grad.numel() != row[Column.VALUES]:
        return None
    if isinstance(grad, QuantizedTensor):
        grad, scale = grad.codes, grad.dequant_scale.data_ptr()
    grad = grad.contiguous()
    return int(kind), grad.data_ptr(), scale, grad
