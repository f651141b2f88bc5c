"""How often each code of a byte occurs, on every device: what a norm needs to know of a tensor's codes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from narrowgauge.numerics.kernels.paths import has_gpu_kernels

CODES = 256


def count_codes(tensors: Sequence[Tensor]) -> Tensor:
    """How often each byte occurs in each of n tensors: int64 [n, 256] on their device.

    tensors: at least one, all on one device, of dtypes of one byte, any shape and strides; the order of the codes makes
    no difference.
    """
    flat = [_bytes_of(codes.detach()) for codes in tensors]
    counts = torch.zeros(len(flat), CODES, dtype=torch.int64, device=flat[0].device)
    if counts.is_cpu:
        _count_on_cpu(flat, counts)
    elif has_gpu_kernels(counts):
        from narrowgauge.numerics.kernels.triton_counts import count_on_gpu

        count_on_gpu(flat, counts)
    else:
        twin(flat, counts)
    return counts


def twin(flat: Sequence[Tensor], counts: Tensor) -> None:
    """Count flat uint8 tensors into the rows of counts (zeros), by torch's operations."""
    for codes, row in zip(flat, counts, strict=True):
        row.copy_(torch.bincount(codes, minlength=CODES))


def _bytes_of(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.uint8).view(-1)


def _count_on_cpu(flat: Sequence[Tensor], counts: Tensor) -> None:
    from narrowgauge.numerics.kernels import numba_counts
    from narrowgauge.numerics.kernels.cpu_threads import GRAIN, in_threads

    def count(codes: np.ndarray) -> list[np.ndarray]:
        return in_threads(lambda first, last: numba_counts.count(codes[first:last]), len(codes), len(codes), GRAIN)

    for codes, row in zip(flat, counts.numpy(), strict=True):
        row[:] = sum(count(codes.numpy()))
