"""Moments and masters as they are stored, and the float32 values that they stand for.

FP32 and BF16 are plain tensors, everything else is a QuantizedTensor, or a PackedTensor below 8 bits. Tiles run along
the rows of a matrix: a tensor of more dimensions is kept as [shape[0], rest], so that the rows of a convolution are
long enough for them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from narrowgauge.numerics import packing
from narrowgauge.numerics.companding import RANGE_EXPANSION
from narrowgauge.numerics.formats import BF16, FP32, INT8, INT16
from narrowgauge.numerics.scaling import ULP
from narrowgauge.recipes.spec import CastSpec
from narrowgauge.tensors.packed import PackedTensor
from narrowgauge.tensors.parts import scale_of_zeros
from narrowgauge.tensors.quantized import QuantizedTensor, quantize
from narrowgauge.tensors.values import write

Encoded = QuantizedTensor | PackedTensor


def encode(values: Tensor, spec: CastSpec) -> Tensor:
    """`values` (float32; float64 stays so in an FP32 spec) as `spec` stores them: a new tensor."""
    if spec.format is FP32:
        return values.clone(memory_format=torch.contiguous_format)
    if spec == CastSpec(BF16):
        return values.to(torch.bfloat16, memory_format=torch.contiguous_format)
    values = _as_stored(values.float(), spec)
    return PackedTensor.quantize(values, spec) if spec.format.bits < 8 else quantize(values, spec)


def zeros(shape: torch.Size, spec: CastSpec, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What `encode` makes of zeros of `dtype`, without them: they would take more memory than what is kept."""
    if spec.format is FP32 or spec == CastSpec(BF16):
        return torch.zeros(shape, dtype=dtype if spec.format is FP32 else torch.bfloat16, device=device)
    if spec.companding is RANGE_EXPANSION or not math.prod(shape):
        return encode(torch.zeros(shape, dtype=dtype, device=device), spec)
    kept = matrix_shape(shape) if spec.in_blocks else shape
    codes = torch.zeros(kept, dtype=spec.format.dtype, device=device)
    amax = torch.zeros((), device=device)
    scale = scale_of_zeros(kept, spec, device)
    if spec.format.bits < 8:
        return PackedTensor(packing.pack_codes(codes, spec.format), scale, amax, spec, kept)
    return QuantizedTensor(codes, scale, spec, torch.float32, amax)


def decode(stored: Tensor, shape: torch.Size) -> Tensor:
    """The values that `encode` was given, of `shape`: float32 (float64 where that is stored)."""
    if isinstance(stored, Encoded):
        return stored.dequantize(torch.float32).reshape(shape)
    return (stored if stored.dtype is torch.float64 else stored.float()).reshape(shape)


def overwrite(stored: Tensor, values: Tensor, *, keep_unchanged: bool = False) -> None:
    """Put new `values` in the place of those that `stored` holds, with fresh scales.

    keep_unchanged: values equal to those that are held leave the scale's bits as they are, too.
    """
    if isinstance(stored, QuantizedTensor):
        write(stored, values.reshape(stored.shape), keep_unchanged=keep_unchanged)
    else:
        stored.copy_(values.reshape(stored.shape))


def spec_of(stored: Tensor) -> CastSpec:
    """The spec by which a moment, or a master, is stored."""
    if isinstance(stored, Encoded):
        return stored.spec
    if stored.dtype in (torch.int8, torch.int16):
        return CastSpec(INT8 if stored.dtype is torch.int8 else INT16, scale=ULP)
    return CastSpec(BF16) if stored.dtype is torch.bfloat16 else CastSpec(FP32)


def wide_dtype(p: Tensor) -> torch.dtype:
    """What a step of the parameter `p` works in."""
    return torch.float64 if p.dtype is torch.float64 else torch.float32


def matrix_shape(shape: torch.Size) -> torch.Size:
    """The shape in which a moment with tiles is stored: at least one dimension, and at most two."""
    if len(shape) > 2:
        return torch.Size((shape[0], math.prod(shape[1:])))
    return shape or torch.Size((1,))


def checksum(p: Tensor) -> int:
    """A number that follows from all bits of a parameter."""
    data = p.data
    parts = [data.codes, data.dequant_scale] if isinstance(data, QuantizedTensor) else [data]
    total = 0
    for part in parts:
        raw = part.detach().contiguous().view(-1).view(torch.uint8)
        whole = raw.numel() // 8 * 8
        total += int(raw[:whole].view(torch.int64).sum()) * 31 + int(raw[whole:].sum(dtype=torch.int64))
    return total


def _as_stored(values: Tensor, spec: CastSpec) -> Tensor:
    return values.reshape(matrix_shape(values.shape)) if spec.in_blocks else values
