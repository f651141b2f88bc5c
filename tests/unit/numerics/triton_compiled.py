"""Run as a program: compiles the Triton kernels for the GPU architectures given, which needs no GPU."""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from narrowgauge.numerics.formats import E4M3FN, E5M2
from narrowgauge.numerics.kernels import triton_cast as kernels
from narrowgauge.numerics.kernels.triton_round import fields_of


def build(kernel, signature: dict[str, str], constants: dict[str, Any], architecture: int, warps: int = 4) -> str:
    """PTX of one kernel."""
    signature = {**signature, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(kernel, signature, constexprs={(kernel.arg_names.index(k),): v for k, v in constants.items()})
    target = GPUTarget("cuda", architecture, 32)
    return triton.compile(source, target=target, options={"enable_fp_fusion": False, "num_warps": warps}).asm["ptx"]


def build_all(architecture: int) -> list[str]:
    """PTX of every kernel in every form that quantize and dequantize use."""
    block = {"BLOCK": kernels.BLOCK}
    built = []
    for x in ("*fp32", "*bf16", "*fp16"):
        built.append(build(kernels.amax_kernel, {"x": x, "out": "*i32", "length": "i64"}, block, architecture))
        for fmt in (E4M3FN, E5M2):
            for carrier in ("*bf16", "*fp32"):
                signature = {
                    "x": x,
                    "scale": "*fp32",
                    "codes": "*u8",
                    "carrier": carrier,
                    "counts": "*i64",
                    "key": "*i64",
                    "stream": "i32",
                    "length": "i64",
                }
                flags = {"STOCHASTIC": x == "*fp32", "CODES": True, "CARRIER": True, "COUNT": True}
                built.append(build(kernels.cast_kernel, signature, {**fields_of(fmt), **flags, **block}, architecture))
    for out in ("*fp32", "*bf16"):
        for fmt in (E4M3FN, E5M2):
            signature = {"codes": "*u8", "scale": "*fp32", "out": out, "length": "i64"}
            fields = {"EXPONENT": fmt.exponent_bits, "MANTISSA": fmt.mantissa_bits}
            built.append(build(kernels.decode_kernel, signature, {**fields, **block}, architecture))
    return built


if __name__ == "__main__":
    for architecture in map(int, sys.argv[1:]):
        for ptx in build_all(architecture):
            assert f".target sm_{architecture}" in ptx
            assert "fma.rn.f32" not in ptx  # a contracted product would round once where the twin rounds twice
