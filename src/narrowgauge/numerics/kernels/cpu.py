"""The Numba kernels on torch tensors: which tensors they take, in how many threads, and the zero-copy passage."""

from __future__ import annotations

import functools
import os

import numba
import numpy as np
import torch
from torch import Tensor

from narrowgauge.numerics.formats import Format
from narrowgauge.numerics.kernels import numba_cast

# below this, handing a chunk to a second thread costs more than it saves
MIN_CHUNK = 32768
# from this many float32 values on (32 MiB) a result would not stay in the caches anyway
MIN_STREAMED = 1 << 23

_BITS = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.uint16,
    torch.float16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
    torch.uint8: torch.uint8,
}
_PLAIN = torch.contiguous_format
_forked = False


def _note_fork() -> None:
    global _forked
    _forked = True


# OpenMP kills a forked child (a DataLoader worker) that enters a parallel region, so there the kernels run serially
os.register_at_fork(after_in_child=_note_fork)


def amax(x: Tensor) -> Tensor:
    """The largest magnitude of a tensor that is not empty: float32, 0-dimensional, NaN where `x` holds NaN."""
    bits, chunks = array(x), chunks_for(x)
    largest = numba_cast.amax_serial(bits) if chunks == 1 else numba_cast.amax_parallel(bits, chunks)
    integer = np.int32 if x.dtype is torch.float32 else np.int16
    return torch.from_numpy(np.array(largest, integer)).view(x.dtype).float()


def quantize(
    x: Tensor, quant_scale: Tensor | None, fmt: Format, codes: bool, carrier: torch.dtype | None
) -> tuple[Tensor | None, Tensor | None]:
    """Codes and carrier, each where asked for, of E4M3FN or E5M2; saturating, one scale for the whole tensor."""
    encoded = torch.empty_like(x, dtype=fmt.dtype, memory_format=_PLAIN) if codes else None
    carried = torch.empty_like(x, dtype=carrier, memory_format=_PLAIN) if carrier is not None else None
    arguments = (
        array(x),
        1.0 if quant_scale is None else quant_scale.item(),
        fmt.mantissa_bits,
        None if encoded is None else array(encoded),
        None if carried is None else array(carried),
    )
    chunks = chunks_for(x)
    if chunks == 1:
        numba_cast.cast_serial(*arguments)
    else:
        numba_cast.cast_parallel(*arguments, chunks)
    return encoded, carried


def count(x: Tensor, quant_scale: Tensor | None, fmt: Format) -> tuple[Tensor, Tensor]:
    """How many values a cast saturates, and how many it flushes to zero: int64, 0-dimensional."""
    scale = 1.0 if quant_scale is None else quant_scale.item()
    saturated, flushed = numba_cast.count_serial(array(x), scale, fmt.mantissa_bits)
    return torch.tensor(saturated), torch.tensor(flushed)


def dequantize(codes: Tensor, dequant_scale: Tensor | None, fmt: Format, out: Tensor) -> Tensor:
    """Write the values of E4M3FN or E5M2 codes times the scale into `out`, float32 or bfloat16, contiguous."""
    arguments = (
        array(codes),
        1.0 if dequant_scale is None else dequant_scale.item(),
        fmt.mantissa_bits,
        array(out),
    )
    chunks = chunks_for(codes)
    streamed = out.dtype is torch.float32 and out.numel() >= MIN_STREAMED and out.data_ptr() % 64 == 0
    if chunks == 1:
        (numba_cast.decode_streamed if streamed else numba_cast.decode_serial)(*arguments)
    else:
        (numba_cast.decode_streamed_parallel if streamed else numba_cast.decode_parallel)(*arguments, chunks)
    return out


def array(x: Tensor) -> np.ndarray:
    """The bits of `x` as a flat array that shares its memory where it is contiguous."""
    return x.detach().contiguous().view(_BITS[x.dtype]).numpy().reshape(-1)


def chunks_for(x: Tensor) -> int:
    """Into how many chunks, each for a thread, a kernel should split `x`; 1: run the serial form."""
    chunks = min(torch.get_num_threads(), x.numel() // MIN_CHUNK)
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
