"""From the codes of a QuantizedTensor to values, and from new values to its codes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.numerics import kernels, philox
from narrowgauge.tensors import tiles
from narrowgauge.tensors.cast import cast_storage

if TYPE_CHECKING:
    from narrowgauge.tensors.quantized import QuantizedTensor


def decode(q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """codes * dequant_scale in `dtype`, laid out in memory as the codes are."""
    if q.spec.in_blocks:
        return tiles.dequantize(q.codes, q.dequant_scale, q.amax, q.spec, dtype)
    if q.codes.is_contiguous():
        return kernels.dequantize(q.codes, q.dequant_scale, q.spec.format, dtype)
    # a transposed tensor is decoded in the order of its memory: copying it into its logical order would cost more
    order = sorted(range(q.ndim), key=lambda d: -q.codes.stride(d))
    codes = q.codes.permute(order)
    values = kernels.dequantize(codes, q.dequant_scale, q.spec.format, dtype)
    return values.permute([order.index(d) for d in range(q.ndim)])


def dequantize(q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """`decode`, with a gradient where `q` takes one."""
    return _Dequantize.apply(q, dtype) if torch.is_grad_enabled() and q.requires_grad else decode(q, dtype)


class _Dequantize(torch.autograd.Function):
    """`dequantize` with the gradient passed through: to autograd the tensor is the values that it stands for."""

    @staticmethod
    def forward(ctx: FunctionCtx, q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = q.dtype  # type: ignore[attr-defined]
        return decode(q, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.to(ctx.dtype), None


def values_of(q: QuantizedTensor) -> Tensor:
    """The plain tensor that operations see: the decoded codes, with the infinities that saturated in the cast.

    Where amax is infinite, a value at the format's maximum is infinite, since the codes cannot say so; with scales of
    tiles, one in the tiles whose scale is that of an infinite amax.
    """
    values = decode(q, q.dtype)
    if is_readable(q.amax) and not math.isinf(q.amax.item()):
        return values
    if q.spec.in_blocks:
        infinite = tiles.infinite_values(q.codes, q.dequant_scale, q.spec)
    else:
        infinite = values.abs() >= (q.dequant_scale * q.spec.format.max).to(values.dtype)
    return torch.where(q.amax.isinf() & infinite, values * torch.inf, values)


def write(q: QuantizedTensor, values: Tensor, *, keep_unchanged: bool = True) -> None:
    """Cast `values` (of q's shape) with fresh scales into q's own codes, scales and amax.

    keep_unchanged: values equal to those that q holds leave all of its bits as they are, the scale's too; with False
    the result is that of `quantize`. A stochastic cast draws its key from torch's default generator.
    """
    whole = q
    if q._whole is not None:
        whole = _whole_of(q)
        values = _scatter(q, whole, values)
    held = values_of(whole) if keep_unchanged else None
    if held is not None and is_readable(held) and torch.equal(held, values):
        return
    key = philox.draw_key(q.device) if q.spec.is_stochastic else None
    parts = cast_storage(values, q.spec, q.dequant_scale, key)
    mine = (whole.codes, q.dequant_scale, q.amax)
    if held is not None and not is_readable(held):  # the same without waiting for the device
        changed = (held != values).any()
        parts = tuple(
            torch.where(changed, as_bytes(new), as_bytes(old)).view(old.dtype)
            for new, old in zip(parts, mine, strict=True)
        )
    for old, new in zip(mine, parts, strict=True):
        old.copy_(new)


def is_readable(x: Tensor) -> bool:
    """True where its values can be looked at without waiting for a device, and are known: not while compiling."""
    return type(x) is Tensor and x.device.type == "cpu"


def _whole_of(q: QuantizedTensor) -> QuantizedTensor:
    assert q._whole is not None
    return type(q)(q._whole, q.dequant_scale, q.spec, q.dtype, q.amax)


def as_bytes(codes: Tensor) -> Tensor:
    """Codes of one byte as uint8, which more of torch can handle; others as they are."""
    return codes.view(torch.uint8) if codes.element_size() == 1 else codes


def _scatter(view: QuantizedTensor, whole: QuantizedTensor, values: Tensor) -> Tensor:
    """The values of the whole that `view` is a part of, with that part replaced by `values`."""
    part = view.codes
    if _may_overlap(part):
        raise NarrowgaugeError(
            f"cannot write to a view of shape {tuple(part.shape)} whose elements share memory (strides "
            f"{part.stride()}): write to the tensor it was expanded from"
        )
    all_values = laid_out(whole)
    part_of(all_values, whole.codes, part).copy_(values)
    return all_values


def laid_out(q: QuantizedTensor) -> Tensor:
    """`values_of` in memory laid out as the codes are, from offset 0 on, so that strides of their views hold there."""
    codes, values = q.codes, values_of(q)
    if is_readable(values) and values.is_contiguous() and codes.is_contiguous() and not values.storage_offset():
        if values.data_ptr() != codes.data_ptr():  # unscaled wide codes may be the values themselves
            return values
    memory = torch.zeros(max(_extent(codes), 0), dtype=values.dtype, device=values.device)
    return memory.as_strided(codes.size(), codes.stride(), 0).copy_(values)


def part_of(all_values: Tensor, codes: Tensor, part: Tensor) -> Tensor:
    """The view of `laid_out` values that `part` is of the codes."""
    offset = part.storage_offset() - codes.storage_offset()
    last = offset + sum((size - 1) * stride for size, stride in zip(part.size(), part.stride(), strict=True))
    if not part.numel():
        return all_values.new_empty(part.size())
    if not 0 <= offset <= last < _extent(codes):
        raise NarrowgaugeError(
            "a view of memory outside of the QuantizedTensor it was made from: take it from the whole"
        )
    return all_values.as_strided(part.size(), part.stride(), offset)


def _extent(x: Tensor) -> int:
    """Elements of memory from the first to the last of `x`."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.size(), x.stride(), strict=True))


def _may_overlap(x: Tensor) -> bool:
    """True unless every dimension steps over all that the dimensions of smaller strides span."""
    span = 0
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.size(), strict=True) if size > 1):
        if stride <= span:
            return True
        span += (size - 1) * stride
    return False
