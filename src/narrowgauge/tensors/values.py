"""From the codes of a QuantizedTensor to values, and from new values to its codes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.numerics import kernels
from narrowgauge.tensors.cast import cast_storage

if TYPE_CHECKING:
    from narrowgauge.tensors.quantized import QuantizedTensor


def decode(q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """codes * dequant_scale in `dtype`, laid out in memory as the codes are."""
    if q.codes.is_contiguous():
        return kernels.dequantize(q.codes, q.dequant_scale, q.spec.format, dtype)
    # a transposed tensor is decoded in the order of its memory: copying it into its logical order would cost more
    order = sorted(range(q.ndim), key=lambda d: -q.codes.stride(d))
    codes = q.codes.permute(order)
    values = kernels.dequantize(codes, q.dequant_scale, q.spec.format, dtype)
    return values.permute([order.index(d) for d in range(q.ndim)])


def values_of(q: QuantizedTensor) -> Tensor:
    """The plain tensor that operations see: the decoded codes, with the infinities that saturated in the cast.

    Where amax is infinite, a value at the format's maximum is infinite, since the codes cannot say so.
    """
    values = decode(q, q.dtype)
    if _is_readable(q.amax) and not math.isinf(q.amax.item()):
        return values
    top = (q.dequant_scale * q.spec.format.max).to(values.dtype)
    return torch.where(q.amax.isinf() & (values.abs() >= top), values * torch.inf, values)


def write(q: QuantizedTensor, values: Tensor, *, keep_unchanged: bool = True) -> None:
    """Cast `values` (of q's shape) with a fresh scale into q's own codes, scale and amax.

    keep_unchanged: values equal to those that q holds leave all of its bits as they are, the scale's too; with False
    the result is that of `quantize`.
    """
    whole = q
    if q._whole is not None:
        whole = _whole_of(q)
        values = _scatter(q, whole, values)
    held = values_of(whole) if keep_unchanged else None
    if held is not None and _is_readable(held) and torch.equal(held, values):
        return
    parts = cast_storage(values, q.spec, q.dequant_scale)
    if held is not None and not _is_readable(held):  # the same without waiting for the device
        changed = (held != values).any()
        codes = torch.where(changed, as_bytes(parts[0]), as_bytes(whole.codes)).view(whole.codes.dtype)
        parts = codes, torch.where(changed, parts[1], q.dequant_scale), torch.where(changed, parts[2], q.amax)
    for mine, new in zip((whole.codes, q.dequant_scale, q.amax), parts, strict=True):
        mine.copy_(new)


def _is_readable(x: Tensor) -> bool:
    """True where its values can be looked at without waiting for a device, and are known: not while compiling."""
    return type(x) is Tensor and x.device.type == "cpu"


def _whole_of(q: QuantizedTensor) -> QuantizedTensor:
    assert q._whole is not None
    return type(q)(q._whole, q.dequant_scale, q.spec, q.dtype, q.amax)


def as_bytes(codes: Tensor) -> Tensor:
    """Codes of one byte as uint8, which more of torch can handle; others as they are."""
    return codes.view(torch.uint8) if codes.element_size() == 1 else codes


def _scatter(view: QuantizedTensor, whole_tensor: QuantizedTensor, values: Tensor) -> Tensor:
    """The values of the whole that `view` is a part of, with that part replaced by `values`."""
    whole, part = whole_tensor.codes, view.codes
    if _may_overlap(part):
        raise NarrowgaugeError(
            f"cannot write to a view of shape {tuple(part.shape)} whose elements share memory (strides "
            f"{part.stride()}): write to the tensor it was expanded from"
        )
    extent = 1 + sum((size - 1) * stride for size, stride in zip(whole.size(), whole.stride(), strict=True))
    offset = part.storage_offset() - whole.storage_offset()
    last = offset + sum((size - 1) * stride for size, stride in zip(part.size(), part.stride(), strict=True))
    if part.numel() and not 0 <= offset <= last < extent:
        raise NarrowgaugeError("cannot write to a view of memory outside of the QuantizedTensor it was made from")
    # decoded into memory laid out as the codes are, so that the view's strides and offset hold there too
    laid_out = torch.zeros(max(extent, 0), dtype=values.dtype, device=values.device)
    all_values = laid_out.as_strided(whole.size(), whole.stride(), 0)
    all_values.copy_(values_of(whole_tensor))
    if part.numel():
        laid_out.as_strided(part.size(), part.stride(), offset).copy_(values)
    return all_values


def _may_overlap(x: Tensor) -> bool:
    """True unless every dimension steps over all that the dimensions of smaller strides span."""
    span = 0
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.size(), strict=True) if size > 1):
        if stride <= span:
            return True
        span += (size - 1) * stride
    return False
