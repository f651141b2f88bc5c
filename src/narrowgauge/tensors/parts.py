"""The parts of a QuantizedTensor, and whether they fit together."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.numerics import scaling
from narrowgauge.numerics.companding import RANGE_EXPANSION
from narrowgauge.numerics.scaling import NVFP4, ScaleRule
from narrowgauge.recipes.spec import CastSpec
from narrowgauge.tensors import tiles
from narrowgauge.tensors.cast import FLOATING


def scale_dtype(spec: CastSpec) -> torch.dtype:
    """The dtype of the dequant_scale of a tensor cast by `spec`."""
    if not spec.in_blocks:
        return torch.float32
    assert isinstance(spec.scale, ScaleRule)
    return scaling.stored_dtype(spec.scale)


def scale_of_zeros(shape: torch.Size, spec: CastSpec, device: torch.device) -> Tensor:
    """The dequant_scale of a tensor of zeros of `shape` cast by `spec`."""
    if spec.in_blocks:
        return tiles.scales_of(0.0, shape, spec, device)
    return torch.ones((), dtype=torch.float32, device=device)


def check_parts(codes: Tensor, dequant_scale: Tensor, spec: CastSpec, dtype: torch.dtype, amax: Tensor | None) -> None:
    """Raise NarrowgaugeError unless these can be the parts of a QuantizedTensor of `spec` that stands for `dtype`."""
    if not isinstance(spec, CastSpec):
        raise NarrowgaugeError(f"expected a CastSpec, found {spec!r}: e.g. CastSpec(formats.E4M3FN)")
    for name, part in (("codes", codes), ("dequant_scale", dequant_scale), ("amax", amax)):
        if not isinstance(part, Tensor) and not (name == "amax" and part is None):
            raise NarrowgaugeError(f"{name}: expected a tensor, found {type(part).__name__}: use torch.as_tensor")
    if codes.dtype is not spec.format.dtype:
        raise NarrowgaugeError(f"codes of {spec.format}: expected {spec.format.dtype}, found {codes.dtype}")
    found = f"found {dequant_scale.dtype} of shape {tuple(dequant_scale.shape)}"
    if not spec.in_blocks and (dequant_scale.ndim or dequant_scale.dtype is not torch.float32):
        raise NarrowgaugeError(f"dequant_scale: expected one float32 value of shape (), {found}")
    if spec.in_blocks:
        expected, dimensions = scale_dtype(spec), max(codes.ndim, 1) + (spec.companding is RANGE_EXPANSION)
        if dequant_scale.dtype is not expected or dequant_scale.ndim != dimensions:
            raise NarrowgaugeError(f"dequant_scale: expected {expected}, one a tile of the codes, {found}")
        # a compiler's sizes may be symbols, and its tensors come from parts that were checked
        if type(codes) is Tensor and dequant_scale.shape != tiles.scale_shape(codes.shape, spec):
            raise NarrowgaugeError(
                f"dequant_scale: expected shape {tiles.scale_shape(codes.shape, spec)}, one entry for each "
                f"tile ({spec.granularity}) of codes of shape {tuple(codes.shape)}, {found}"
            )
        if spec.scale is NVFP4 and amax is None:
            raise NarrowgaugeError("amax: expected the source's amax, without which NVFP4's scales mean nothing")
    if amax is not None and (amax.ndim or amax.dtype is not torch.float32):
        raise NarrowgaugeError(
            f"amax: expected one float32 value of shape (), found {amax.dtype} of shape {tuple(amax.shape)}"
        )
    if dtype not in FLOATING:
        raise NarrowgaugeError(f"a QuantizedTensor stands for a tensor of a floating dtype, not {dtype}")
