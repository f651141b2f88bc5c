"""The Numba kernels for stochastic casts with one scale, on torch tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from narrowgauge.numerics.formats import Format
from narrowgauge.numerics.kernels import numba_bits, numba_stochastic
from narrowgauge.numerics.kernels.cpu_arrays import array, chunks_for
from narrowgauge.numerics.kernels.numba_tiles import RUN

_NO_CODES, _NO_CARRIER, _NO_COUNTS = np.empty(0, np.uint8), np.empty(0, np.uint16), np.empty(0, np.int64)


def quantize(
    x: Tensor,
    quant_scale: Tensor | None,
    fmt: Format,
    codes: bool,
    carrier: torch.dtype | None,
    count: bool,
    key: Tensor,
    stream: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """`twin.quantize` by stochastic rounding, of a format that has NaN and 8 bits."""
    encoded = torch.empty(x.shape, dtype=fmt.dtype) if codes else None
    carried = torch.empty(x.shape, dtype=carrier) if carrier is not None else None
    counts = np.zeros(2, np.int64) if count else _NO_COUNTS
    arguments = (
        numba_bits.layout(fmt),
        (True, int(key.item()), stream),
        _NO_CODES if encoded is None else array(encoded),
        _NO_CARRIER if carried is None else array(carried),
        counts,
    )
    bits, scale = array(x), 1.0 if quant_scale is None else quant_scale.item()
    runs, chunks = -(-x.numel() // RUN), chunks_for(x)
    if chunks == 1:
        numba_stochastic.cast_flat_serial(bits, scale, 0, runs, *arguments)
    else:
        numba_stochastic.cast_flat_parallel(bits, scale, runs, chunks, *arguments)
    saturated, flushed = map(torch.tensor, counts.tolist()) if count else (None, None)
    return encoded, carried, saturated, flushed


def round_to_bfloat16(x: Tensor, quant_scale: Tensor | None, key: Tensor, stream: int) -> Tensor:
    """x * quant_scale in bfloat16, stochastically rounded; overflow to infinity."""
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    arguments = (int(key.item()), stream, array(out))
    bits, scale = array(x), 1.0 if quant_scale is None else quant_scale.item()
    runs, chunks = -(-x.numel() // RUN), chunks_for(x)
    if chunks == 1:
        numba_stochastic.cast_bf16_serial(bits, scale, 0, runs, *arguments)
    else:
        numba_stochastic.cast_bf16_parallel(bits, scale, runs, chunks, *arguments)
    return out
