"""Numba kernels of the CPU for casts with a scale for each tile: amax, scales and codes in one pass over the tensor.

The work is cut into parts: as many whole tiles side by side as keep a part in the caches, so that what is read twice,
for amax and for the cast, comes from memory once. A part is cast row by row in runs of `RUN` values, see `numba_rows`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from narrowgauge.numerics.kernels import numba_integers, numba_rows, numba_scales
from narrowgauge.numerics.kernels.numba_bits import (
    INNER,
    bits_of,
    borrow,
    fill_16,
    hold,
    largest_of_16,
    largest_of_32,
    largest_of_128,
    widen,
)

i32 = np.int32

# values of a run: its scales, random words and scaled values lie in the first-level cache together
RUN = 1024


@njit(**INNER)
def largest_of_tiles(x: Any, width: int, largest: Any) -> None:
    """largest[t] = the largest magnitude, as bits, of each `width` values; the last tile may be ragged."""
    if width == 1:
        for t in range(len(largest)):
            largest[t] = i32(0)
        numba_rows.raise_to(x, largest)
        return
    whole = len(x) // width
    if width == 16:
        for t in range(whole):
            largest[t] = bits_of(widen(largest_of_16(x, 16 * t)))
    elif width == 32:
        for t in range(whole):
            largest[t] = bits_of(widen(largest_of_32(x, 32 * t)))
    elif width == 128:
        for t in range(whole):
            largest[t] = bits_of(widen(largest_of_128(x, 128 * t)))
    else:
        for t in range(whole):
            largest[t] = numba_rows.largest_of(x[width * t : width * t + width])
    if whole < len(largest):
        largest[whole] = numba_rows.largest_of(x[width * whole :])


@njit(**INNER)
def repeat(per_tile: Any, width: int, skipped: int, out: Any) -> None:
    """out = the value of each tile for each of its columns, after the first `skipped` columns of the first tile."""
    if width == 1:
        numba_rows.copy_row(per_tile, out)
        return
    start, t, rest = 0, 0, width - skipped
    while start < len(out):
        stop = min(len(out), start + rest)
        if (stop - start) % 16 == 0:
            for at in range(start, stop, 16):
                fill_16(out, at, per_tile[t])
        else:
            _fill(per_tile[t], out[start:stop])
        start, t, rest = stop, t + 1, width


# a loop of its own, over a whole array: an index that might be negative is not vectorized


@njit(**INNER)
def _fill(value: float, out: Any) -> None:
    for j in range(len(out)):
        out[j] = value


@njit(**INNER)
def _largest_of_part(x: Any, shape: Any, tile: Any, first_row: int, last_row: int, left: int, right: int, rows: Any,
                     largest: Any) -> None:  # fmt: skip
    columns, width = shape[1], tile[1]
    if last_row - first_row == 1:
        largest_of_tiles(x[first_row * columns + left : first_row * columns + right], width, largest)
        return
    panel = rows[: right - left]
    panel[:] = 0
    for row in range(first_row, last_row):
        numba_rows.raise_to(x[row * columns + left : row * columns + right], panel)
    largest_of_tiles(panel, width, largest)


@njit(nogil=True, cache=True)
def cast_tiles(
    x: Any, shape: Any, tile: Any, part: int, first: int, last: int, rule: int, layout: Any, tensor_amax: int,
    random: Any, codes: Any, carrier: Any, words: Any, stored: Any, counts: Any,
) -> int:  # fmt: skip
    """Cast parts `first` to `last` of a matrix; returns the bits of the largest magnitude among them.

    shape, tile: (rows, columns). part: columns of a part, a multiple of the tile's. random: (whether to round
    stochastically, key, stream). codes, carrier (uint16 or int32), counts (int64 [2]): empty where not wanted. words,
    stored: the scales, see `numba_scales.scales_of`; one of the two is empty.
    """
    rows, columns = shape
    height, width = tile
    across, parts = (columns + width - 1) // width, (columns + part - 1) // part
    most = (part + width - 1) // width
    integers = np.empty(2 * most + (part if height > 1 else 0), np.int32)
    floats, bytes, run = np.empty(2 * most, np.float32), np.empty(most, np.uint8), new_scratch()
    x, codes, carrier, words, stored = borrow(x), borrow(codes), borrow(carrier), borrow(words), borrow(stored)
    largest, scale_words = borrow(integers)[:most], borrow(integers)[most : 2 * most]
    panel, scale_bytes, counts = borrow(integers)[2 * most :], borrow(bytes), borrow(counts)
    quant_scale, factor = borrow(floats)[:most], borrow(floats)[most:]
    scratch = borrow_all(run)
    most_of_all = i32(0)
    for item in range(first, last):
        band, left = item // parts, item % parts * part
        right = min(left + part, columns)
        top, bottom = band * height, min(band * height + height, rows)
        n = (right - left + width - 1) // width
        _largest_of_part(x, shape, tile, top, bottom, left, right, panel, largest[:n])
        most_of_all = max(most_of_all, i32(numba_rows.largest_of(largest[:n])))
        numba_scales.scales_of(
            largest[:n], rule, layout, tensor_amax, quant_scale[:n], factor[:n], scale_words[:n], scale_bytes[:n]
        )
        at = band * across + left // width
        if len(words):
            numba_rows.copy_row(scale_words, words[at : at + n])
        else:
            numba_rows.copy_row(scale_bytes, stored[at : at + n])
        for start in range(left, right, RUN):
            stop = min(start + RUN, right)
            tiles, skipped = (start - left) // width, (start - left) % width
            repeat(quant_scale[tiles:n], width, skipped, scratch[0][: stop - start])
            if len(carrier):
                repeat(factor[tiles:n], width, skipped, scratch[1][: stop - start])
            for row in range(top, bottom):
                at = row * columns + start
                cast_run(x, at, at + stop - start, layout, random, codes, carrier, counts, scratch)
    hold((integers, floats, bytes, run))
    return most_of_all


@njit(**INNER)
def new_scratch() -> Any:
    """Scales and factors of a run, its scaled values, random words and codes."""
    return (
        np.empty(RUN, np.float32), np.empty(RUN, np.float32), np.empty(RUN, np.int32), np.empty(RUN + 4, np.int32),
        np.empty(RUN, np.uint8),
    )  # fmt: skip


@njit(**INNER)
def borrow_all(scratch: Any) -> Any:
    """The scratch arrays without their reference counts, see `borrow`."""
    return borrow(scratch[0]), borrow(scratch[1]), borrow(scratch[2]), borrow(scratch[3]), borrow(scratch[4])


@njit(**INNER)
def cast_run(
    x: Any, start: int, stop: int, layout: Any, random: Any, codes: Any, carrier: Any, counts: Any, scratch: Any
) -> None:
    """Cast values `start` to `stop`, at most `RUN`, by the scales and factors in the scratch arrays."""
    n = stop - start
    if not (random[0] or len(carrier) or len(counts) or layout[5] or layout[6]):
        numba_rows.scale_and_encode_row(x[start:stop], scratch[0], layout, codes[start:stop])
        return
    scaled = scratch[2][:n]
    if layout[6]:
        numba_integers.lifted_row(x[start:stop], scratch[0], layout[6], scaled)
    else:
        numba_rows.scale_row(x[start:stop], scratch[0], scaled)
    if len(counts):
        counts[0] += numba_rows.count_saturated(scaled, layout[2])
    if random[0]:
        skipped = start % 4
        numba_rows.draw_row(random[1], random[2], start // 4, scratch[3][: (skipped + n + 3) // 4 * 4])
        numba_rows.stochastic_row(scaled, scratch[3][skipped:], layout)
    if len(codes):
        encode_row(scaled, layout, codes[start:stop])
    if len(counts) or layout[5] and len(carrier):
        encode_row(scaled, layout, scratch[4][:n])
    if len(counts):
        counts[1] += numba_rows.count_flushed(x[start:stop], scratch[4], layout[3])
    if len(carrier) and layout[5]:
        numba_integers.decode_row(scratch[4][:n], layout, scaled)
        numba_rows.multiply_row(scaled, scratch[1], carrier[start:stop])
    elif len(carrier):
        numba_rows.carry_row(scaled, layout, scratch[1], carrier[start:stop])


@njit(**INNER)
def encode_row(scaled: Any, layout: Any, codes: Any) -> None:
    """codes = encode(scaled), to nearest even, saturating."""
    if layout[5]:
        numba_integers.encode_row(scaled, layout, codes)
    else:
        numba_rows.encode_row(scaled, layout, codes)
