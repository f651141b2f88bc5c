"""The Numba kernels for casts with one scale, on torch tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from narrowgauge.numerics.formats import FP16, Format
from narrowgauge.numerics.kernels import cpu_stochastic, numba_cast, numba_half
from narrowgauge.numerics.kernels.cpu_arrays import array, shared
from narrowgauge.numerics.kernels.cpu_threads import GRAIN, in_threads

# from this many float32 values on (32 MiB) a result would not stay in the caches anyway
MIN_STREAMED = 1 << 23

_PLAIN = torch.contiguous_format


def amax(x: Tensor) -> Tensor:
    """The largest magnitude of a tensor that is not empty: float32, 0-dimensional, NaN where `x` holds NaN."""
    bits, n = array(x), x.numel()
    largest = max(in_threads(lambda first, last: numba_cast.amax(bits[first:last]), n, n // 2, GRAIN))
    integer = np.int32 if x.dtype is torch.float32 else np.int16
    return torch.from_numpy(np.array(largest, integer)).view(x.dtype).float()


def quantize(
    x: Tensor,
    quant_scale: Tensor | None,
    fmt: Format,
    codes: bool,
    carrier: torch.dtype | None,
    key: Tensor | None = None,
    stream: int = 0,
) -> tuple[Tensor | None, Tensor | None]:
    """Codes and carrier, each where asked for, of E4M3FN or E5M2; saturating, one scale for the whole tensor.

    key, stream: as in `dispatch.quantize`.
    """
    if key is not None:
        return cpu_stochastic.quantize(x, quant_scale, fmt, codes, carrier, False, key, stream)[:2]
    encoded = torch.empty_like(x, dtype=fmt.dtype, memory_format=_PLAIN) if codes else None
    carried = torch.empty_like(x, dtype=carrier, memory_format=_PLAIN) if carrier is not None else None
    bits, scale, n = array(x), _number(quant_scale), x.numel()
    code_bits = None if encoded is None else array(encoded)
    carrier_bits = None if carried is None else array(carried)

    def cast(first: int, last: int) -> None:
        numba_cast.cast(
            bits[first:last],
            scale,
            fmt.mantissa_bits,
            None if code_bits is None else code_bits[first:last],
            None if carrier_bits is None else carrier_bits[first:last],
        )

    in_threads(cast, n, n, GRAIN)
    return encoded, carried


def quantize_to_half(x: Tensor, quant_scale: Tensor | None, nonzero: bool) -> Tensor:
    """float16 codes, saturating, one scale for the whole tensor. nonzero: as in `dispatch.quantize`."""
    codes = torch.empty_like(x, dtype=torch.float16, memory_format=_PLAIN)
    bits, out, scale, n = array(x), shared(codes, np.uint16), _number(quant_scale), x.numel()
    in_threads(lambda first, last: numba_half.encode(bits[first:last], scale, nonzero, out[first:last]), n, n, GRAIN)
    return codes


def count(
    x: Tensor, quant_scale: Tensor | None, fmt: Format, key: Tensor | None = None, stream: int = 0
) -> tuple[Tensor, Tensor]:
    """How many values a cast saturates, and how many it flushes to zero: int64, 0-dimensional."""
    if key is not None:
        *_, saturated, flushed = cpu_stochastic.quantize(x, quant_scale, fmt, False, None, True, key, stream)
        assert saturated is not None and flushed is not None
        return saturated, flushed
    bits, scale, n = array(x), _number(quant_scale), x.numel()
    counted = in_threads(lambda first, last: numba_cast.count(bits[first:last], scale, fmt.mantissa_bits), n, n, GRAIN)
    saturated, flushed = map(sum, zip(*counted, strict=True))
    return torch.tensor(saturated), torch.tensor(flushed)


def dequantize(codes: Tensor, dequant_scale: Tensor | None, fmt: Format, out: Tensor) -> Tensor:
    """Write the values of E4M3FN, E5M2 or FP16 codes times the scale into `out`, float32 or bfloat16, contiguous."""
    bits, values, scale, n = array(codes), array(out), _number(dequant_scale), codes.numel()
    streamed = out.dtype is torch.float32 and n >= MIN_STREAMED and out.data_ptr() % 64 == 0
    if fmt == FP16:
        widen = numba_half.decode_streamed if streamed else numba_half.decode
        in_threads(lambda first, last: widen(bits[first:last], scale, values[first:last]), n, n, GRAIN)
        return out
    decode = numba_cast.decode_streamed if streamed else numba_cast.decode
    in_threads(lambda first, last: decode(bits[first:last], scale, fmt.mantissa_bits, values[first:last]), n, n, GRAIN)
    return out


def round_to_bfloat16(x: Tensor, quant_scale: Tensor | None, key: Tensor, stream: int) -> Tensor:
    """x * quant_scale in bfloat16, stochastically rounded; overflow to infinity."""
    return cpu_stochastic.round_to_bfloat16(x, quant_scale, key, stream)


def _number(scale: Tensor | None) -> float:
    return 1.0 if scale is None else scale.item()
