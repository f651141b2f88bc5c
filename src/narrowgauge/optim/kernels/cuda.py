"""The optimizer step of a parameter by the Triton kernel, on torch tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from narrowgauge.optim.kernels import triton_step
from narrowgauge.optim.kernels.items import grad_kind, parts_of_one, row_of
from narrowgauge.optim.kernels.table import NUMBERS, Column, GradKind, ParamKind, RuleCode, numbers_of
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
            as_update = [*row]
            as_update[Column.PARAM_KIND] = ParamKind.FLOAT
            _launch(RuleCode.MUON, as_update, update, None, kind, grad, scale, item.moments, numbers, key)
            update = orthogonalized(update, item.hyper).contiguous()
            row[Column.FIRST_KIND] = 0
            _launch(RuleCode.DESCEND, row, item.param, item.master, GradKind.FLOAT, update, None, (), numbers, key)
        else:
            _launch(RuleCode.of(rule), row, item.param, item.master, kind, grad, scale, item.moments, numbers, key)


def _launch(
    rule: RuleCode,
    row: Sequence[int],
    param: Tensor,
    master: Tensor | None,
    kind: GradKind,
    grad: Tensor,
    scale: Tensor | None,
    moments: Sequence[Tensor],
    numbers: Sequence[float],
    key: Tensor | None,
) -> None:
    columns, width = row[Column.COLUMNS], row[Column.WIDTH]
    across = math.ceil(columns / width)
    tiles = row[Column.VALUES] // columns * across
    parts: list[Any] = [param.detach(), grad if master is None else master, grad, grad if scale is None else scale]
    for place in range(2):
        own = parts_of_one(moments[place]) if place < len(moments) else ()
        codes, scales, amax = (*own, *(grad,) * 3)[:3]
        if len(own) > 1:
            amax = amax.zero_().view(torch.int32)
        parts += [codes, scales, amax]
    padded = triton.next_power_of_2(width)
    per_program = max(PROGRAM // padded, 1)
    _KERNEL[(triton.cdiv(tiles, per_program),)](
        *parts, grad if key is None else key, row[Column.STREAM], columns, width, across, tiles,
        *numbers, *[0.0] * (NUMBERS - len(numbers)),
        RULE=int(rule), L2=rule in _L2 and numbers[_L2[rule]] != 0.0, PARAM=row[Column.PARAM_KIND], GRAD=int(kind),
        FIRST=row[Column.FIRST_KIND], SECOND=row[Column.SECOND_KIND], TILES=per_program, WIDTH=padded,
        enable_fp_fusion=False,
    )  # fmt: skip
