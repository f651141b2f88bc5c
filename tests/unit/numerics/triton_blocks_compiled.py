"""The forms in which the Triton kernels of blocks are compiled for a GPU."""

from __future__ import annotations

from typing import Any

from triton_builds import Builder

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


def build_planned(build: Builder, kernel: Any, plan: Plan, pointers: dict[str, str], constants: dict[str, Any]) -> None:
    """A kernel of tiles. As in Triton's JIT, numbers that are 1 are constants."""
    constants = constants | plan.constants | {name: 1 for name, size in plan.numbers.items() if size == 1}
    signature = pointers | dict.fromkeys(plan.numbers, "i32")
    signature = {name: kind for name, kind in signature.items() if name not in constants}
    build(kernel, signature, constants, plan.tiling.warps)


def build_cast(build: Builder, fmt: Format, rule: ScaleRule, block: Block, stochastic: bool) -> None:
    """One cast of a matrix of bfloat16."""
    plan = Plan.of(block, *SHAPE)
    pointers = {"x": "*bf16", "amax": "*i32", "whole": "*i32", "codes": "*u8", "carrier": "*bf16", "counts": "*i64"}
    pointers |= {"stored": "*fp32" if rule is CURRENT else "*u8", "key": "*i64", "stream": "i32"}
    pointers = {name: pointers[name] for name in kernels.quantize_blocks_kernel.arg_names if name in pointers}
    flags = {"STOCHASTIC": stochastic, "QUADS": plan.in_quads, "CODES": True, "CARRIER": True, "COUNT": True}
    bent = bent_fields_of(fmt, SQUARE_ROOT if fmt.is_integer else LINEAR, nonzero=not stochastic)
    passes = {"HAS_AMAX": plan.is_cut, "HAS_WHOLE": plan.is_cut or rule is NVFP4}
    constants = {"RULE": rule.name, **bent, **flags, **passes}
    build_planned(build, kernels.quantize_blocks_kernel, plan, pointers, constants)


def build_all(build: Builder) -> None:
    """The kernels in forms that between them use every function."""
    for case in CASTS:
        build_cast(build, *case)
    pointers = {"x": "*bf16", "amax": "*i32", "whole": "*i32"}
    build_planned(build, kernels.block_amax_kernel, Plan.of(PER_COLUMN, *SHAPE), pointers, {})
    numbers = ("rows", "columns", "height", "width", "across", "programs_across")
    # how scales are read and how codes are read do not depend on each other
    for kind, stored, exponent, root in (
        ("FLOAT32", "*fp32", 2, False), ("FLOAT32", "*fp32", 0, True), ("E8M0", "*u8", 2, False),
        ("NVFP4", "*u8", 2, False),
    ):  # fmt: skip
        signature = {
            "codes": "*u8",
            "stored": stored,
            "whole": "*fp32",
            "out": "*bf16",
            **dict.fromkeys(numbers, "i32"),
        }
        constants = {"KIND": kind, "EXPONENT": exponent, "MANTISSA": 1, "SIGNED": True, "ROOT": root}
        build(kernels.dequantize_blocks_kernel, signature, {**constants, "HEIGHT": 16, "WIDTH": 256})
    numbers = ("negative", "rows", "columns", "programs_across")
    signature = {"x": "*bf16", "out": "*fp32", **dict.fromkeys(numbers, "i32")}
    build(triton_hadamard.hadamard_kernel, signature, {"WIDTH": triton_hadamard.WIDTH})
    signature = {"x": "*fp32", "scale": "*fp32", "out": "*i16", "key": "*i64", "stream": "i32", "length": "i64"}
    build(triton_cast.bfloat16_kernel, signature, {"BLOCK": triton_cast.BLOCK})
    numbers = dict.fromkeys(("rows", "columns", "width", "programs_across"), "i32")
    for bits in (4, 6):
        constants = {"BITS": bits, "HEIGHT": triton_packing.HEIGHT, "WIDTH": triton_packing.WIDTH}
        for kernel in (triton_packing.pack_kernel, triton_packing.unpack_kernel):
            source = "packed" if kernel is triton_packing.unpack_kernel else "codes"
            build(kernel, {source: "*u8", "out": "*u8", **numbers}, constants)
