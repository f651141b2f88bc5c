"""Numba kernels of the CPU that count how often each code of a byte occurs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def count(codes: Any) -> Any:
    """How often each byte occurs in codes (uint8, flat): int64 [256]."""
    # neighbours are often equal, and a count must be stored before it can be raised again: four tables in turn
    counts, others = np.zeros(256, np.int64), np.zeros(768, np.int64)
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
    return counts
