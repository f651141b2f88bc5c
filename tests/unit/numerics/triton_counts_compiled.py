"""Run as a program: compiles the counting kernel for the GPU architectures given, which needs no GPU."""

from __future__ import annotations

import sys

from triton_compiled import build

from narrowgauge.numerics.kernels import triton_counts

if __name__ == "__main__":
    for architecture in map(int, sys.argv[1:]):
        signature = {"codes": "*u8", "counts": "*i64", "length": "i64", "rounds": "i32"}
        constants = {"SIZE": triton_counts.SIZE, "BINS": triton_counts.BINS}
        ptx = build(triton_counts.count_kernel, signature, constants, architecture)
        assert f".target sm_{architecture}" in ptx
