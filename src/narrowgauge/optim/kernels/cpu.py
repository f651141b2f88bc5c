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

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.numerics.kernels import stale
from narrowgauge.numerics.kernels.cpu_arrays import chunks_of
from narrowgauge.optim.kernels.items import grad_kind, parts_of, row_of
from narrowgauge.optim.kernels.table import Column, GradKind, ParamKind, RuleCode
from narrowgauge.optim.rules import Muon, Rule, orthogonalized
from narrowgauge.optim.update import Item
from narrowgauge.tensors.quantized import QuantizedTensor

NUMBERS = 9  # most that a rule has
_CODES = {Rule.ADAM: RuleCode.ADAM, Rule.SGD: RuleCode.SGD, Rule.LION: RuleCode.LION, Rule.MUON: RuleCode.MUON}


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


class Plan:
    """Steps of the same parameters, again and again: what stays from step to step is looked up once.

    It keeps the tensors of the last step's items, but for the gradients, alive.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._ids: list[int] = []
        self._addresses: list[int] = []
        self._parts: list[Tensor] = []
        self._table = np.zeros((0, len(Column)), np.int64)
        self._starts = np.zeros(1, np.int64)

    def run(self, items: Sequence[Item], key: Tensor | None = None) -> None:
        """Take the step of all `items`, in place, in one call; the same bits as `update.update` of each.

        Every item is one that `items.takes`; a tensor may be in one of them only. key: as in `update.update`. Raises
        NarrowgaugeError for an item that the kernels do not take.
        """
        if not items:
            return
        self._look_up(items)
        kept = self._set_gradients(items)
        bits = 0 if key is None else int(key.item())
        if self._rule is Rule.MUON:
            self._run_muon(items, bits)
        else:
            _run(_CODES[self._rule], self._table, _numbers(items), self._starts, bits)
        del kept
        torch.autograd.graph.increment_version(self._parts)  # autograd cannot see the kernels' writes

    def _look_up(self, items: Sequence[Item]) -> None:
        """The table, anew where a tensor is another one, or has other memory."""
        parts = list(chain.from_iterable(map(parts_of, items)))
        ids, addresses = list(map(id, parts)), [part.data_ptr() for part in parts]
        streams = [item.stream for item in items]
        if ids == self._ids and addresses == self._addresses and streams == self._table[:, Column.STREAM].tolist():
            return
        rows = [row_of(self._rule, item) for item in items]
        for row, item in zip(rows, items, strict=True):
            if row is None:
                raise _unknown(item)
        self._table = np.array(rows, np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self._table[:, Column.VALUES])])
        self._ids, self._addresses, self._parts = ids, addresses, parts

    def _set_gradients(self, items: Sequence[Item]) -> list[Tensor]:
        """Write the gradients into the table; returns what has to live until they are read."""
        kept, kinds, addresses, scales = [], [], [], []
        for item in items:
            grad, kind, scale = item.grad, grad_kind(item.grad), 0
            if kind is None or grad.numel() != item.param.numel():
                raise _unknown(item)
            if isinstance(grad, QuantizedTensor):
                grad, scale = grad.codes, grad.dequant_scale.data_ptr()
            if not grad.is_contiguous():
                grad = grad.contiguous()
                kept.append(grad)
            kinds.append(int(kind))
            addresses.append(grad.data_ptr())
            scales.append(scale)
        self._table[:, Column.GRAD_KIND], self._table[:, Column.GRAD] = kinds, addresses
        self._table[:, Column.GRAD_SCALE] = scales
        return kept

    def _run_muon(self, items: Sequence[Item], key: int) -> None:
        """Momentum and descent by the kernels, between them the iteration of matrix products, one by one."""
        for at, item in enumerate(items):
            assert isinstance(item.hyper, Muon)
            row, numbers, starts = self._table[at : at + 1], _numbers([item]), np.array([0, item.param.numel()])
            update = torch.empty(item.param.shape, dtype=torch.float32)
            momentum = row.copy()
            momentum[0, Column.PARAM_KIND], momentum[0, Column.PARAM] = ParamKind.FLOAT, update.data_ptr()
            _run(RuleCode.MUON, momentum, numbers, starts, key)
            update = orthogonalized(update, item.hyper).contiguous()
            descent = row.copy()
            descent[0, Column.GRAD_KIND], descent[0, Column.GRAD] = GradKind.FLOAT, update.data_ptr()
            descent[0, Column.FIRST_KIND : Column.SECOND_AMAX + 1] = 0
            _run(RuleCode.DESCEND, descent, numbers, starts, key)


def _run(rule: RuleCode, table: np.ndarray, numbers: np.ndarray, starts: np.ndarray, key: int) -> None:
    total = int(starts[-1])
    chunks = chunks_of(total)
    amax = np.zeros((chunks, len(table), 2), np.int32)
    if chunks == 1:
        numba_step.step_values(int(rule), table, numbers, starts, 0, total, key, amax[0])
    else:
        numba_step.step_parallel(int(rule), table, numbers, starts, chunks, key, amax)
    numba_step.write_amax(table, amax)


def _numbers(items: Sequence[Item]) -> np.ndarray:
    """The numbers of each item's step, in float32."""
    known: dict[Any, int] = {}
    index = [known.setdefault(item.hyper, len(known)) for item in items]
    rows = np.zeros((len(known), NUMBERS), np.float32)
    for row, hyper in zip(rows, known, strict=True):
        # of Muon the lr, both shares, whether it is Nesterov's, and the decay; the rest is for the iteration
        plain = hyper[:5] if isinstance(hyper, Muon) else hyper
        row[: len(plain)] = plain
    return rows[index]


def _unknown(item: Item) -> NarrowgaugeError:
    return NarrowgaugeError(
        f"expected a parameter whose formats the kernels take, found one of shape {list(item.param.shape)}, "
        f"{item.param.dtype}, with a gradient of {item.grad.dtype}: ask `takes` first, and use `update.update` else"
    )
