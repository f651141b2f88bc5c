"""The form in which the counting kernel is compiled for a GPU."""

from __future__ import annotations

from triton_builds import Builder

from narrowgauge.numerics.kernels import triton_counts


def build_all(build: Builder) -> None:
    signature = {"codes": "*u8", "counts": "*i64", "length": "i64", "rounds": "i32"}
    build(triton_counts.count_kernel, signature, {"SIZE": triton_counts.SIZE, "BINS": triton_counts.BINS})
