"""The Numba kernel for the Hadamard transform, on torch tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.numerics.hadamard import POINTS
from narrowgauge.numerics.kernels import numba_hadamard
from narrowgauge.numerics.kernels.cpu_arrays import array
from narrowgauge.numerics.kernels.cpu_threads import in_threads


def transform(x: Tensor, signs: tuple[int, ...]) -> Tensor:
    """`hadamard.transform` of a matrix that is not empty."""
    rows, columns = x.shape
    groups = -(-rows // POINTS)
    out = torch.empty(groups * POINTS, columns)
    bits, values, factors = array(x), out.numpy().reshape(-1), tuple(map(float, signs))
    in_threads(
        lambda first, last: numba_hadamard.transform(bits, (rows, columns), factors, first, last, values),
        groups,
        x.numel(),
    )
    return out
