"""The optimizer step of many parameters in one call of Numba: read, update and write in one pass over memory.

A run of values at a time is decoded to float32 scratch memory that stays in the first-level cache, stepped there, and
encoded from there. What there is to do is said by a table of integers, see `table`, and one of the rule's numbers.

Where a tensor has one scale for all of its values, that follows from the new values of the whole: a first pass over
memory takes the step and keeps no more than their largest magnitude, a second one takes it again and stores them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from narrowgauge.numerics.kernels import numba_rows
from narrowgauge.numerics.kernels.numba_bits import INNER, borrow, hold
from narrowgauge.optim.kernels import numba_fp8_lm, numba_narrow
from narrowgauge.optim.kernels import numba_moments as moments
from narrowgauge.optim.kernels import numba_parameters as parameters
from narrowgauge.optim.kernels import numba_rules as rules
from narrowgauge.optim.kernels import numba_scaled as scaled
from narrowgauge.optim.kernels import table as t
from narrowgauge.optim.kernels.numba_memory import load, store

i32, f32 = np.int32, np.float32

RUN = t.RUN
# 64 bytes apart from a multiple of the page, so that the arrays do not share lines of the cache
_STRIDE = RUN + 16

# Numba takes members of an enum for objects, plain numbers for constants
_PARAM_KIND, _PARAM, _MASTER = int(t.Column.PARAM_KIND), int(t.Column.PARAM), int(t.Column.MASTER)
_GRAD_KIND, _GRAD, _GRAD_SCALE = int(t.Column.GRAD_KIND), int(t.Column.GRAD), int(t.Column.GRAD_SCALE)
_FIRST, _SECOND = int(t.Column.FIRST_KIND), int(t.Column.SECOND_KIND)
_FIRST_AMAX, _SECOND_AMAX = int(t.Column.FIRST_AMAX), int(t.Column.SECOND_AMAX)
_VALUES, _COLUMNS, _WIDTH, _STREAM = (
    int(t.Column.VALUES), int(t.Column.COLUMNS), int(t.Column.WIDTH), int(t.Column.STREAM),
)  # fmt: skip
_PARAM_CODE, _PARAM_SCALE = int(t.Column.PARAM_CODE), int(t.Column.PARAM_SCALE)
_MASTER_CODE, _MASTER_SCALE = int(t.Column.MASTER_CODE), int(t.Column.MASTER_SCALE)
_MOMENT_CODE = int(t.Column.FIRST_CODE)
_FLOAT, _BFLOAT, _STOCHASTIC, _RESIDUAL, _REMAINDER, _SCALED = 0, 1, 2, 3, 4, 5
_E4M3, _HALF = int(t.GradKind.E4M3), int(t.GradKind.HALF)
_NO_MOMENT, _FLOAT_MOMENT, _BFLOAT_MOMENT, _SIGNED, _UNSIGNED, _SCALED_MOMENT = 0, 1, 2, 3, 4, 5
_ADAM, _SGD, _LION, _MUON = 0, 1, 2, 3


@njit(**INNER)
def _load_param(row: Any, at: int, n: int, out: int) -> None:
    kind = row[_PARAM_KIND]
    if kind == _FLOAT:
        parameters.load_float(row[_PARAM], at, n, out)
    elif kind <= _STOCHASTIC:
        parameters.load_bfloat(row[_PARAM], at, n, out)
    elif kind == _RESIDUAL:
        parameters.load_residual(row[_PARAM], row[_MASTER], at, n, out)
    elif kind == _REMAINDER:
        parameters.load_remainder(row[_PARAM], row[_MASTER], at, n, out)
    elif kind == _SCALED:
        scaled.load_scaled(row[_PARAM_CODE], row[_PARAM], at, n, load(0, f32, row[_PARAM_SCALE], 0), out)
    else:
        scaled.load_scaled(row[_MASTER_CODE], row[_MASTER], at, n, load(0, f32, row[_MASTER_SCALE], 0), out)


@njit(**INNER)
def _store_param(row: Any, at: int, n: int, old: int, new: int, words: Any, key: int, scales: Any) -> None:
    kind = row[_PARAM_KIND]
    if kind == _FLOAT:
        parameters.store_float(new, row[_PARAM], at, n)
    elif kind == _BFLOAT:
        parameters.store_bfloat(new, row[_PARAM], at, n)
    elif kind == _STOCHASTIC:
        skipped = at % 4
        numba_rows.draw_row(key, row[_STREAM], at // 4, words[: (skipped + n + 3) // 4 * 4])
        parameters.store_stochastic(new, words.ctypes.data + 4 * skipped, row[_PARAM], at, n)
    elif kind == _RESIDUAL:
        parameters.store_residual(old, new, row[_PARAM], row[_MASTER], at, n)
    elif kind == _REMAINDER:
        parameters.store_remainder(old, new, row[_PARAM], row[_MASTER], at, n)
    elif scales[0] != f32(0.0):  # else no value of the whole has changed
        if kind != _SCALED:
            scaled.store_scaled(row[_MASTER_CODE], new, n, scales[1], row[_MASTER], at)
            scaled.load_scaled(row[_MASTER_CODE], row[_MASTER], at, n, scales[4], new)
        scaled.store_scaled(row[_PARAM_CODE], new, n, scales[0], row[_PARAM], at)


@njit(**INNER)
def _load_grad(row: Any, at: int, n: int, out: int) -> None:
    kind = row[_GRAD_KIND]
    if kind == _FLOAT:
        parameters.load_float(row[_GRAD], at, n, out)
    elif kind == _BFLOAT:
        parameters.load_bfloat(row[_GRAD], at, n, out)
    elif kind == _HALF:
        scaled.load_half(row[_GRAD], at, n, f32(1.0), out)
    elif kind == _E4M3:
        parameters.load_e4m3(row[_GRAD], at, n, load(0, f32, row[_GRAD_SCALE], 0), out)
    else:
        parameters.load_e5m2(row[_GRAD], at, n, load(0, f32, row[_GRAD_SCALE], 0), out)


@njit(**INNER)
def _load_moment(row: Any, column: int, at: int, n: int, tile: int, out: int) -> None:
    kind, codes, scales = row[column], row[column + 1], row[column + 2]
    if kind == _FLOAT_MOMENT:
        parameters.load_float(codes, at, n, out)
    elif kind == _BFLOAT_MOMENT:
        parameters.load_bfloat(codes, at, n, out)
    elif kind == _SIGNED:
        moments.load_signed(codes, scales, at, n, tile, row[_WIDTH], out)
    elif kind == _UNSIGNED:
        moments.load_unsigned(codes, scales, at, n, tile, row[_WIDTH], out)
    elif kind != _NO_MOMENT:
        code = row[_MOMENT_CODE + (column == _SECOND)]
        scaled.load_scaled(code, codes, at, n, load(0, f32, scales, 0), out)


@njit(**INNER)
def _store_moment(
    row: Any, column: int, at: int, n: int, tile: int, values: int, root: int, quant_scales: Any
) -> int:  # fmt: skip
    kind, codes, scales = row[column], row[column + 1], row[column + 2]
    if kind == _FLOAT_MOMENT:
        parameters.store_float(values, codes, at, n)
    elif kind == _BFLOAT_MOMENT:
        parameters.store_bfloat(values, codes, at, n)
    elif kind == _SIGNED:
        return moments.store_signed(values, n, row[_WIDTH], codes, scales, at, tile)
    elif kind == _UNSIGNED:
        return moments.store_unsigned(values, root, n, row[_WIDTH], codes, scales, at, tile)
    elif kind != _NO_MOMENT:
        place = column == _SECOND
        scaled.store_scaled(row[_MOMENT_CODE + place], values, n, quant_scales[2 + place], codes, at)
    return i32(0)


@njit(**INNER)
def _update(
    rule: int, has_moment: bool, p: int, g: int, m: int, v: int, root: int, new: int, n: int, h: Any
) -> None:  # fmt: skip
    if rule == _ADAM:
        if h[8] != f32(0.0):
            rules.join_decay(p, g, n, h[8])
        if rules.LEAST_CORRECTION <= h[4] <= f32(1.0):
            rules.adam(p, g, m, v, root, new, n, h)
        else:
            rules.adam_dividing(p, g, m, v, root, new, n, h)
    elif rule == _SGD:
        if h[4] != f32(0.0):
            rules.join_decay(p, g, n, h[4])
        if has_moment:
            rules.sgd_momentum(p, g, m, new, n, h)
        else:
            rules.sgd(p, g, new, n, h)
    elif rule == _LION:
        rules.lion(p, g, m, new, n, h)
    elif rule == _MUON:
        rules.muon(g, m, new, n, h)
    else:
        rules.descend(p, g, new, n, h)


@njit(**INNER)
def _take(
    rule: int, row: Any, h: Any, at: int, n: int, tile: int, p: int, g: int, m: int, v: int, root: int, new: int
) -> None:
    """Read `n` values from `at` on, and leave in m, v, root and new what the rule makes of them."""
    _load_param(row, at, n, p)
    _load_grad(row, at, n, g)
    _load_moment(row, _FIRST, at, n, tile, m)
    _load_moment(row, _SECOND, at, n, tile, v)
    _update(rule, row[_FIRST] != _NO_MOMENT, p, g, m, v, root, new, n, h)


@njit(**INNER)
def _is_narrow(rule: int, row: Any, h: Any) -> bool:
    return (
        rule == _ADAM and row[_PARAM_KIND] == _RESIDUAL and row[_GRAD_KIND] == _E4M3 and row[_FIRST] == _SIGNED
        and row[_SECOND] == _UNSIGNED and h[8] == f32(0.0) and rules.LEAST_CORRECTION <= h[4] <= f32(1.0)
    )  # fmt: skip


@njit(**INNER)
def _measure_tiles(rule: int, row: Any, h: Any, first: int, last: int, scratch: int, found: Any) -> None:
    """Take the step of the tiles `first` to `last` of one parameter, and store nothing.

    found: int32 [4], raised to the largest magnitudes, as bits, of the new moments and the new parameter, and to 1
    where a value of it is another one.
    """
    columns, width = row[_COLUMNS], row[_WIDTH]
    across = (columns + width - 1) // width
    p, g, m = scratch, scratch + 4 * _STRIDE, scratch + 8 * _STRIDE
    v, root, new = scratch + 12 * _STRIDE, scratch + 16 * _STRIDE, scratch + 20 * _STRIDE
    most_first, most_second, most, differs = found[0], found[1], found[2], found[3]
    tile = first
    while tile < last:
        in_row = tile % across
        tiles = min(RUN // width, last - tile, across - in_row)
        at = tile // across * columns + in_row * width
        n = min(tiles * width, columns - in_row * width)
        _take(rule, row, h, at, n, tile, p, g, m, v, root, new)
        most_first = max(most_first, moments.largest_of(m, 0, n)) if row[_FIRST] == _SCALED_MOMENT else most_first
        most_second = max(most_second, moments.largest_of(v, 0, n)) if row[_SECOND] == _SCALED_MOMENT else most_second
        if row[_PARAM_KIND] >= _SCALED:
            most = max(most, moments.largest_of(new, 0, n))
            differs = i32(1) if differs != i32(0) or scaled.differs(p, new, n) else i32(0)
        tile += tiles
    found[0], found[1], found[2], found[3] = most_first, most_second, most, differs


@njit(**INNER)
def step_tiles(
    rule: int, row: Any, h: Any, first: int, last: int, key: int, words: Any, scratch: int, scales: Any, amax: Any
) -> None:
    """Step the tiles `first` to `last` of one parameter.

    row: of the table. h: numbers of the rule, float32. words: int32 [RUN + 4]; scratch: address of 6 * _STRIDE values.
    scales: float32 [5], see `step_values`. amax: int32, raised to the largest magnitude, as bits, of new moments that
    have tiles.
    """
    columns, width = row[_COLUMNS], row[_WIDTH]
    across = (columns + width - 1) // width
    p, g, m = scratch, scratch + 4 * _STRIDE, scratch + 8 * _STRIDE
    v, root, new = scratch + 12 * _STRIDE, scratch + 16 * _STRIDE, scratch + 20 * _STRIDE
    most_first, most_second = amax[0], amax[1]
    tile = first
    if _is_narrow(rule, row, h):
        while tile < last:
            in_row = tile % across
            at = tile // across * columns + in_row * width
            n = min(width, columns - in_row * width)
            largest = numba_narrow.step_tile(
                row[_PARAM], row[_MASTER], row[_GRAD], row[_FIRST + 1], row[_FIRST + 2], row[_SECOND + 1],
                row[_SECOND + 2], at, n, tile, load(0, f32, row[_GRAD_SCALE], 0), h, scratch, 4 * _STRIDE,
            )  # fmt: skip
            most_first, most_second = max(most_first, largest[0]), max(most_second, largest[1])
            tile += 1
    while tile < last:
        in_row = tile % across
        tiles = min(RUN // width, last - tile, across - in_row)
        at = tile // across * columns + in_row * width
        n = min(tiles * width, columns - in_row * width)
        _take(rule, row, h, at, n, tile, p, g, m, v, root, new)
        most_first = max(most_first, _store_moment(row, _FIRST, at, n, tile, m, root, scales))
        most_second = max(most_second, _store_moment(row, _SECOND, at, n, tile, v, root, scales))
        _store_param(row, at, n, p, new, words, key, scales)
        tile += tiles
    amax[0], amax[1] = most_first, most_second


@njit(nogil=True, cache=True)
def step_values(
    rule: int, table: Any, h: Any, starts: Any, first: int, last: int, key: int, scales: Any, is_measuring: bool,
    found: Any,
) -> None:  # fmt: skip
    """Step the tiles that begin in values `first` to `last` of all parameters, laid end to end, or measure the step.

    table: int64 [parameters, columns]. h: float32 [parameters, numbers]. starts: int64 [parameters + 1], how many
    values lie before each. scales: float32 [parameters, 5], of what has one for the whole: the new quant_scale of
    parameter (0: it stays as it is), master, first and second moment, and the master's new dequant_scale. found: int32
    [parameters, 4], see `_measure_tiles`; where steps are taken, the first two are raised as `step_tiles` does.
    """
    words, memory = np.empty(RUN + 4, np.int32), np.empty(6 * _STRIDE, np.float32)
    scratch, table, h, starts, found = memory.ctypes.data, borrow(table), borrow(h), borrow(starts), borrow(found)
    some, scales = borrow(words), borrow(scales)
    item = np.searchsorted(starts, first, side="right") - 1
    while item < len(table) and starts[item] < last:
        row = table[item]
        columns, width = row[_COLUMNS], row[_WIDTH]
        tiles = row[_VALUES] // columns * ((columns + width - 1) // width)
        values = starts[item + 1] - starts[item]
        # by proportion: whole tiles, and the same boundary seen from both sides
        begin = (max(first, starts[item]) - starts[item]) * tiles // values
        end = (min(last, starts[item + 1]) - starts[item]) * tiles // values
        if numba_fp8_lm.takes(rule, row, h[item]):
            at, end_at = begin * width, min(end * width, row[_VALUES])
            if is_measuring:
                numba_fp8_lm.measure(row, h[item], at, end_at, found[item])
            else:
                numba_fp8_lm.write(row, h[item], at, end_at, scales[item], scratch)
        elif is_measuring:
            _measure_tiles(rule, row, h[item], begin, end, scratch, found[item])
        else:
            step_tiles(rule, row, h[item], begin, end, key, some, scratch, scales[item], found[item])
        item += 1
    hold((words, memory))


@njit(nogil=True, cache=True)
def read_floats(addresses: Any, out: Any) -> None:
    """out = the float32 values at addresses, int64; 0 stays as it is."""
    for i in range(len(addresses)):
        if addresses[i] != 0:
            out[i] = load(0, f32, addresses[i], 0)


@njit(nogil=True, cache=True)
def write_floats(addresses: Any, values: Any) -> None:
    """The float32 values at addresses, int64, but for 0 = values."""
    for i in range(len(addresses)):
        if addresses[i] != 0:
            store(0, f32, addresses[i], 0, values[i])
