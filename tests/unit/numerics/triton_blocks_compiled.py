"""Run as a program: compiles the Triton kernels of blocks for the GPU architectures given, which needs no GPU."""

from __future__ import annotations

import sys
from typing import Any

from triton_compiled import build

from narrowgauge.numerics.companding import LINEAR, SQUARE_ROOT
from narrowgauge.numerics.formats import E2M1FN, E4M3FN, INT8, UINT8, Format
from narrowgauge.numerics.granularity import PER_COLUMN, PER_ROW, Block
from narrowgauge.numerics.kernels import triton_cast, triton_hadamard, triton_packing
from narrowgauge.numerics.kernels import triton_tiles as kernels
from narrowgauge.numerics.kernels.triton_blocks import Plan
from narrowgauge.numerics.kernels.triton_round import bent_fields_of
from narrowgauge.numerics.scaling import CURRENT, E8M0_FLOOR, E8M0_UP, NVFP4, ScaleRule

SHAPE = (100000, 100000)
# format, rule, tile, rounded stochastically
CASTS = (
    (E4M3FN, CURRENT, Block(1, 128), False),
    (E4M3FN, CURRENT, Block(128, 128), False),
    (E4M3FN, E8M0_UP, Block(32, 1), True),
    (E4M3FN, E8M0_FLOOR, Block(1, 32), True),
    (E2M1FN, NVFP4, Block(16, 1), True),
    (E2M1FN, NVFP4, Block(16, 16), False),
    (E4M3FN, CURRENT, PER_ROW, True),
    (INT8, CURRENT, Block(1, 128), False),
    (UINT8, CURRENT, PER_ROW, False),
)


def build_planned(kernel: Any, plan: Plan, pointers: dict[str, str], constants: dict[str, Any], target: int) -> str:
    """PTX of a kernel of tiles. As in Triton's JIT, numbers that are 1 are constants."""
    constants = constants | plan.constants | {name: 1 for name, size in plan.numbers.items() if size == 1}
    signature = pointers | dict.fromkeys(plan.numbers, "i32")
    signature = {name: kind for name, kind in signature.items() if name not in constants}
    return build(kernel, signature, constants, target, plan.tiling.warps)


def cast(fmt: Format, rule: ScaleRule, block: Block, stochastic: bool, target: int) -> str:
    """PTX of one cast of a matrix of bfloat16."""
    plan = Plan.of(block, *SHAPE)
    pointers = {"x": "*bf16", "amax": "*i32", "whole": "*i32", "codes": "*u8", "carrier": "*bf16", "counts": "*i64"}
    pointers |= {"stored": "*fp32" if rule is CURRENT else "*u8", "key": "*i64", "stream": "i32"}
    pointers = {name: pointers[name] for name in kernels.quantize_blocks_kernel.arg_names if name in pointers}
    flags = {"STOCHASTIC": stochastic, "QUADS": plan.in_quads, "CODES": True, "CARRIER": True, "COUNT": True}
    bent = bent_fields_of(fmt, SQUARE_ROOT if fmt.is_integer else LINEAR, nonzero=not stochastic)
    passes = {"HAS_AMAX": plan.is_cut, "HAS_WHOLE": plan.is_cut or rule is NVFP4}
    constants = {"RULE": rule.name, **bent, **flags, **passes}
    return build_planned(kernels.quantize_blocks_kernel, plan, pointers, constants, target)


def build_all(target: int) -> list[str]:
    """PTX of the kernels in forms that between them use every function."""
    built = [cast(*case, target) for case in CASTS]
    pointers = {"x": "*bf16", "amax": "*i32", "whole": "*i32"}
    built.append(build_planned(kernels.block_amax_kernel, Plan.of(PER_COLUMN, *SHAPE), pointers, {}, target))
    for kind, stored in (("FLOAT32", "*fp32"), ("E8M0", "*u8"), ("NVFP4", "*u8")):
        signature = {"codes": "*u8", "stored": stored, "whole": "*fp32", "out": "*bf16"}
        numbers = ("rows", "columns", "height", "width", "across", "programs_across")
        signature |= dict.fromkeys(numbers, "i32")
        for exponent, root in ((2, False), (0, True)):
            constants = {"KIND": kind, "EXPONENT": exponent, "MANTISSA": 1, "SIGNED": True, "ROOT": root}
            constants |= {"HEIGHT": 16, "WIDTH": 256}
            built.append(build(kernels.dequantize_blocks_kernel, signature, constants, target))
    signature = {
        "x": "*bf16",
        "out": "*fp32",
        **dict.fromkeys(("negative", "rows", "columns", "programs_across"), "i32"),
    }
    built.append(build(triton_hadamard.hadamard_kernel, signature, {"WIDTH": triton_hadamard.WIDTH}, target))
    signature = {"x": "*fp32", "scale": "*fp32", "out": "*i16", "key": "*i64", "stream": "i32", "length": "i64"}
    built.append(build(triton_cast.bfloat16_kernel, signature, {"BLOCK": triton_cast.BLOCK}, target))
    numbers = dict.fromkeys(("rows", "columns", "width", "programs_across"), "i32")
    for bits in (4, 6):
        constants = {"BITS": bits, "HEIGHT": triton_packing.HEIGHT, "WIDTH": triton_packing.WIDTH}
        for kernel in (triton_packing.pack_kernel, triton_packing.unpack_kernel):
            source = "packed" if kernel is triton_packing.unpack_kernel else "codes"
            built.append(build(kernel, {source: "*u8", "out": "*u8", **numbers}, constants, target))
    return built


if __name__ == "__main__":
    for architecture in map(int, sys.argv[1:]):
        for ptx in build_all(architecture):
            assert f".target sm_{architecture}" in ptx
            assert "fma.rn.f32" not in ptx  # a contracted product would round once where the twin rounds twice
            assert ".ftz" not in ptx  # subnormal scales and values count
            assert (
                "div.full" not in ptx
                and "div.approx" not in ptx
                and "rcp.approx" not in ptx
                and "sqrt.approx" not in ptx
            )
