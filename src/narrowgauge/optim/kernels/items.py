"""Which steps the kernels take, and the row of the table that tells them of a parameter."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from narrowgauge.numerics.companding import LINEAR, SQUARE_ROOT
from narrowgauge.numerics.formats import E4M3FN, E5M2, INT8, UINT8
from narrowgauge.numerics.granularity import Block
from narrowgauge.numerics.kernels.paths import has_gpu_kernels
from narrowgauge.numerics.rounding import NEAREST_EVEN, NONZERO
from narrowgauge.numerics.scaling import TENSOR_POW2, ScaleRule
from narrowgauge.optim.kernels.table import (
    CODED_FORMATS,
    CODED_RULES,
    RUN,
    Coding,
    Column,
    GradKind,
    MomentKind,
    ParamKind,
)
from narrowgauge.optim.rules import Rule
from narrowgauge.optim.update import Item
from narrowgauge.recipes.cast_spec import CastSpec
from narrowgauge.tensors.quantized import QuantizedTensor

# how many moments the kernels of a rule know
_MOMENTS = {Rule.ADAM: (2,), Rule.SGD: (0, 1), Rule.LION: (1,), Rule.MUON: (1,)}
_MASTERS = {torch.int8: ParamKind.RESIDUAL, torch.int16: ParamKind.REMAINDER}
_FLOATS = {torch.float32: 0, torch.bfloat16: 1}  # FLOAT and BFLOAT, as both kinds number them
_GRADS = {E4M3FN: GradKind.E4M3, E5M2: GradKind.E5M2}
_PLAIN_GRADS = {torch.float32: GradKind.FLOAT, torch.bfloat16: GradKind.BFLOAT, torch.float16: GradKind.HALF}


class Moment(NamedTuple):
    """A moment as a row tells of it. columns: of a row of tiles; width: of a tile; both 0 without tiles.

    coding: where it has one scale.
    """

    kind: MomentKind
    parts: tuple[Tensor, ...]  # values, or codes, scales and amax
    columns: int
    width: int
    coding: int = 0


def takes(rule: Rule, item: Item) -> bool:
    """True where the kernels take the step of `item`, whose gradient is as it is now."""
    devices = {part.device for part in (*parts_of(item), item.grad)}
    row, on_cpu = row_of(rule, item), item.param.device.type == "cpu"
    if len(devices) > 1 or row is None or grad_kind(item.grad) is None:
        return False
    return on_cpu or has_gpu_kernels(item.param)


def is_scaled(row: list[int]) -> bool:
    """True where a tensor has one scale for all of its values, so that a step passes over memory twice."""
    moments = (row[Column.FIRST_KIND], row[Column.SECOND_KIND])
    return row[Column.PARAM_KIND] >= ParamKind.SCALED or MomentKind.SCALED in moments


def row_of(rule: Rule, item: Item) -> list[int] | None:
    """The row of the table without the gradient's columns, or None where a kernel lacks one of the formats."""
    kind = _param_kind(item)
    moments = [_moment(stored, item.param) for stored in item.moments]
    if kind is None or None in moments or len(moments) not in _MOMENTS[rule]:
        return None
    known = [moment for moment in moments if moment is not None]
    shapes = {(moment.columns, moment.width) for moment in known if moment.width}
    if len(shapes) > 1 or item.grad.numel() != item.param.numel():
        return None
    columns, width = shapes.pop() if shapes else (item.param.numel(), RUN)
    if columns % width == 0:
        columns = item.param.numel()  # rows of whole tiles are one long row
    row = [0] * len(Column)
    row[Column.PARAM_KIND] = kind
    _tell_of(row, item.param, Column.PARAM, Column.PARAM_CODE)
    if item.master is not None:
        _tell_of(row, item.master, Column.MASTER, Column.MASTER_CODE)
    row[Column.VALUES], row[Column.COLUMNS], row[Column.WIDTH] = item.param.numel(), columns, width
    row[Column.STREAM] = item.stream
    places = ((Column.FIRST_KIND, Column.FIRST_CODE), (Column.SECOND_KIND, Column.SECOND_CODE))
    for (at, code), moment in zip(places, known, strict=False):
        row[at], row[code] = moment.kind, moment.coding
        for offset, part in enumerate(moment.parts, 1):
            row[at + offset] = part.data_ptr()
    return None if rule is Rule.MUON and is_scaled(row) else row  # between whose two passes the moment is written


def _tell_of(row: list[int], stored: Tensor, values: Column, code: Column) -> None:
    """Address of a parameter or its master, and where it has one scale, how it is coded, and the addresses of that."""
    if not isinstance(stored, QuantizedTensor):
        row[values] = stored.data_ptr()
        return
    coding = _coding(stored)
    assert coding is not None
    row[values] = stored.codes.data_ptr()
    row[code : code + 3] = coding.number, stored.dequant_scale.data_ptr(), stored.amax.data_ptr()


def parts_of(item: Item) -> list[Tensor]:
    """The tensors whose addresses are in the row: what a step writes."""
    parts: list[Tensor] = []
    for stored in (item.param, *(() if item.master is None else (item.master,)), *item.moments):
        parts += parts_of_one(stored)
    return parts


def parts_of_one(stored: Tensor) -> tuple[Tensor, ...]:
    """Codes, scales and amax of a parameter, a master or a moment, or its plain values."""
    return (stored.codes, stored.dequant_scale, stored.amax) if isinstance(stored, QuantizedTensor) else (stored,)


def grad_kind(grad: Tensor) -> GradKind | None:
    """How a gradient is stored, or None where the kernels do not know it. Its strides do not matter."""
    if isinstance(grad, QuantizedTensor):
        is_whole = not grad.spec.in_blocks and grad.dequant_scale.numel() == 1 and _is_plain(grad.codes)
        return _GRADS.get(grad.spec.format) if is_whole else None
    return _PLAIN_GRADS.get(grad.dtype) if _is_plain(grad) else None


def _param_kind(item: Item) -> ParamKind | None:
    param, master = item.param, item.master
    if isinstance(param, QuantizedTensor):
        return _scaled_kind(param, master)
    if param.dtype not in _FLOATS or not _is_flat(param) or not param.numel():
        return None
    if master is not None:
        suits = param.dtype is torch.bfloat16 and _is_flat(master) and master.shape == param.shape
        return _MASTERS.get(master.dtype) if suits else None
    if item.stochastic and param.dtype is torch.bfloat16:
        return ParamKind.STOCHASTIC
    return ParamKind(_FLOATS[param.dtype])


def _scaled_kind(param: QuantizedTensor, master: Tensor | None) -> ParamKind | None:
    if _coding(param) is None or not param.numel():
        return None
    if master is None:
        return ParamKind.SCALED
    if not isinstance(master, QuantizedTensor) or _coding(master) is None or master.shape != param.shape:
        return None
    # where amax is infinite, whether the master is written at all hangs on values that its codes do not say
    return ParamKind.COPIED if master.spec.scale is TENSOR_POW2 else None


def _coding(stored: QuantizedTensor) -> Coding | None:
    """How a tensor with one scale is stored; None where the kernels do not know it."""
    spec, parts = stored.spec, parts_of_one(stored)
    known = spec.format in CODED_FORMATS and spec.scale in CODED_RULES and not spec.in_blocks and not spec.is_stochastic
    if not known or spec.companding is not LINEAR or stored._whole is not None or not all(map(_is_flat, parts)):
        return None
    assert isinstance(spec.scale, ScaleRule)
    return Coding(spec.format, spec.scale, spec.rounding is NONZERO)


def _moment(stored: Tensor, param: Tensor) -> Moment | None:
    if stored.numel() != param.numel():
        return None
    if not isinstance(stored, QuantizedTensor):
        suits = stored.dtype in _FLOATS and _is_flat(stored)
        return Moment(MomentKind(1 + _FLOATS[stored.dtype]), (stored,), 0, 0) if suits else None
    coding = _coding(stored)
    if coding is not None:
        return Moment(MomentKind.SCALED, parts_of_one(stored), 0, 0, coding.number)
    spec, columns = stored.spec, stored.codes.shape[-1] if stored.codes.ndim else 1
    width = min(spec.granularity.columns or columns, columns)
    kind = _square_root_kind(spec)
    parts = parts_of_one(stored)
    tiles = stored.codes.numel() // columns * math.ceil(columns / width)
    if kind is None or width > RUN or not all(map(_is_flat, parts)) or stored.dequant_scale.numel() != tiles:
        return None
    return Moment(kind, parts, columns, width)


def _square_root_kind(spec: CastSpec) -> MomentKind | None:
    if spec.companding is not SQUARE_ROOT or spec.granularity != Block(1, spec.granularity.columns):
        return None
    kinds = {(INT8, NEAREST_EVEN): MomentKind.SIGNED, (UINT8, NONZERO): MomentKind.UNSIGNED}
    return kinds.get((spec.format, spec.rounding))


def address_of(part: Tensor) -> int:
    """Where a tensor's memory is, 0 where it has none of its own."""
    return part.data_ptr() if type(part) in (Tensor, nn.Parameter) else 0


def _is_plain(x: Tensor) -> bool:
    """True for a tensor that is its own memory."""
    return type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided


def _is_flat(x: Tensor) -> bool:
    return _is_plain(x) and x.is_contiguous()
