"""One parameter's step in plain torch operations: read, update, write, for every storage format.

The slow twin of the fused kernels, and what runs where they do not have a combination of formats.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.numerics import kernels, residual
from narrowgauge.numerics.formats import BF16
from narrowgauge.optim import storage
from narrowgauge.optim.rules import Hyper, Rule
from narrowgauge.tensors.quantized import QuantizedTensor
from narrowgauge.tensors.values import write


class Item(NamedTuple):
    """A parameter with all that its step reads and writes.

    param: float32, bfloat16, float16, float64 or a QuantizedTensor, of any strides. master: int8 residual or int16
    remainder of a bfloat16 parameter, a copy as `storage` keeps it, or None. grad: any floating tensor of the
    parameter's shape. moments: in the rule's order, as `storage` keeps them. stochastic: whether a bfloat16 parameter
    is rounded so. stream: its random stream.
    """

    param: Tensor
    master: Tensor | None
    grad: Tensor
    moments: tuple[Tensor, ...]
    hyper: Hyper
    stochastic: bool
    stream: int


def update(rule: Rule, item: Item, key: Tensor | None) -> None:
    """Take the step, in place. The new moments act before they are cast.

    key: 0-dimensional int64, random bits of the step; needed where `item.stochastic`.
    """
    old = read(item.param, item.master)
    moments = tuple(storage.decode(stored, old.shape) for stored in item.moments)
    new, moments = rule.update(old, values_of_gradient(item.grad, old.dtype), moments, item.hyper)
    write_parameter(item, old, new, key)
    for stored, values in zip(item.moments, moments, strict=True):
        storage.overwrite(stored, values)


def values_of_gradient(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient as a plain tensor of `dtype`."""
    return grad.dequantize(dtype) if isinstance(grad, QuantizedTensor) else grad.detach().to(dtype)


def read(param: Tensor, master: Tensor | None) -> Tensor:
    """The parameter with all digits that it and its master hold: float32, or float64 where the parameter is that."""
    param = param.detach()
    if master is not None and is_residual(master):
        return (residual.join if master.dtype is torch.int8 else residual.join_exactly)(param, master)
    if master is not None:
        return storage.decode(master, param.shape)
    if isinstance(param, QuantizedTensor):
        return param.dequantize(torch.float32)
    return param if param.dtype is torch.float64 else param.float()


def is_residual(master: Tensor) -> bool:
    """True for what completes a bfloat16 parameter, False for a copy of it."""
    return master.dtype in (torch.int8, torch.int16)


def write_parameter(item: Item, old: Tensor, new: Tensor, key: Tensor | None) -> None:
    """Store `new`; where it equals `old`, what was read before, the bits stay."""
    param, master = item.param.detach(), item.master
    if master is not None and is_residual(master):
        split = residual.split if master.dtype is torch.int8 else residual.split_exactly
        changed = new != old
        for stored, values in zip((param, master), split(new), strict=True):
            stored.copy_(torch.where(changed, values, stored))
        return
    quantized = isinstance(param, QuantizedTensor)
    # on a GPU, `write` compares without waiting; here, before the master is written, which `old` may be
    unchanged = quantized and param.device.type == "cpu" and torch.equal(old, new)
    if master is not None:
        storage.overwrite(master, new, keep_unchanged=True)
        new = storage.decode(master, param.shape)
    if isinstance(param, QuantizedTensor):
        if not unchanged:
            write(param, new, keep_unchanged=param.device.type != "cpu")
    elif item.stochastic and param.dtype is torch.bfloat16:
        assert key is not None  # the optimizer draws one where an item is stochastic
        rounded = kernels.quantize(new, None, BF16, key=key.to(param.device), stream=item.stream).codes
        assert rounded is not None
        param.copy_(rounded)
    else:
        param.copy_(new)
