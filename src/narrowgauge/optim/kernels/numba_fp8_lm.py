"""Adam's step of a run in FP8-LM's formats, each of its two passes in one loop, without scratch memory.

Parameter (or its master) and second moment in float16, gradient and first moment in E4M3, each with one scale for the
tensor. The same bits as the loops of `numba_scaled` and `numba_rules` one after another, each of which waits either for
roots and divisions, or for everything else.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from narrowgauge.numerics.kernels.numba_bits import INNER, MAGNITUDE, bits_of, widen
from narrowgauge.optim.kernels import table as t
from narrowgauge.optim.kernels.numba_memory import load, standalone, store
from narrowgauge.optim.kernels.numba_parameters import e4m3
from narrowgauge.optim.kernels.numba_rules import LEAST_CORRECTION, quotient
from narrowgauge.optim.kernels.numba_scaled import e4m3_of, floor_of, half_of, load_scaled, store_scaled

i16, i32, f32, u8, u16 = np.int16, np.int32, np.float32, np.uint8, np.uint16

RUN = t.RUN
# Numba takes members of an enum for objects, plain numbers for constants
_PARAM_KIND, _PARAM, _MASTER = int(t.Column.PARAM_KIND), int(t.Column.PARAM), int(t.Column.MASTER)
_GRAD_KIND, _GRAD, _GRAD_SCALE = int(t.Column.GRAD_KIND), int(t.Column.GRAD), int(t.Column.GRAD_SCALE)
_FIRST, _SECOND = int(t.Column.FIRST_KIND), int(t.Column.SECOND_KIND)
_PARAM_CODE, _PARAM_SCALE = int(t.Column.PARAM_CODE), int(t.Column.PARAM_SCALE)
_MASTER_CODE, _MASTER_SCALE = int(t.Column.MASTER_CODE), int(t.Column.MASTER_SCALE)
_FIRST_CODE, _SECOND_CODE = int(t.Column.FIRST_CODE), int(t.Column.SECOND_CODE)
_SCALED, _COPIED = int(t.ParamKind.SCALED), int(t.ParamKind.COPIED)
_SCALED_MOMENT, _E4M3_GRAD, _ADAM = int(t.MomentKind.SCALED), int(t.GradKind.E4M3), int(t.RuleCode.ADAM)
_E4M3, _HALF = 0, 2  # of `table.CODED_FORMATS`


@njit(**INNER, error_model="numpy")
def _stepped(p: float, g: float, m: float, v: float, inverse: float, h: Any) -> tuple[float, float, float]:
    """The new parameter and moments by `numba_rules.adam`."""
    first = f32(f32(h[0] * m) + f32(h[1] * g))
    second = f32(f32(h[2] * v) + f32(h[3] * f32(g * g)))
    denominator = f32(quotient(f32(np.sqrt(second)), h[4], inverse) + h[6])
    return f32(f32(p * h[7]) - f32(h[5] * f32(first / denominator))), first, second


@njit(**INNER, error_model="numpy")
def _measure(
    param: int, grad: int, first: int, second: int, at: int, n: int, p_scale: float, g_scale: float, m_scale: float,
    v_scale: float, h: Any,
) -> tuple[int, int, int, int]:  # fmt: skip
    """What `numba_step.step_values` finds: the largest new first and second moment and parameter, and any change."""
    standalone()
    numbers = (h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7])
    inverse = f32(f32(1.0) / numbers[4])
    most_first, most_second, most, differs = i32(0), i32(0), i32(0), i32(0)
    for i in range(n):
        p = f32(widen(load(0, i16, param, at + i)) * f32(p_scale))
        g = f32(e4m3(i16(load(1, u8, grad, at + i))) * f32(g_scale))
        m = f32(e4m3(i16(load(2, u8, first, at + i))) * f32(m_scale))
        v = f32(widen(load(3, i16, second, at + i)) * f32(v_scale))
        new, new_m, new_v = _stepped(p, g, m, v, inverse, numbers)
        most_first = max(most_first, i32(bits_of(new_m) & MAGNITUDE))
        most_second = max(most_second, i32(bits_of(new_v) & MAGNITUDE))
        most = max(most, i32(bits_of(new) & MAGNITUDE))
        differs = i32(differs | i32(p != new))
    return most_first, most_second, most, differs


@njit(**INNER, error_model="numpy")
def _write(
    param: int, grad: int, first: int, second: int, at: int, n: int, p_scale: float, g_scale: float, m_scale: float,
    v_scale: float, h: Any, new_p: float, new_m: float, new_v: float, m_floor: int, v_floor: int, keeps: bool,
) -> None:  # fmt: skip
    """Store the step. new_p, new_m, new_v: the quant_scales; keeps: the parameter's codes stay as they are.

    m_floor, v_floor: see `numba_scaled.code_of`.
    """
    standalone()
    numbers = (h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7])
    inverse = f32(f32(1.0) / numbers[4])
    for i in range(n):
        held = load(0, i16, param, at + i)
        p = f32(widen(held) * f32(p_scale))
        g = f32(e4m3(i16(load(1, u8, grad, at + i))) * f32(g_scale))
        m = f32(e4m3(i16(load(2, u8, first, at + i))) * f32(m_scale))
        v = f32(widen(load(3, i16, second, at + i)) * f32(v_scale))
        new, m, v = _stepped(p, g, m, v, inverse, numbers)
        code = i16(half_of(new, f32(new_p), i32(0)))
        store(0, i16, param, at + i, held if keeps else code)
        store(2, u8, first, at + i, u8(e4m3_of(m, f32(new_m), i32(m_floor))))
        store(3, u16, second, at + i, u16(half_of(v, f32(new_v), i32(v_floor))))


@njit(**INNER)
def takes(rule: int, row: Any, h: Any) -> bool:
    """True where these loops are for a parameter, nearest-even but for its moments. row, h: see `numba_step`."""
    copied = row[_PARAM_KIND] == _COPIED
    code = row[_MASTER_CODE] if copied else row[_PARAM_CODE]
    return (
        rule == _ADAM and (copied or row[_PARAM_KIND] == _SCALED) and code % 6 == _HALF
        and row[_GRAD_KIND] == _E4M3_GRAD and h[8] == f32(0.0) and LEAST_CORRECTION <= h[4] <= f32(1.0)
        and row[_FIRST] == _SCALED_MOMENT and row[_FIRST_CODE] % 3 == _E4M3
        and row[_SECOND] == _SCALED_MOMENT and row[_SECOND_CODE] % 3 == _HALF
    )  # fmt: skip


@njit(**INNER)
def measure(row: Any, h: Any, first: int, last: int, found: Any) -> None:
    """Take the step of the values `first` to `last` of a parameter, and raise `found` as `numba_step` does."""
    copied = row[_PARAM_KIND] == _COPIED
    param, p_scale = (row[_MASTER], row[_MASTER_SCALE]) if copied else (row[_PARAM], row[_PARAM_SCALE])
    most_first, most_second, most, differs = _measure(
        param, row[_GRAD], row[_FIRST + 1], row[_SECOND + 1], first, last - first, load(0, f32, p_scale, 0),
        load(0, f32, row[_GRAD_SCALE], 0), load(0, f32, row[_FIRST + 2], 0), load(0, f32, row[_SECOND + 2], 0), h,
    )  # fmt: skip
    found[0], found[1] = max(found[0], most_first), max(found[1], most_second)
    found[2], found[3] = max(found[2], most), max(found[3], differs)


@njit(**INNER)
def write(row: Any, h: Any, first: int, last: int, scales: Any, scratch: int) -> None:
    """Store the step of the values `first` to `last`. scales: see `numba_step`; scratch: address of RUN values."""
    copied = row[_PARAM_KIND] == _COPIED
    param, p_scale = (row[_MASTER], row[_MASTER_SCALE]) if copied else (row[_PARAM], row[_PARAM_SCALE])
    keeps = scales[0] == f32(0.0)
    for at in range(first, last, RUN):
        n = min(RUN, last - at)
        _write(
            param, row[_GRAD], row[_FIRST + 1], row[_SECOND + 1], at, n, load(0, f32, p_scale, 0),
            load(0, f32, row[_GRAD_SCALE], 0), load(0, f32, row[_FIRST + 2], 0), load(0, f32, row[_SECOND + 2], 0), h,
            scales[1] if copied else scales[0], scales[2], scales[3], floor_of(row[_FIRST_CODE]),
            floor_of(row[_SECOND_CODE]), keeps,
        )  # fmt: skip
        if copied and not keeps:
            load_scaled(row[_MASTER_CODE], param, at, n, scales[4], scratch)
            store_scaled(row[_PARAM_CODE], scratch, n, scales[0], row[_PARAM], at)
