"""Numba kernels of the CPU for stochastic casts with one scale."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from narrowgauge.numerics.kernels import numba_rows
from narrowgauge.numerics.kernels.numba_bits import borrow, hold
from narrowgauge.numerics.kernels.numba_tiles import RUN, borrow_all, cast_run, new_scratch

f32 = np.float32


@njit(nogil=True, cache=True)
def cast_flat(
    x: Any, scale: float, first: int, last: int, layout: Any, random: Any, codes: Any, carrier: Any, counts: Any
) -> None:
    """Cast runs `first` to `last` of `x`; the arguments are those of `numba_tiles.cast_tiles`."""
    run = new_scratch()
    x, codes, carrier, counts, scratch = borrow(x), borrow(codes), borrow(carrier), borrow(counts), borrow_all(run)
    scratch[0][:] = f32(scale)
    scratch[1][:] = f32(1.0)
    for start in range(first * RUN, min(last * RUN, len(x)), RUN):
        cast_run(x, start, min(start + RUN, len(x)), layout, random, codes, carrier, counts, scratch)
    hold(run)


@njit(nogil=True, cache=True)
def cast_bf16(x: Any, scale: float, first: int, last: int, key: int, stream: int, out: Any) -> None:
    """out (uint16) = x * scale in bfloat16, stochastically rounded, of runs `first` to `last`."""
    run = new_scratch()
    x, out = borrow(x), borrow(out)
    scales, _, scaled, words, _ = borrow_all(run)
    scales[:] = f32(scale)
    for start in range(first * RUN, min(last * RUN, len(x)), RUN):
        stop = min(start + RUN, len(x))
        numba_rows.scale_row(x[start:stop], scales, scaled)
        numba_rows.draw_row(key, stream, start // 4, words[: (stop - start + 3) // 4 * 4])
        numba_rows.narrow_row(scaled, words, out[start:stop])
    hold(run)
