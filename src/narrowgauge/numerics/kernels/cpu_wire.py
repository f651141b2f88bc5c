"""The Numba kernels for rows on the wire, on torch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge.numerics.kernels import numba_scales, numba_wire
from narrowgauge.numerics.kernels.cpu import MIN_STREAMED
from narrowgauge.numerics.kernels.cpu_arrays import array, shared
from narrowgauge.numerics.kernels.cpu_threads import in_threads
from narrowgauge.numerics.kernels.cpu_tiles import layout
from narrowgauge.numerics.kernels.numba_tiles import RUN

if TYPE_CHECKING:
    from narrowgauge.numerics.kernels.wire import WireFormat

_NO_VALUES, _NO_BYTES = np.empty(0, np.int32), np.empty(0, np.uint8)


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
    """`wire.encode` of a flat float32, bfloat16 or float16 tensor into contiguous bytes."""
    part, parts = _parts(n, wire)
    arguments = (_fields(wire), _random(key, stream), _residual(residual), array(out))
    bits = array(x)
    in_threads(
        lambda first, last: numba_wire.encode(bits, n, part, first, last, *arguments),
        rows * parts,
        rows * n,
    )


def decode(buffer: Tensor, n: int, wire: WireFormat, out: Tensor) -> None:
    """`wire.decode` into `out`, contiguous float32 or bfloat16."""
    part, parts = _parts(n, wire)
    streamed = out.dtype is torch.float32 and out.numel() >= MIN_STREAMED and out.data_ptr() % 64 == 0
    bytes_, stride, arguments = _rows(buffer), buffer.stride(0), (_fields(wire), streamed, array(out))
    in_threads(
        lambda first, last: numba_wire.decode(bytes_, stride, n, part, first, last, *arguments),
        len(buffer) * parts,
        out.numel(),
    )


def reduce(buffer: Tensor, n: int, wire: WireFormat, divisor: float) -> Tensor:
    """`wire.reduce`."""
    total = torch.empty(n, dtype=torch.float32)
    _reduce(buffer, n, wire, divisor, (False, 0, 0), _NO_VALUES, array(total), _NO_BYTES)
    return total


def reduce_and_encode(
    buffer: Tensor, n: int, wire: WireFormat, divisor: float, key: Tensor | None, stream: int, residual: Tensor | None,
    out: Tensor,
) -> None:  # fmt: skip
    """`wire.reduce_and_encode` into contiguous bytes."""
    _reduce(buffer, n, wire, divisor, _random(key, stream), _residual(residual), _NO_VALUES, array(out))


def _reduce(
    buffer: Tensor, n: int, wire: WireFormat, divisor: float, random: Any, residual: Any, total: Any, out: Any
) -> None:
    part, parts = _parts(n, wire)
    rows, stride, ranks = _rows(buffer), buffer.stride(0), len(buffer)
    arguments = (_fields(wire), divisor, random, residual, total, out)
    in_threads(
        lambda first, last: numba_wire.reduce(rows, stride, ranks, n, part, first, last, *arguments),
        parts,
        ranks * n,
    )


def _rows(buffer: Tensor) -> np.ndarray:
    """All bytes from the first row's to the last row's, with what lies between rows."""
    length = (len(buffer) - 1) * buffer.stride(0) + buffer.shape[1]
    return shared(buffer.detach().as_strided((length,), (1,)), np.uint8)


def _parts(n: int, wire: WireFormat) -> tuple[int, int]:
    """Values of a part, whole blocks that stay in the nearest caches with their scratch, and the parts of a row."""
    part = max(2 * RUN // wire.block, 1) * wire.block
    return part, -(-n // part)


def _fields(wire: WireFormat) -> tuple[int, ...]:
    return wire.block, numba_scales.RULES[wire.rule], wire.fmt.bits, *layout(wire.fmt)


def _random(key: Tensor | None, stream: int) -> tuple[bool, int, int]:
    return (False, 0, 0) if key is None else (True, int(key.item()), stream)


def _residual(residual: Tensor | None) -> Any:
    if residual is None:
        return _NO_VALUES
    torch.autograd.graph.increment_version(residual)  # autograd cannot see the kernel's writes
    return array(residual)
