"""Between the two passes of a step: from the largest new magnitudes to the scales of what has one for a whole tensor.

The same numbers as those of `tensors.cast.cast_storage`, for many tensors at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from narrowgauge.numerics import rounding, scaling
from narrowgauge.numerics.scaling import TENSOR_POW2
from narrowgauge.optim.kernels.table import Coding, Column, MomentKind, ParamKind
from narrowgauge.optim.update import Item
from narrowgauge.tensors.quantized import QuantizedTensor

# where the table says of parameter, master, first and second moment how they are coded, and where scale and amax are
_CODES = (Column.PARAM_CODE, Column.MASTER_CODE, Column.FIRST_CODE, Column.SECOND_CODE)
_SCALES = (Column.PARAM_SCALE, Column.MASTER_SCALE, Column.FIRST_SCALE, Column.SECOND_SCALE)
_AMAXES = (Column.PARAM_AMAX, Column.MASTER_AMAX, Column.FIRST_AMAX, Column.SECOND_AMAX)
_PARAM, _MASTER = 0, 1
_FIRST_FOUND, _SECOND_FOUND, _PARAM_FOUND, _DIFFERS = range(4)


class WholeScales(NamedTuple):
    """New scales and amax of parameters, n of them, and their state.

    quant: float32 [n, 5], as `numba_step.step_values` takes it. addresses: int64 [n, 8], where to write `values`,
    float32 [n, 8], after the step; 0 for nowhere. known: bool [n], False where a value is not finite, so that the whole
    step is `update.update`'s.
    """

    quant: np.ndarray
    addresses: np.ndarray
    values: np.ndarray
    known: np.ndarray


def scales_of(table: np.ndarray, found: np.ndarray, read: Callable[[np.ndarray], np.ndarray]) -> WholeScales:
    """The scales that follow from a measured step.

    table: int64 [n, columns]. found: int32 [n, 4], see `numba_step`. read: from addresses, int64 of any shape, 0 for
    none, to the float32 values there.
    """
    param, first, second = (table[:, each] for each in (Column.PARAM_KIND, Column.FIRST_KIND, Column.SECOND_KIND))
    is_copied = param == ParamKind.COPIED
    scaled = [param >= ParamKind.SCALED, is_copied, first == MomentKind.SCALED, second == MomentKind.SCALED]
    has = np.stack(scaled, axis=1)
    addresses = np.where(np.hstack([has, has]), table[:, [*_SCALES, *_AMAXES]], 0)
    held = torch.from_numpy(read(addresses))
    old, old_amax = held[:, :4], held[:, 4:]
    largest = torch.from_numpy(found.view(np.float32))
    amax = largest[:, [_PARAM_FOUND, _PARAM_FOUND, _FIRST_FOUND, _SECOND_FOUND]].clone()
    known = np.isfinite(np.where(has, amax.numpy(), 0.0)).all(axis=1)
    known &= ~(is_copied & np.isinf(old_amax[:, _MASTER].numpy()))
    quant, dequant = torch.ones_like(old), torch.ones_like(old)
    for slot in (3, 2, _MASTER, _PARAM):  # of the master first, whose new values are the parameter's
        for number in np.unique(table[has[:, slot], _CODES[slot]]):
            some = torch.from_numpy(np.flatnonzero(has[:, slot] & (table[:, _CODES[slot]] == number)))
            coding = Coding.of(int(number))
            quant[some, slot], dequant[some, slot] = _scales(amax[some, slot], old[some, slot], coding)
            if slot == _MASTER:
                amax[some, _PARAM] = _rounded(amax[some, slot], quant[some, slot], dequant[some, slot], coding)
    is_same = has[:, _PARAM] & (found[:, _DIFFERS] == 0)
    quant[torch.from_numpy(is_same), _PARAM] = 0.0
    addresses[np.ix_(is_same, [_PARAM, _MASTER, 4 + _PARAM, 4 + _MASTER])] = 0
    for_kernel = torch.cat([quant, dequant[:, _MASTER : _MASTER + 1]], dim=1).contiguous()
    return WholeScales(for_kernel.numpy(), addresses, torch.cat([dequant, amax], dim=1).numpy(), known)


def scales_on_device(row: Sequence[int], item: Item, found: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """The scales that follow from one parameter's measured step, without waiting for its device.

    row: of the table. found: int32 [4], see `triton_step.step_kernel`. Returns that kernel's scales, and what is to be
    written after the step: where, and the new value.
    """
    largest, changes = found.view(torch.float32), found[_DIFFERS] != 0
    quant, writes = torch.ones(5, device=found.device), []

    def follow(stored: Tensor, code: Column, slot: int, amax: Tensor, where: Tensor | None) -> tuple[Tensor, Coding]:
        assert isinstance(stored, QuantizedTensor)
        coding = Coding.of(row[code])
        quant[slot], dequant = _scales(amax, stored.dequant_scale, coding)
        for old, new in ((stored.dequant_scale, dequant), (stored.amax, amax)):
            writes.append((old, new if where is None else torch.where(where, new, old)))
        return dequant, coding

    for place, stored in enumerate(item.moments):
        if row[(Column.FIRST_KIND, Column.SECOND_KIND)[place]] == MomentKind.SCALED:
            follow(stored, (Column.FIRST_CODE, Column.SECOND_CODE)[place], 2 + place, largest[place], None)
    amax = largest[_PARAM_FOUND]
    if row[Column.PARAM_KIND] == ParamKind.COPIED:
        assert item.master is not None
        quant[4], coding = follow(item.master, Column.MASTER_CODE, _MASTER, amax, changes)
        amax = _rounded(amax, quant[_MASTER], quant[4], coding)
    if row[Column.PARAM_KIND] >= ParamKind.SCALED:
        follow(item.param, Column.PARAM_CODE, _PARAM, amax, changes)
    return quant, writes


def _rounded(amax: Tensor, quant: Tensor, dequant: Tensor, coding: Coding) -> Tensor:
    """The largest magnitude of values once they are stored: rounding keeps their order."""
    codes = rounding.encode(amax * quant, coding.format, saturating=True)
    # a cast of one value may give a NaN another payload
    return torch.where(amax.isnan(), amax, rounding.decode(codes, coding.format) * dequant)


def _scales(amax: Tensor, old: Tensor, coding: Coding) -> tuple[Tensor, Tensor]:
    """quant_scale and dequant_scale of amax, of any shape; old: the dequant_scale before."""
    quant = scaling.quant_scale_of(amax, coding.format, coding.rule)
    dequant = scaling.dequant_scale_of(quant)
    if coding.rule is TENSOR_POW2:
        dequant = torch.where(amax.isfinite() & (amax > 0), dequant, old)
        quant = scaling.dequant_scale_of(dequant)  # exact: powers of two
    return quant, dequant
