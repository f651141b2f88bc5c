"""Triton kernels of CUDA devices with one scale for a tensor: amax, the cast to codes, and the way back.

FP fusion is off, so that no product is contracted into the sum that follows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.numerics.formats import Format
from narrowgauge.numerics.kernels.triton_philox import words_of_quads
from narrowgauge.numerics.kernels.triton_round import decode, encode, fields_of, narrow, widen

BLOCK = 4096


@triton.jit
def amax_kernel(x, out, length, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out (int32, zero before) = bits of the largest magnitude of `x`; NaN is larger than infinity as an integer."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = widen(tl.load(x + place, mask=place < length, other=0.0))
    magnitude = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(out, tl.max(magnitude, axis=0))


@triton.jit(do_not_specialize=["stream"])
def cast_kernel(  # type: ignore[no-untyped-def]
    x, scale, codes, carrier, counts, key, stream, length,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, TOP: tl.constexpr, STOCHASTIC: tl.constexpr,
    CODES: tl.constexpr, CARRIER: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """codes (uint8) = encode(x * scale), saturating; carrier = their values; counts += (saturated, flushed)."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < length
    values = widen(tl.load(x + place, mask=mask, other=0.0))
    scaled = values * tl.load(scale)
    words = _words(key, stream, BLOCK) if STOCHASTIC else 0
    code = encode(scaled, words, EXPONENT, MANTISSA, TOP, STOCHASTIC)
    if CODES:
        tl.store(codes + place, code.to(tl.uint8), mask=mask)
    if CARRIER:
        # every value of 8 bits is one of bfloat16
        tl.store(carrier + place, decode(code, EXPONENT, MANTISSA).to(carrier.dtype.element_ty), mask=mask)
    if COUNT:
        magnitude = scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        saturated = (magnitude > TOP) & (magnitude <= 0x7F800000) & mask
        flushed = ((code & ((1 << (EXPONENT + MANTISSA)) - 1)) == 0) & (values != 0.0) & mask
        tl.atomic_add(counts, tl.sum(saturated.to(tl.int64), axis=0))
        tl.atomic_add(counts + 1, tl.sum(flushed.to(tl.int64), axis=0))


@triton.jit(do_not_specialize=["stream"])
def bfloat16_kernel(x, scale, out, key, stream, length, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out (int16) = bits of x * scale in bfloat16, rounded stochastically; to nearest even beyond its maximum."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < length
    values = widen(tl.load(x + place, mask=mask, other=0.0)) * tl.load(scale)
    bits = values.to(tl.int32, bitcast=True)
    # the half word that goes is the distance to the value below, in steps of 2^-16 of the gap
    upwards = (_words(key, stream, BLOCK) >> 16).to(tl.int32) < (bits & 0xFFFF)
    rounded = tl.where(upwards, bits + 0x10000, bits)
    is_beyond = (bits & 0x7FFFFFFF) > 0x7F7F0000
    rounded = tl.where(is_beyond, bits + 0x7FFF + ((bits >> 16) & 1), rounded)
    rounded = tl.where(values == values, rounded, 0x7FC00000)
    tl.store(out + place, (rounded >> 16).to(tl.int16), mask=mask)


@triton.jit
def _words(key, stream, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The random words of this program's values."""
    quad = tl.program_id(0).to(tl.int64) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    return words_of_quads(quad, tl.load(key), stream)


@triton.jit
def decode_kernel(  # type: ignore[no-untyped-def]
    codes, scale, out, length, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, BLOCK: tl.constexpr
):
    """out = codes (uint8) * scale, the product in float32, then one rounding to the dtype of `out`."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < length
    code = tl.load(codes + place, mask=mask, other=0).to(tl.int32)
    values = decode(code, EXPONENT, MANTISSA) * tl.load(scale)
    tl.store(out + place, narrow(values, out.dtype.element_ty), mask=mask)


def amax(x: Tensor) -> Tensor:
    """The largest magnitude of a tensor that is not empty: float32, 0-dimensional, NaN where `x` holds NaN."""
    out = torch.zeros((), dtype=torch.int32, device=x.device)
    with torch.cuda.device_of(x):
        amax_kernel[_grid(x)](x.detach().contiguous(), out, x.numel(), BLOCK=BLOCK, enable_fp_fusion=False)
    return out.view(torch.float32)


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
    encoded, carried, _ = _cast(x, quant_scale, fmt, codes, carrier, False, key, stream)
    return encoded, carried


def count(
    x: Tensor, quant_scale: Tensor | None, fmt: Format, key: Tensor | None = None, stream: int = 0
) -> tuple[Tensor, Tensor]:
    """How many values a cast saturates, and how many it flushes to zero: int64, 0-dimensional."""
    counts = _cast(x, quant_scale, fmt, False, None, True, key, stream)[2]
    return counts[0], counts[1]


def round_to_bfloat16(x: Tensor, quant_scale: Tensor | None, key: Tensor, stream: int) -> Tensor:
    """x * quant_scale in bfloat16, rounded stochastically."""
    x = x.detach().contiguous()
    out = torch.empty_like(x, dtype=torch.bfloat16)
    with torch.cuda.device_of(x):
        bfloat16_kernel[_grid(x)](
            x, _scale(quant_scale, x), out.view(torch.int16), key, stream, x.numel(), BLOCK=BLOCK,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def dequantize(codes: Tensor, dequant_scale: Tensor | None, fmt: Format, out: Tensor) -> Tensor:
    """Write the values of E4M3FN or E5M2 codes times the scale into `out`, float32 or bfloat16, contiguous."""
    source = codes.detach().contiguous().view(torch.uint8)
    with torch.cuda.device_of(codes):
        decode_kernel[_grid(codes)](
            source, _scale(dequant_scale, codes), out, codes.numel(), EXPONENT=fmt.exponent_bits,
            MANTISSA=fmt.mantissa_bits, BLOCK=BLOCK, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _cast(
    x: Tensor,
    quant_scale: Tensor | None,
    fmt: Format,
    codes: bool,
    carrier: torch.dtype | None,
    count: bool,
    key: Tensor | None,
    stream: int,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    x = x.detach().contiguous()
    encoded = torch.empty_like(x, dtype=torch.uint8) if codes else None
    carried = torch.empty_like(x, dtype=carrier) if carrier is not None else None
    counts = torch.zeros(2, dtype=torch.int64, device=x.device)
    with torch.cuda.device_of(x):
        cast_kernel[_grid(x)](
            x, _scale(quant_scale, x), x if encoded is None else encoded, x if carried is None else carried, counts,
            counts if key is None else key, stream, x.numel(), **fields_of(fmt), STOCHASTIC=key is not None,
            CODES=codes, CARRIER=carrier is not None, COUNT=count, BLOCK=BLOCK, enable_fp_fusion=False,
        )  # fmt: skip
    return None if encoded is None else encoded.view(fmt.dtype), carried, counts


def _scale(scale: Tensor | None, x: Tensor) -> Tensor:
    return torch.ones((), device=x.device) if scale is None else scale


def _grid(x: Tensor) -> tuple[int]:
    return (triton.cdiv(x.numel(), BLOCK),)
