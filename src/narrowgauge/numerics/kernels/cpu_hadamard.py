"""The Numba kernel for the Hadamard transform, on torch tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.numerics.hadamard import POINTS
from narrowgauge.numerics.kernels import numba_hadamard
from narrowgauge.numerics.kernels.cpu_arrays import array, chunks_for


def transform(x: Tensor, signs: tuple[int, ...]) -> Tensor:
    """`hadamard.transform` of a matrix that is not empty."""
    rows, columns = x.shape
    groups = -(-rows // POINTS)
    out = torch.empty(groups * POINTS, columns)
    bits, values, chunks = array(x), out.numpy().reshape(-1), min(chunks_for(x), groups)
    factors = tuple(map(float, signs))
    if chunks == 1:
        numba_hadamard.transform_serial(bits, (rows, columns), factors, 0, groups, values)
    else:
        numba_hadamard.transform_parallel(bits, (rows, columns), factors, groups, chunks, values)
    return out
