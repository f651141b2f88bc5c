"""Numba kernels of the CPU that count how often each code of a byte occurs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange


@njit(nogil=True, cache=True)
def count_serial(codes: Any, counts: Any) -> None:
    """Add to counts (int64 [256]) how often each byte occurs in codes (uint8, flat)."""
    # neighbours are often equal, and a count must be stored before it can be raised again: four tables in turn
    others = np.zeros(768, np.int64)
    b, c, d = others[:256], others[256:512], others[512:]
    whole = len(codes) // 4 * 4
    for i in range(0, whole, 4):
        counts[codes[i]] += 1
        b[codes[i + 1]] += 1
        c[codes[i + 2]] += 1
        d[codes[i + 3]] += 1
    for i in range(whole, len(codes)):
        counts[codes[i]] += 1
    for k in range(256):
        counts[k] += b[k] + c[k] + d[k]


@njit(nogil=True, cache=True, parallel=True)
def count_parallel(codes: Any, counts: Any, chunks: int) -> None:
    """`count_serial` over chunks in parallel."""
    size = (len(codes) + chunks - 1) // chunks
    parts = np.zeros((chunks, 256), np.int64)
    for c in prange(chunks):
        count_serial(codes[c * size : (c + 1) * size], parts[c])
    for c in range(chunks):
        for k in range(256):
            counts[k] += parts[c, k]
