"""Numba kernels of the CPU for stochastic casts with one scale."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from narrowgauge.numerics.kernels import numba_rows
from narrowgauge.numerics.kernels.numba_bits import borrow, hold
from narrowgauge.numerics.kernels.numba_tiles import RUN, borrow_all, cast_run, new_scratch

f32 = np.float32


@njit(nogil=True, cache=True)
def cast_flat_serial(
    x: Any, scale: float, first: int, last: int, layout: Any, random: Any, codes: Any, carrier: Any, counts: Any
) -> None:
    """Cast runs `first` to `last` of `x`; the arguments are those of `numba_tiles.cast_tiles_serial`."""
    run = new_scratch()
    x, codes, carrier, counts, scratch = borrow(x), borrow(codes), borrow(carrier), borrow(counts), borrow_all(run)
    scratch[0][:] = f32(scale)
    scratch[1][:] = f32(1.0)
    for start in range(first * RUN, min(last * RUN, len(x)), RUN):
        cast_run(x, start, min(start + RUN, len(x)), layout, random, codes, carrier, counts, scratch)
    hold(run)


@njit(nogil=True, cache=True, parallel=True)
def cast_flat_parallel(
    x: Any, scale: float, items: int, chunks: int, layout: Any, random: Any, codes: Any, carrier: Any, counts: Any
) -> None:
    """`cast_flat_serial` over chunks of runs in parallel."""
    size = (items + chunks - 1) // chunks
    counted = np.zeros((chunks, len(counts)), np.int64)
    for c in prange(chunks):
        first, last = min(c * size, items), min(c * size + size, items)
        cast_flat_serial(x, scale, first, last, layout, random, codes, carrier, counted[c])
    for c in range(chunks):
        for k in range(len(counts)):
            counts[k] += counted[c, k]


@njit(nogil=True, cache=True)
def cast_bf16_serial(x: Any, scale: float, first: int, last: int, key: int, stream: int, out: Any) -> None:
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


@njit(nogil=True, cache=True, parallel=True)
def cast_bf16_parallel(x: Any, scale: float, items: int, chunks: int, key: int, stream: int, out: Any) -> None:
    """`cast_bf16_serial` over chunks of runs in parallel."""
    size = (items + chunks - 1) // chunks
    for c in prange(chunks):
        cast_bf16_serial(x, scale, min(c * size, items), min(c * size + size, items), key, stream, out)
