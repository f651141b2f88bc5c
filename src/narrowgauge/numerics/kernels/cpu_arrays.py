"""What every Numba kernel of the CPU asks: a tensor's bits as an array, and in how many threads to run."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import numba
import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from narrowgauge.numerics.kernels.stale import drop_stale_kernels

# below this, handing a chunk to a second thread costs more than it saves
MIN_CHUNK = 32768

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
_forked = False
drop_stale_kernels()  # before the first of them is loaded


def _note_fork() -> None:
    global _forked
    _forked = True


# OpenMP kills a forked child (a DataLoader worker) that enters a parallel region, so there the kernels run serially
os.register_at_fork(after_in_child=_note_fork)


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


def chunks_for(x: Tensor) -> int:
    """Into how many chunks, each for a thread, a kernel should split `x`; 1: run the serial form."""
    return chunks_of(x.numel())


def chunks_of(values: int) -> int:
    """Into how many chunks a kernel should split that many values; 1: run the serial form."""
    chunks = min(torch.get_num_threads(), values // MIN_CHUNK)
    return chunks if chunks > 1 and not _forked and _has_safe_threads() else 1


@functools.cache
def _has_safe_threads() -> bool:
    """True where Numba has a threading layer that several threads may enter; its own `workqueue` aborts then."""
    from numba.np.ufunc import parallel

    if numba.config.THREADING_LAYER == "default":  # type: ignore[attr-defined]
        try:
            from numba.np.ufunc import omppool  # type: ignore[attr-defined]  # noqa: F401
        except ImportError:
            return False
        numba.config.THREADING_LAYER = "omp"  # type: ignore[attr-defined]
    parallel._launch_threads()
    return numba.threading_layer() != "workqueue"
