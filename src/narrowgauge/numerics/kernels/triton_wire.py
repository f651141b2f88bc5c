"""The Triton kernels for rows on the wire, on tensors of CUDA devices: the bytes of `twin_wire`, without a wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from narrowgauge.numerics.companding import LINEAR
from narrowgauge.numerics.kernels.triton_round import bent_fields_of
from narrowgauge.numerics.kernels.triton_wire_kernels import decode_kernel, encode_kernel, reduce_kernel

if TYPE_CHECKING:
    from narrowgauge.numerics.kernels.wire import WireFormat

VALUES = 2048  # of a program, or one block


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
    """`wire.encode` of a flat float32, bfloat16 or float16 tensor that is not empty into contiguous bytes."""
    _run(
        encode_kernel, x.device, rows, n, wire, x=x, numel=x.numel(), codes=out, row_bytes=wire.row_bytes(n),
        residual=x if residual is None else residual, key=x if key is None else key, stream=stream,
        STOCHASTIC=key is not None, FEEDBACK=residual is not None, **encoding_constants_of(wire),
    )  # fmt: skip


def decode(buffer: Tensor, n: int, wire: WireFormat, out: Tensor) -> None:
    """`wire.decode` into `out`, contiguous float32 or bfloat16."""
    _run(
        decode_kernel,
        buffer.device,
        len(buffer),
        n,
        wire,
        codes=buffer,
        numel=out.numel(),
        out=out,
        row_bytes=buffer.stride(0),
    )


def reduce(buffer: Tensor, n: int, wire: WireFormat, divisor: float) -> Tensor:
    """`wire.reduce`."""
    total = torch.empty(n, dtype=torch.float32, device=buffer.device)
    _reduce(buffer, n, wire, divisor, total, None, None, 0, None)
    return total


def reduce_and_encode(
    buffer: Tensor, n: int, wire: WireFormat, divisor: float, key: Tensor | None, stream: int, residual: Tensor | None,
    out: Tensor,
) -> None:  # fmt: skip
    """`wire.reduce_and_encode` into contiguous bytes."""
    _reduce(buffer, n, wire, divisor, None, out, key, stream, residual)


def _reduce(
    buffer: Tensor, n: int, wire: WireFormat, divisor: float, total: Tensor | None, out: Tensor | None,
    key: Tensor | None, stream: int, residual: Tensor | None,
) -> None:  # fmt: skip
    # a kernel takes a tensor for every pointer, also for those that it does not use
    _run(
        reduce_kernel, buffer.device, 1, n, wire, rows_of_codes=buffer, rows=len(buffer), row_bytes=buffer.stride(0),
        divisor=divisor, total=buffer if total is None else total, codes=buffer if out is None else out,
        residual=buffer if residual is None else residual, key=buffer if key is None else key, stream=stream,
        STOCHASTIC=key is not None, FEEDBACK=residual is not None, TOTAL=total is not None, CODES=out is not None,
        **encoding_constants_of(wire),
    )  # fmt: skip


def constants_of(wire: WireFormat) -> dict[str, Any]:
    """The constants that all kernels take."""
    width = triton.next_power_of_2(wire.block)
    return {
        "EXPONENT": wire.fmt.exponent_bits, "MANTISSA": wire.fmt.mantissa_bits, "SCALE_BYTES": wire.scale_bytes,
        "PACKED": wire.fmt.bits < 8, "BLOCKS": max(VALUES // width, 1), "WIDTH": width,
    }  # fmt: skip


def encoding_constants_of(wire: WireFormat) -> dict[str, Any]:
    """The constants that kernels take which encode."""
    return {"RULE": wire.rule.name, "TOP": bent_fields_of(wire.fmt, LINEAR, False)["TOP"]}


def _run(kernel: Any, device: torch.device, grid_rows: int, n: int, wire: WireFormat, **arguments: Any) -> None:
    constants = constants_of(wire)
    blocks = -(-n // wire.block)
    across = -(-blocks // constants["BLOCKS"])
    sizes = {"n": n, "width": wire.block, "blocks": blocks, "programs_across": across,
             "code_bytes": wire.code_bytes(n)}  # fmt: skip
    if grid_rows * across == 0:
        return
    with torch.cuda.device(device):
        kernel[(grid_rows * across,)](**arguments, **sizes, **constants, num_warps=4, enable_fp_fusion=False)
