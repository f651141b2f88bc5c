"""The Triton kernel of CUDA devices that counts how often each code of a byte occurs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZE, BINS = 4096, 256
PROGRAMS = 1024  # at most: each adds its own table to the one in memory once


@triton.jit
def count_kernel(codes, counts, length, rounds, SIZE: tl.constexpr, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add to counts (int64 [BINS]) how often each value of codes (uint8 [length]) occurs; rounds: runs of a program."""
    start = tl.program_id(0).to(tl.int64) * rounds * SIZE
    table = tl.zeros((BINS,), dtype=tl.int64)
    for i in range(rounds):
        at = start + i * SIZE + tl.arange(0, SIZE)
        inside = at < length
        code = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
        missing = SIZE - tl.sum(inside.to(tl.int32), axis=0)  # which were read as code 0
        table += tl.histogram(code, BINS).to(tl.int64) - tl.where(tl.arange(0, BINS) == 0, missing, 0)
    tl.atomic_add(counts + tl.arange(0, BINS), table)


def count_on_gpu(flat: Sequence[Tensor], counts: Tensor) -> None:
    """Count flat uint8 tensors into the rows of counts, zeros on their device."""
    with torch.cuda.device_of(counts):
        for codes, row in zip(flat, counts, strict=True):
            runs = triton.cdiv(codes.numel(), SIZE)
            rounds = triton.cdiv(runs, PROGRAMS)
            if runs:
                grid = (triton.cdiv(runs, rounds),)
                count_kernel[grid](codes, row, codes.numel(), rounds, SIZE=SIZE, BINS=BINS)  # type: ignore[arg-type]
