"""Casts that several named recipes share, and the options that choose among them."""

from __future__ import annotations

import dataclasses
from typing import Any

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.companding import SQUARE_ROOT
from narrowgauge.numerics.formats import (
    E2M3FN,
    E3M2FN,
    E4M3FN,
    E5M2,
    FP16,
    FP32,
    INT4,
    INT8,
    UINT4,
    UINT8,
    Format,
)
from narrowgauge.numerics.granularity import Block
from narrowgauge.numerics.hadamard import Hadamard
from narrowgauge.numerics.rounding import NEAREST_EVEN, NONZERO, STOCHASTIC
from narrowgauge.numerics.scaling import (
    CURRENT,
    CURRENT_POW2,
    E8M0_RULES,
    E8M0_UP,
    TENSOR_POW2,
    Delayed,
    Scale,
    ScaleRule,
)
from narrowgauge.recipes import fields as check
from narrowgauge.recipes.cast_spec import CastSpec

MX_BLOCK = 32  # OCP MX v1.0
TENSOR_E4M3 = CastSpec(E4M3FN, scale=TENSOR_POW2)
SCALED_FP16 = CastSpec(FP16, scale=TENSOR_POW2)
# what travels: a scale byte for 128 values, a power of two, which bfloat16 and other such scales take over unrounded
WIRE = CastSpec(E4M3FN, Block(1, 128), E8M0_UP)
WIRES: dict[str, Any] = dict.fromkeys(("grad_comm", "param_comm", "activation_comm", "pipeline_comm"), WIRE)
# what FP8-LM's levels have in common; a weight has the spec of O3's parameters, whose codes are then multiplied as they
# are. Gradients take a float32 scale, into which clipping goes without a second rounding.
FP8_LM: dict[str, Any] = {
    "input": CastSpec(E4M3FN, scale=Delayed(history_length=16, warmup=16)),
    "weight": TENSOR_E4M3,
    "grad_output": CastSpec(E5M2, scale=Delayed(history_length=16, warmup=16)),
    "grad": CastSpec(E4M3FN),
    **WIRES,
}
FP8_LM_MOMENTS: dict[str, Any] = {
    "exp_avg": TENSOR_E4M3,
    "exp_avg_sq": CastSpec(FP16, scale=TENSOR_POW2, rounding=NONZERO),
}

# what TransformerEngine calls fp8_format: the formats of (input and weight, grad_output)
FP8_FORMATS = {"HYBRID": (E4M3FN, E5M2), "E4M3": (E4M3FN, E4M3FN)}
FP6_FORMATS = {"E3M2": E3M2FN, "E2M3": E2M3FN}
# bits of a moment -> (exp_avg, exp_avg_sq): narrow ones on a square-root curve in tiles of 128
MOMENTS = {
    32: (CastSpec(FP32), CastSpec(FP32)),
    8: (
        CastSpec(INT8, Block(1, 128), companding=SQUARE_ROOT),
        CastSpec(UINT8, Block(1, 128), rounding=NONZERO, companding=SQUARE_ROOT),
    ),
    4: (
        CastSpec(INT4, Block(1, 128), companding=SQUARE_ROOT),
        CastSpec(UINT4, Block(1, 128), rounding=NONZERO, companding=SQUARE_ROOT),
    ),
}
FLOAT_SCALES = (CURRENT_POW2, CURRENT)


def operands(fp8_format: str | Format, scale: Scale) -> dict[str, Any]:
    """The three operands in the formats of `fp8_format`, under one kind of scale."""
    forward, backward = fp8_formats(fp8_format)
    return {
        "input": CastSpec(forward, scale=scale),
        "weight": CastSpec(forward, scale=scale),
        "grad_output": CastSpec(backward, scale=scale),
    }


def fp8_formats(fp8_format: str | Format) -> tuple[Format, Format]:
    """The formats of (input and weight, grad_output) under TransformerEngine's name for the pair."""
    return check.choice("fp8_format", "E4M3" if fp8_format == E4M3FN else fp8_format, FP8_FORMATS)


def moments(bits: int) -> dict[str, Any]:
    """Both moments in so many bits each."""
    if not isinstance(bits, int) or isinstance(bits, bool) or bits not in MOMENTS:
        raise RecipeError(f"moment_bits={bits!r}: expected {', '.join(map(str, MOMENTS))}")
    return dict(zip(("exp_avg", "exp_avg_sq"), MOMENTS[bits], strict=True))


def narrow(moment_bits: int) -> dict[str, Any]:
    """What the recipes of the narrow8 family have in common."""
    return {**operands("HYBRID", CURRENT), "grad": CastSpec(E4M3FN), **WIRES, **moments(moment_bits)}


def mx(forward: Format, backward: Format, scale: str | ScaleRule, stochastic: bool = False) -> dict[str, Any]:
    """The three operands in OCP's blocks; stochastic: how grad_output is rounded."""
    rule = check.scale(scale, E8M0_RULES)
    block = Block(1, MX_BLOCK)
    row = CastSpec(forward, block, rule)
    return {"input": row, "weight": row, "grad_output": rounded(CastSpec(backward, block, rule), stochastic)}


def rounded(spec: CastSpec, stochastic: bool) -> CastSpec:
    """`spec` with the rounding that the option `stochastic` asks for."""
    rounding = STOCHASTIC if check.flag("stochastic", stochastic) else NEAREST_EVEN
    return dataclasses.replace(spec, rounding=rounding)


def transform(hadamard: bool | Hadamard | None) -> Hadamard | None:
    """What the option `hadamard` means: True for the default signs."""
    if hadamard is None or isinstance(hadamard, Hadamard):
        return hadamard
    return Hadamard() if check.flag("hadamard", hadamard) else None
