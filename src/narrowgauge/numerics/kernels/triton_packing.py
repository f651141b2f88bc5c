"""The Triton kernels of CUDA devices that pack codes of 4 and 6 bits: the bytes of `numerics.packing`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

HEIGHT, WIDTH = 4, 1024


@triton.jit
def pack_kernel(  # type: ignore[no-untyped-def]
    codes, out, rows, columns, width, programs_across, BITS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr
):
    """out (uint8 [rows, width]) = codes (uint8 [rows, columns]), the first in the lowest bits."""
    program = tl.program_id(0)
    row = ((program // programs_across) * HEIGHT + tl.arange(0, HEIGHT))[:, None]
    byte = ((program % programs_across) * WIDTH + tl.arange(0, WIDTH))[None, :]
    # a byte holds the rest of one code and the next one's beginning
    code = byte * 8 // BITS
    start = byte * 8 - code * BITS
    base = codes + row.to(tl.int64) * columns + code
    mask: tl.constexpr = (1 << BITS) - 1
    first = tl.load(base, mask=(row < rows) & (code < columns), other=0).to(tl.int32) & mask
    second = tl.load(base + 1, mask=(row < rows) & (code + 1 < columns), other=0).to(tl.int32) & mask
    packed = (first >> start) | (second << (BITS - start))
    tl.store(out + row.to(tl.int64) * width + byte, packed.to(tl.uint8), mask=(row < rows) & (byte < width))


@triton.jit
def unpack_kernel(  # type: ignore[no-untyped-def]
    packed, out, rows, columns, width, programs_across, BITS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr
):
    """out (uint8 [rows, columns]) = the codes of packed (uint8 [rows, width])."""
    program = tl.program_id(0)
    row = ((program // programs_across) * HEIGHT + tl.arange(0, HEIGHT))[:, None]
    code = ((program % programs_across) * WIDTH + tl.arange(0, WIDTH))[None, :]
    byte = code * BITS // 8
    start = code * BITS - byte * 8
    base = packed + row.to(tl.int64) * width + byte
    first = tl.load(base, mask=(row < rows) & (byte < width), other=0).to(tl.int32)
    second = tl.load(base + 1, mask=(row < rows) & (byte + 1 < width), other=0).to(tl.int32)
    found = ((first | (second << 8)) >> start) & ((1 << BITS) - 1)
    tl.store(out + row.to(tl.int64) * columns + code, found.to(tl.uint8), mask=(row < rows) & (code < columns))


def pack(codes: Tensor, bits: int, width: int) -> Tensor:
    """`packing.pack` of a tensor that is not empty; width: bytes of a row."""
    out = torch.empty(*codes.shape[:-1], width, dtype=torch.uint8, device=codes.device)
    columns = codes.shape[-1]
    _run(pack_kernel, codes, out, columns, width, width, bits)
    return out


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """`packing.unpack` of a tensor that is not empty."""
    out = torch.empty(*packed.shape[:-1], columns, dtype=torch.uint8, device=packed.device)
    _run(unpack_kernel, packed, out, columns, packed.shape[-1], columns, bits)
    return out


def _run(kernel, source: Tensor, out: Tensor, columns: int, width: int, across: int, bits: int) -> None:  # type: ignore[no-untyped-def]
    """across: the values of a row of `out`."""
    rows = out.numel() // across
    programs_across = triton.cdiv(across, WIDTH)
    with torch.cuda.device_of(source):
        kernel[(triton.cdiv(rows, HEIGHT) * programs_across,)](
            source.detach().contiguous(), out, rows, columns, width, programs_across, BITS=bits, HEIGHT=HEIGHT,
            WIDTH=WIDTH, enable_fp_fusion=False,
        )  # fmt: skip
