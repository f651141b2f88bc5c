"""Moments and masters as they are stored, and the float32 values that they stand for.

FP32 and BF16 are plain tensors, everything else is a QuantizedTensor, or a PackedTensor below 8 bits. Tiles run along
the rows of a matrix: a tensor of more dimensions is kept as [shape[0], rest], so that the rows of a convolution are
long enough for them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from narrowgauge.numerics.formats import BF16, FP32
from narrowgauge.recipes.spec import CastSpec
from narrowgauge.tensors.packed import PackedTensor
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


def decode(stored: Tensor, shape: torch.Size) -> Tensor:
    """The values that `encode` was given, of `shape`: float32 (float64 where that is stored)."""
    if isinstance(stored, Encoded):
        return stored.dequantize(torch.float32).reshape(shape)
    return (stored if stored.dtype is torch.float64 else stored.float()).reshape(shape)


def overwrite(stored: Tensor, values: Tensor) -> None:
    """Put new `values` in the place of those that `stored` holds, with fresh scales."""
    if isinstance(stored, QuantizedTensor):
        write(stored, values.reshape(stored.shape), keep_unchanged=True)
    else:
        stored.copy_(values.reshape(stored.shape))


def spec_of(stored: Tensor) -> CastSpec:
    """The spec by which a moment or a copy of a parameter is stored."""
    if isinstance(stored, Encoded):
        return stored.spec
    return CastSpec(BF16) if stored.dtype is torch.bfloat16 else CastSpec(FP32)


def _as_stored(values: Tensor, spec: CastSpec) -> Tensor:
    if not spec.in_blocks or values.ndim <= 2:
        return values
    return values.reshape(values.shape[0], math.prod(values.shape[1:]))
