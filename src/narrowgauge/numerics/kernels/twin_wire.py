"""Rows on the wire in plain torch operations: the slow twin of the kernels, for every device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from narrowgauge.numerics import packing, rounding, scaling
from narrowgauge.numerics.granularity import Block
from narrowgauge.numerics.kernels import twin

if TYPE_CHECKING:
    from narrowgauge.numerics.kernels.wire import WireFormat


def encode(
    x: Tensor,
    rows: int,
    n: int,
    wire: WireFormat,
    key: Tensor | None,
    stream: int,
    residual: Tensor | None,
    out: Tensor,
) -> None:
    """`wire.encode` of a flat float32, bfloat16 or float16 tensor into `out`."""
    values = x.float() if residual is None else x.float() + residual.view(-1)
    matrix = F.pad(values, (0, rows * n - x.numel())).view(rows, n)
    block = Block(1, wire.block)
    codes, _, stored, *_ = twin.quantize_blocks(matrix, wire.fmt, block, wire.rule, key, stream, True, None, False)
    assert codes is not None
    finite = twin.block_amax(matrix, block).isfinite()
    kept = twin.spread(finite, block, matrix.shape)
    # code 0 where the scale says NaN: the sign of a NaN is not the same on every machine
    codes = codes.view(torch.uint8) * kept
    # not by torch.where, which takes no E8M0
    stored = stored.view(torch.uint8).reshape(rows, -1, wire.scale_bytes)
    nan = torch.tensor([0xFF] if wire.scale_bytes == 1 else [0, 0, 0xC0, 0x7F], dtype=torch.uint8, device=x.device)
    stored = torch.where(finite.unsqueeze(-1), stored, nan).flatten(1)
    if residual is not None:
        sent = _values(codes.view(wire.fmt.dtype), stored, wire)
        unsent = (matrix - sent).reshape(-1)[: x.numel()]
        residual.copy_(torch.where(kept.reshape(-1)[: x.numel()], unsent, residual.view(-1)).view(residual.shape))
    codes = packing.pack_in_torch(codes, wire.fmt.bits) if wire.fmt.bits < 8 else codes
    out.view(rows, -1).copy_(torch.cat([codes, stored], dim=1))


def decode(buffer: Tensor, n: int, wire: WireFormat, out: Tensor) -> None:
    """`wire.decode` into `out`."""
    out.copy_(_rows(buffer, n, wire).reshape(-1)[: out.numel()].view(out.shape))


def reduce(buffer: Tensor, n: int, wire: WireFormat, divisor: float) -> Tensor:
    """`wire.reduce`."""
    first, *others = _rows(buffer, n, wire).unbind(0)
    total = first
    for row in others:
        total = total + row
    # tensor by tensor: a division by a number is a product with its inverse on some devices
    return total if divisor == 1 else total / torch.full_like(total, divisor)


def reduce_and_encode(
    buffer: Tensor, n: int, wire: WireFormat, divisor: float, key: Tensor | None, stream: int, residual: Tensor | None,
    out: Tensor,
) -> None:  # fmt: skip
    """`wire.reduce_and_encode` into `out`."""
    encode(reduce(buffer, n, wire, divisor), 1, n, wire, key, stream, residual, out)


def _rows(buffer: Tensor, n: int, wire: WireFormat) -> Tensor:
    """The values of rows: float32 [rows, n]."""
    codes, stored = buffer[:, : wire.code_bytes(n)], buffer[:, wire.code_bytes(n) :]
    if wire.fmt.bits == 8:
        return _values(codes.contiguous().view(wire.fmt.dtype), stored, wire)
    codes = packing.unpack_in_torch(codes.contiguous(), wire.fmt.bits, n)
    if wire.fmt.is_integer:
        codes = (codes.view(torch.int8) ^ 8) - 8
    return _values(codes, stored, wire)


def _values(codes: Tensor, stored: Tensor, wire: WireFormat) -> Tensor:
    """Codes [rows, n], one a byte, times the factors of their scales, uint8 [rows, bytes]: float32 [rows, n]."""
    # a copy: bytes of a row may begin anywhere, float32 may not
    factors = scaling.block_factors(
        stored.clone(memory_format=torch.contiguous_format).view(scaling.stored_dtype(wire.rule))
    )
    return rounding.decode(codes, wire.fmt) * twin.spread(factors, Block(1, wire.block), codes.shape)
