"""The optimizer step of a parameter by the Triton kernel, on torch tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from narrowgauge.optim.kernels import triton_step, whole_scales
from narrowgauge.optim.kernels.items import grad_kind, is_scaled, row_of
from narrowgauge.optim.kernels.table import NUMBERS, Column, GradKind, MomentKind, ParamKind, RuleCode, numbers_of
from narrowgauge.optim.rules import Muon, Rule, orthogonalized
from narrowgauge.optim.update import Item
from narrowgauge.tensors.quantized import QuantizedTensor

PROGRAM = 2048  # values of a program

_KERNEL: Any = triton_step.step_kernel  # takes the options of a launch, too

_L2 = {RuleCode.ADAM: 8, RuleCode.SGD: 4}  # which number joins the gradient


def step(rule: Rule, item: Item, key: Tensor | None) -> None:
    """Take the step, in place, with the bits of `update.update`; `items.takes` is True for the item.

    key: as there, on the parameter's device.
    """
    row = row_of(rule, item)
    kind = grad_kind(item.grad)
    assert row is not None and kind is not None
    grad = item.grad
    scale = grad.dequant_scale if isinstance(grad, QuantizedTensor) else None
    grad = (grad.codes if isinstance(grad, QuantizedTensor) else grad).contiguous()
    grad = grad.view(torch.uint8) if grad.element_size() == 1 else grad
    numbers = numbers_of(item.hyper)
    with torch.cuda.device_of(item.param):
        if rule is Rule.MUON:
            assert isinstance(item.hyper, Muon)
            update = torch.empty(item.param.shape, dtype=torch.float32, device=item.param.device)
            told = [*row]
            told[Column.PARAM_KIND] = ParamKind.FLOAT
            as_update = item._replace(param=update, master=None)
            _launch(RuleCode.MUON, told, as_update, kind, grad, scale, numbers, key)
            update = orthogonalized(update, item.hyper).contiguous()
            row[Column.FIRST_KIND] = 0
            descent = item._replace(moments=())
            _launch(RuleCode.DESCEND, row, descent, GradKind.FLOAT, update, None, numbers, key)
        elif not is_scaled(row):
            _launch(RuleCode.of(rule), row, item, kind, grad, scale, numbers, key)
        else:
            found = torch.zeros(4, dtype=torch.int32, device=item.param.device)
            _launch(RuleCode.of(rule), row, item, kind, grad, scale, numbers, key, None, found)
            scales, writes = whole_scales.scales_on_device(row, item, found)
            _launch(RuleCode.of(rule), row, item, kind, grad, scale, numbers, key, scales, found)
            for old, new in writes:
                old.copy_(new)


def _launch(
    rule: RuleCode,
    row: Sequence[int],
    item: Item,
    kind: GradKind,
    grad: Tensor,
    scale: Tensor | None,
    numbers: Sequence[float],
    key: Tensor | None,
    scales: Tensor | None = None,
    found: Tensor | None = None,
) -> None:
    """scales, found: see the kernel; the latter alone: the step is measured."""
    columns, width = row[Column.COLUMNS], row[Column.WIDTH]
    across = math.ceil(columns / width)
    tiles = row[Column.VALUES] // columns * across
    param, param_scale = _codes_of(item.param, grad)
    master, master_scale = (grad, grad) if item.master is None else _codes_of(item.master, grad)
    parts: list[Any] = [param, master, grad, grad if scale is None else scale]
    for kind_at, stored in zip((Column.FIRST_KIND, Column.SECOND_KIND), (*item.moments, None, None), strict=False):
        if row[kind_at] in (MomentKind.SIGNED, MomentKind.UNSIGNED):
            assert isinstance(stored, QuantizedTensor)
            parts += [stored.codes, stored.dequant_scale, stored.amax.zero_().view(torch.int32)]
        else:
            parts += [*((grad, grad) if stored is None else _codes_of(stored, grad)), grad]
    parts += [param_scale, master_scale, grad if scales is None else scales, grad if found is None else found]
    padded = triton.next_power_of_2(width)
    per_program = max(PROGRAM // padded, 1)
    _KERNEL[(triton.cdiv(tiles, per_program),)](
        *parts, grad if key is None else key, row[Column.STREAM], columns, width, across, tiles,
        *numbers, *[0.0] * (NUMBERS - len(numbers)),
        RULE=int(rule), L2=rule in _L2 and numbers[_L2[rule]] != 0.0, PARAM=row[Column.PARAM_KIND], GRAD=int(kind),
        FIRST=row[Column.FIRST_KIND], SECOND=row[Column.SECOND_KIND],
        **{f"{name}_CODE": row[Column[f"{name}_CODE"]] for name in ("PARAM", "MASTER", "FIRST", "SECOND")},
        MEASURE=found is not None and scales is None, TILES=per_program, WIDTH=padded, enable_fp_fusion=False,
    )  # fmt: skip


def _codes_of(stored: Tensor, instead: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, as integers, and scale of what has one; values of anything else, and `instead` of a scale."""
    if not isinstance(stored, QuantizedTensor):
        return stored.detach(), instead
    return stored.codes.view(torch.int16 if stored.codes.element_size() == 2 else torch.uint8), stored.dequant_scale
