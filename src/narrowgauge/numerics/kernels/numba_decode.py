"""Numba kernels of the CPU from codes and the scales of their tiles to values."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from narrowgauge.numerics.kernels import numba_integers, numba_rows, numba_scales
from narrowgauge.numerics.kernels.numba_bits import borrow, hold
from narrowgauge.numerics.kernels.numba_tiles import RUN, repeat


@njit(nogil=True, cache=True)
def decode_tiles(
    codes: Any, shape: Any, tile: Any, part: int, first: int, last: int, rule: int, layout: Any, tensor_amax: float,
    words: Any, stored: Any, out: Any,
) -> None:  # fmt: skip
    """Decode parts `first` to `last` of a matrix, cut as by `numba_tiles.cast_tiles`, into `out`.

    rule: how the scales are stored, in words (int32) or stored (uint8). tensor_amax: for the whole scale of NVFP4; a
    negative one leaves the tensor's factor out. out: uint16 (bfloat16) or int32 (float32).
    """
    rows, columns = shape
    height, width = tile
    across, parts = (columns + width - 1) // width, (columns + part - 1) // part
    most = (part + width - 1) // width
    floats, integers = np.empty(most + RUN, np.float32), np.empty(most + RUN, np.int32)
    codes, words, stored, out = borrow(codes), borrow(words), borrow(stored), borrow(out)
    factor, factors = borrow(floats)[:most], borrow(floats)[most:]
    scratch, values = borrow(integers)[:most], borrow(integers)[most:]
    for item in range(first, last):
        band, left = item // parts, item % parts * part
        right = min(left + part, columns)
        n = (right - left + width - 1) // width
        at = band * across + left // width
        if len(words):
            numba_scales.factors_of(stored, words[at : at + n], factor[:n], rule)
        else:
            numba_scales.factors_of(stored[at : at + n], scratch[:n], factor[:n], rule)
        if not tensor_amax < 0.0:
            numba_scales.with_tensor_factor(factor[:n], tensor_amax)
        for start in range(left, right, RUN):
            stop = min(start + RUN, right)
            repeat(factor[(start - left) // width : n], width, (start - left) % width, factors[: stop - start])
            for row in range(band * height, min(band * height + height, rows)):
                at = row * columns + start
                run = values[: stop - start]
                if layout[5]:
                    numba_integers.decode_row(codes[at : at + stop - start], layout, run)
                else:
                    numba_rows.decode_row(codes[at : at + stop - start], layout, run)
                numba_rows.multiply_row(run, factors, out[at : at + stop - start])
    hold((floats, integers))
