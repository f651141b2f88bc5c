"""Run as a program with TRITON_INTERPRET=1: holds the counting kernel against the torch twin on the CPU."""

from __future__ import annotations

import torch

from narrowgauge.numerics.kernels import counts, triton_counts


def check_counts() -> None:
    triton_counts.PROGRAMS = 2  # so that a program has several runs
    generator = torch.Generator().manual_seed(0)
    flat = [torch.randint(256, (n,), dtype=torch.uint8, generator=generator) for n in (0, 1, 4096, 5000, 40_003)]
    flat.append(torch.zeros(4097, dtype=torch.uint8))
    found, expected = (torch.zeros(len(flat), 256, dtype=torch.int64) for _ in range(2))
    triton_counts.count_on_gpu(flat, found)
    counts.twin(flat, expected)
    assert torch.equal(found, expected), (found - expected).nonzero()


if __name__ == "__main__":
    check_counts()
