"""What every Numba kernel of the CPU asks: a tensor's bits as an array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from narrowgauge.numerics.kernels.stale import drop_stale_kernels

_BITS = {
    torch.float32: np.int32,
    torch.bfloat16: np.uint16,
    torch.float16: np.int16,
    torch.float8_e4m3fn: np.uint8,
    torch.float8_e5m2: np.uint8,
    torch.float8_e8m0fnu: np.uint8,
    torch.uint8: np.uint8,
    torch.int8: np.uint8,
}
drop_stale_kernels()  # before the first of them is loaded


def array(x: Tensor) -> np.ndarray:
    """The bits of `x` as a flat array that shares its memory where it is contiguous."""
    return shared(x.detach().contiguous(), _BITS[x.dtype])


def shared(x: Tensor, dtype: DTypeLike) -> np.ndarray:
    """The bytes of a contiguous tensor as a flat array of `dtype`, which keeps them alive.

    Tensor.numpy would for ever forbid to free and fill its memory anew, as FSDP2 does with what it gathers.
    """
    return np.asarray(_Memory(x, np.dtype(dtype)))


class _Memory:
    """Lends a tensor's memory by numpy's array interface, version 3."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, x: Tensor, dtype: np.dtype) -> None:
        self.tensor = x
        numel = x.nbytes // dtype.itemsize
        where = (x.data_ptr(), False)  # not read-only
        self.__array_interface__ = {"version": 3, "data": where, "shape": (numel,), "typestr": dtype.str}


def new_array(shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, np.ndarray]:
    """A new tensor, and its bits as a flat array."""
    x = torch.empty(shape, dtype=dtype)
    return x, array(x)
