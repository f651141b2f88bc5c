"""The words of the report: values, formats, headlines, and what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from narrowgauge.numerics import formats
from narrowgauge.numerics.rounding import STOCHASTIC
from narrowgauge.observe.report_precision import Cell

ROLE_WORDS = {
    "input": "input", "weight": "weight", "grad_output": "gradient of its output", "grad": "gradient",
    "exp_avg": "first moment", "exp_avg_sq": "second moment", "param": "parameter", "collective": "what is sent of it",
}  # fmt: skip


def expected_sqnr_db(name: Any) -> float | None:
    """SQNR of a format of m mantissa bits where nothing saturates or underflows: 6.02 m + 14.1 dB; None: not known.

    Rounding errors are even over a unit in the last place, 2^-m of the power of two below the value, of values spread
    evenly over the logarithm: their mean square is 3 / (2 ln 2) of that power of two's.
    """
    found = getattr(formats, name, None) if isinstance(name, str) else None
    if not isinstance(found, formats.Format) or found.is_integer:
        return None
    return 10 * math.log10(12 * 1.5 / math.log(2)) + 20 * math.log10(2) * found.mantissa_bits


def best_sqnr_db(spec: Mapping[str, Any]) -> float | None:
    """`expected_sqnr_db` of what a role is cast to, with the master or residual that a parameter has beside it.

    Rounded stochastically, a value between two neighbours errs by f (1 - f) of their distance squared in the mean: over
    all f a sixth, where nearest gives a twelfth.
    """
    if spec.get("companding"):
        return None  # its steps are those of a curve
    master = spec.get("master")
    alone = expected_sqnr_db(spec.get("format"))
    if is_stochastic(spec) and alone is not None:
        alone -= 10 * math.log10(2)
    if master == "INT8" and alone is not None:  # splits each unit in the last place into 254 steps
        return alone + 20 * math.log10(2 * formats.INT8.max)
    if master == "INT16":  # all the bits of float32
        return expected_sqnr_db("FP32")
    return expected_sqnr_db(master) if master else alone


def is_stochastic(spec: Mapping[str, Any]) -> bool:
    """Whether a role is rounded stochastically: its errors, and updates that change nothing, vanish in the mean."""
    return spec.get("rounding") == STOCHASTIC.value


def format_name(spec: Mapping[str, Any]) -> str:
    """The format in words; "" where it is not known."""
    name, master = str(spec.get("format") or ""), spec.get("master")
    if not master:
        return f"{name}, rounded stochastically" if name and is_stochastic(spec) else name
    residual = {"INT8": "an 8-bit residual, 24 bits in all", "INT16": "a 16-bit residual, 32 bits in all"}
    return f"{name} with {residual.get(master, f'a master copy in {master}')}"


def headline(rule: str, role: str) -> str:
    words = ROLE_WORDS.get(role, role)
    return {
        "saturation": f"values of the {words} are cut off",
        "flushed": f"small values of the {words} vanish",
        "low SQNR": f"the {words} is coarser than its format should make it",
        "lost updates": f"updates of the {words} are lost",
    }[rule]


def of_format(spec: Mapping[str, Any]) -> str:
    name = format_name(spec)
    return f" ({name}, {spec.get('granularity', 'granularity unknown')})" if name else ""


def expectation(spec: Mapping[str, Any]) -> str:
    expected = best_sqnr_db(spec)
    return "" if expected is None else f", where {format_name(spec)} gives about {expected:.0f} dB"


def remedy(rule: str, cell: Cell, spec: Mapping[str, Any]) -> str:
    wider = f'keep this layer wide: `recipe.for_layers("{cell.layer}", "bf16")`'
    if cell.role not in ("input", "weight", "grad_output"):
        wider = f"take a recipe with a wider {cell.role} role (`narrowgauge chart` shows them)"
    if rule == "saturation":
        if "delayed" in str(spec.get("scale", "")).lower():
            return (
                "The scale is a delayed one: it follows from earlier steps, and the values grew faster. Take a recipe "
                f"that scales by the step's own values (fp8_current, mxfp8), a margin, or {wider}."
            )
        return f"Look whether amax grows without end (then the learning rate is too high); else {wider}."
    if rule == "flushed":
        exponents = "" if spec.get("format") == "E5M2" else ", or a format of more exponent bits (E5M2),"
        return (
            f"A few large values set the scale for all. Smaller blocks (fp8_block, mxfp8){exponents} keep small ones; "
            f"or {wider}."
        )
    if rule == "low SQNR":
        return f"Look at its histogram: outliers, or values below the format's range. Smaller blocks help, or {wider}."
    return _of_lost_updates(spec)


def _of_lost_updates(spec: Mapping[str, Any]) -> str:
    held = spec.get("master") or spec.get("format")
    rate = (
        "Where a schedule ends near a learning rate of zero that is as it should be, or let it end higher "
        "(`schedule.final_fraction`)"
    )
    if held in ("FP32", "FP64", "INT16"):
        return f"The updates are smaller than half a step of float32. {rate}. Elsewhere, raise the learning rate."
    if held == "INT8":
        return (
            f"The updates are smaller than half a step of the parameter with its residual. {rate}. Elsewhere, raise "
            "the learning rate, or take a recipe with float32 parameters (bf16)."
        )
    return (
        "The updates are smaller than half a step of the stored parameter. Take a recipe with float32 parameters or a "
        "residual (bf16, narrow8) or stochastic rounding (bf16_pure), or a larger learning rate."
    )


def amount(measure: str, value: float) -> str:
    """A measured value in words: 12.3 dB, 0.45 %."""
    if not math.isfinite(value):
        return "not finite" if value != value else ("exact" if measure == "sqnr_db" else "infinite")
    if measure == "sqnr_db":
        return f"{value:.1f} dB"
    if measure in ("amax", "scale"):
        return f"{value:.3g}"
    percent = 100 * value
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"
