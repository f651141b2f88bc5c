"""Triton kernels of CUDA devices: amax, the cast to FP8 codes, and the way back.

All rounding is integer arithmetic, as in `numba_cast`: Triton's interpreter, which the tests run on a CPU, does not
round its own casts to float8 and bfloat16 as the hardware does. FP fusion is off, so that no product is contracted into
the sum that follows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgauge.numerics.formats import Format

BLOCK = 4096


@triton.jit
def _widen(values):  # type: ignore[no-untyped-def]
    """float32 of float32, bfloat16 or float16 values."""
    if values.dtype == tl.bfloat16:
        return (values.to(tl.uint16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return values.to(tl.float32)


@triton.jit
def amax_kernel(x, out, length, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out (int32, zero before) = bits of the largest magnitude of `x`; NaN is larger than infinity as an integer."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = _widen(tl.load(x + place, mask=place < length, other=0.0))
    magnitude = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(out, tl.max(magnitude, axis=0))


@triton.jit
def cast_kernel(  # type: ignore[no-untyped-def]
    x, scale, codes, carrier, counts, length,
    MANTISSA: tl.constexpr, CODES: tl.constexpr, CARRIER: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """codes (uint8) = encode(x * scale), saturating; carrier = their values; counts += (saturated, flushed)."""
    shift: tl.constexpr = 23 - MANTISSA
    align: tl.constexpr = (23 - MANTISSA) << 23
    # exponent field of the smallest normal value, and bits of the largest value, of E4M3FN (3 mantissa bits) or E5M2
    least: tl.constexpr = (121 << 23) if MANTISSA == 3 else (113 << 23)
    top: tl.constexpr = 0x43E00000 if MANTISSA == 3 else 0x47600000

    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < length
    values = _widen(tl.load(x + place, mask=mask, other=0.0))
    bits = (values * tl.load(scale)).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    clamped = tl.minimum(magnitude, top)
    # a power of two whose ulp is the distance of the format's values here: adding it rounds, ties to even, once
    grid = tl.maximum(clamped & 0x7F800000, least) + align
    rounded = clamped.to(tl.float32, bitcast=True) + grid.to(tl.float32, bitcast=True)
    code = ((grid - align - least) >> shift) + (rounded.to(tl.int32, bitcast=True) - grid)
    code = tl.where(is_nan, 0x7F, code)
    if CODES:
        tl.store(codes + place, (code | ((bits >> 24) & 0x80)).to(tl.uint8), mask=mask)
    if CARRIER:
        value = (rounded - grid.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
        value = tl.where(is_nan, 0x7FC00000, value) | (bits & -0x80000000)
        tl.store(carrier + place, value.to(tl.float32, bitcast=True).to(carrier.dtype.element_ty), mask=mask)
    if COUNT:
        saturated = (magnitude > top) & (magnitude <= 0x7F800000)
        flushed = (code == 0) & (values != 0.0)
        tl.atomic_add(counts, tl.sum(saturated.to(tl.int64), axis=0))
        tl.atomic_add(counts + 1, tl.sum(flushed.to(tl.int64), axis=0))


@triton.jit
def decode_kernel(codes, scale, out, length, MANTISSA: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out = codes (uint8) * scale, the product in float32, then one rounding to the dtype of `out`."""
    shift: tl.constexpr = 23 - MANTISSA
    least: tl.constexpr = (121 << 23) if MANTISSA == 3 else (113 << 23)
    smallest_normal: tl.constexpr = 2.0**-6 if MANTISSA == 3 else 2.0**-14
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < length
    code = tl.load(codes + place, mask=mask, other=0).to(tl.int32)
    field = code & 0x7F
    # read with the exponent one too large, less the implicit one: a subnormal's value, exactly
    low = ((field << shift) + least).to(tl.float32, bitcast=True) - smallest_normal
    high = (field << shift) + (least - 0x800000)
    value = tl.where(field < (1 << MANTISSA), low.to(tl.int32, bitcast=True), high)
    if MANTISSA == 3:
        value = tl.where(field == 0x7F, 0x7FC00000, value)
    else:
        value = tl.where(field > 0x7C, 0x7FC00000, tl.where(field == 0x7C, 0x7F800000, value))
    value = (value | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
    value = value * tl.load(scale)
    if out.dtype.element_ty == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        value = tl.where(value == value, rounded, 0x7FC00000).to(tl.float32, bitcast=True)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=mask)


def amax(x: Tensor) -> Tensor:
    """The largest magnitude of a tensor that is not empty: float32, 0-dimensional, NaN where `x` holds NaN."""
    out = torch.zeros((), dtype=torch.int32, device=x.device)
    with torch.cuda.device_of(x):
        amax_kernel[_grid(x)](x.detach().contiguous(), out, x.numel(), BLOCK=BLOCK, enable_fp_fusion=False)
    return out.view(torch.float32)


def quantize(
    x: Tensor, quant_scale: Tensor | None, fmt: Format, codes: bool, carrier: torch.dtype | None
) -> tuple[Tensor | None, Tensor | None]:
    """Codes and carrier, each where asked for, of E4M3FN or E5M2; saturating, one scale for the whole tensor."""
    encoded, carried, _ = _cast(x, quant_scale, fmt, codes, carrier, False)
    return encoded, carried


def count(x: Tensor, quant_scale: Tensor | None, fmt: Format) -> tuple[Tensor, Tensor]:
    """How many values a cast saturates, and how many it flushes to zero: int64, 0-dimensional."""
    counts = _cast(x, quant_scale, fmt, False, None, True)[2]
    return counts[0], counts[1]


def dequantize(codes: Tensor, dequant_scale: Tensor | None, fmt: Format, out: Tensor) -> Tensor:
    """Write the values of E4M3FN or E5M2 codes times the scale into `out`, float32 or bfloat16, contiguous."""
    source = codes.detach().contiguous().view(torch.uint8)
    with torch.cuda.device_of(codes):
        decode_kernel[_grid(codes)](
            source, _scale(dequant_scale, codes), out, codes.numel(), MANTISSA=fmt.mantissa_bits, BLOCK=BLOCK,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _cast(
    x: Tensor, quant_scale: Tensor | None, fmt: Format, codes: bool, carrier: torch.dtype | None, count: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    x = x.detach().contiguous()
    encoded = torch.empty_like(x, dtype=torch.uint8) if codes else None
    carried = torch.empty_like(x, dtype=carrier) if carrier is not None else None
    counts = torch.zeros(2, dtype=torch.int64, device=x.device)
    with torch.cuda.device_of(x):
        cast_kernel[_grid(x)](
            x, _scale(quant_scale, x), x if encoded is None else encoded, x if carried is None else carried, counts,
            x.numel(), MANTISSA=fmt.mantissa_bits, CODES=codes, CARRIER=carrier is not None, COUNT=count, BLOCK=BLOCK,
            enable_fp_fusion=False,
        )  # fmt: skip
    return None if encoded is None else encoded.view(fmt.dtype), carried, counts


def _scale(scale: Tensor | None, x: Tensor) -> Tensor:
    return torch.ones((), device=x.device) if scale is None else scale


def _grid(x: Tensor) -> tuple[int]:
    return (triton.cdiv(x.numel(), BLOCK),)
