"""The Numba kernels for stochastic casts with one scale, on torch tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from narrowgauge.numerics.formats import Format
from narrowgauge.numerics.kernels import numba_bits, numba_stochastic
from narrowgauge.numerics.kernels.cpu_arrays import array
from narrowgauge.numerics.kernels.cpu_threads import in_threads
from narrowgauge.numerics.kernels.numba_tiles import RUN

_NO_CODES, _NO_CARRIER = np.empty(0, np.uint8), np.empty(0, np.uint16)


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
    arguments = (
        numba_bits.layout(fmt),
        (True, int(key.item()), stream),
        _NO_CODES if encoded is None else array(encoded),
        _NO_CARRIER if carried is None else array(carried),
    )
    bits, scale = array(x), 1.0 if quant_scale is None else quant_scale.item()

    def cast(first: int, last: int) -> np.ndarray:
        counts = np.zeros(2 if count else 0, np.int64)
        numba_stochastic.cast_flat(bits, scale, first, last, *arguments, counts)
        return counts

    counted = in_threads(cast, -(-x.numel() // RUN), 4 * x.numel())
    saturated, flushed = map(torch.tensor, np.sum(counted, axis=0).tolist()) if count else (None, None)
    return encoded, carried, saturated, flushed


def round_to_bfloat16(x: Tensor, quant_scale: Tensor | None, key: Tensor, stream: int) -> Tensor:
    """x * quant_scale in bfloat16, stochastically rounded; overflow to infinity."""
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    arguments = (int(key.item()), stream, array(out))
    bits, scale = array(x), 1.0 if quant_scale is None else quant_scale.item()
    in_threads(
        lambda first, last: numba_stochastic.cast_bf16(bits, scale, first, last, *arguments),
        -(-x.numel() // RUN),
        4 * x.numel(),
    )
    return out
