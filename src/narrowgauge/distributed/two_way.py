"""Communication that autograd passes through: one function forward, its transpose backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Map = Callable[[Tensor], Tensor]


def two_way(x: Tensor, there: Map, back: Map) -> Tensor:
    """`there(x)`, whose gradient goes back through `back`, once: derivatives of derivatives are refused by torch."""
    return _TwoWay.apply(x, there, back)  # type: ignore[no-any-return]


class _TwoWay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Map, back: Map) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None
