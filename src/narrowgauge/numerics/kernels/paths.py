"""Which kernels take a tensor."""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType

from torch import Tensor

from narrowgauge.numerics.companding import LINEAR, SQUARE_ROOT, Companding
from narrowgauge.numerics.formats import Format

# below this many values a few torch operations are faster than the passage to Numba
MIN_NUMBA = 1024


def fast_module(x: Tensor, suits: bool, least: int = MIN_NUMBA) -> ModuleType | None:
    """The module whose kernels take this tensor, loaded on first use; None for the torch operations."""
    if not suits or x.numel() < least:
        return None
    if x.is_cpu:
        from narrowgauge.numerics.kernels import cpu

        return cpu
    if has_gpu_kernels(x):
        from narrowgauge.numerics.kernels import triton_cast

        return triton_cast
    return None


# In tiles, or with random bits, torch takes tens of operations even for one value: there is no least size.


def tile_module(x: Tensor, suits: bool, fmt: Format, companding: Companding, stochastic: bool) -> ModuleType | None:
    """As `fast_module`, for casts with a scale for each tile: floats, and integers, these by nearest even only.

    companding: floats have no curve there, integers may have SQUARE_ROOT.
    """
    if fmt.is_integer:
        suits = suits and fmt.is_narrow and companding in (LINEAR, SQUARE_ROOT) and not stochastic
    else:
        suits = suits and fmt.is_narrow and fmt.signed and companding is LINEAR
    if suits and has_gpu_kernels(x):
        from narrowgauge.numerics.kernels import triton_blocks

        return triton_blocks
    if x.is_cpu and suits and x.numel() > 0:
        from narrowgauge.numerics.kernels import cpu_tiles

        return cpu_tiles
    return None


def hadamard_module(x: Tensor, suits: bool) -> ModuleType | None:
    """As `fast_module`, for the Hadamard transform."""
    if suits and has_gpu_kernels(x):
        from narrowgauge.numerics.kernels import triton_hadamard

        return triton_hadamard
    if x.is_cpu and suits and x.numel() > 0:
        from narrowgauge.numerics.kernels import cpu_hadamard

        return cpu_hadamard
    return None


def has_gpu_kernels(x: Tensor) -> bool:
    """True where a Triton kernel can take this tensor."""
    return x.is_cuda and x.numel() > 0 and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
