"""Embedding tables in 16 bits, whose gradients are summed in float32.

Made from nn.Embedding by `convert`, which swaps the class in place. Torch adds the gradients of a token's occurrences
in the table's dtype: in bfloat16 a sum of like terms stands still at 256 of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from narrowgauge.layers.parted import Parted
from narrowgauge.tensors.cast import HALF
from narrowgauge.tensors.local import as_part_of, is_distributed, local


class Embedding(nn.Embedding):
    """Rows of the table by index, as nn.Embedding; the gradient of a table in 16 bits is float32 where it is kept so.

    Other tables, sparse gradients and frozen tables are looked up by torch. parted: looks up where the rows are parted
    over processes; None: this process has all.
    """

    parted: Parted | None = None

    def reset_parameters(self) -> None:
        """Draw the table anew."""
        if self.parted is None:
            super().reset_parameters()
        else:
            self.parted.reset(self)

    def forward(self, input: Tensor) -> Tensor:
        if self.parted is not None:
            return self.parted.run(self, input)
        return self.lookup(input)

    def lookup(self, input: Tensor) -> Tensor:
        """Rows of a whole table."""
        weight = self.weight
        if type(weight) is not nn.Parameter or weight.dtype not in HALF or self.sparse or not weight.requires_grad:
            return nn.Embedding.forward(self, input)
        if self.max_norm is not None:  # renormalised in place, as torch does
            F.embedding(input, weight.detach(), self.padding_idx, self.max_norm, self.norm_type)
        padding_idx = -1 if self.padding_idx is None else self.padding_idx
        return _Lookup.apply(weight, input, padding_idx, self.scale_grad_by_freq)  # type: ignore[no-any-return]


def lookup_part(weight: Tensor, indices: Tensor, padding_idx: int = -1) -> Tensor:
    """Rows of the part of a table that this process has, by index into that part, int64 [...]: [..., width].

    weight: a DTensor, whose gradient is laid out as it is, and float32 where the table is in 16 bits and keeps it so.
    """
    return _Lookup.apply(weight, indices, padding_idx, False)  # type: ignore[no-any-return]


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, indices: Tensor, padding_idx: int, scale_grad_by_freq: bool) -> Tensor:
        ctx.save_for_backward(indices)
        held = local(weight)
        ctx.arguments = (held.shape[0], padding_idx, scale_grad_by_freq)
        ctx.weight = weight if is_distributed(weight) else None
        return F.embedding(indices, held.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        (indices,) = ctx.saved_tensors
        grad = torch.ops.aten.embedding_dense_backward(grad_output.float(), indices, *ctx.arguments)
        if ctx.weight is not None:
            grad = as_part_of(ctx.weight, grad)
        return grad, None, None, None  # autograd casts it to the parameter's grad_dtype
