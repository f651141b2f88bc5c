"""The words of the report: values, formats, headlines, and what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from narrowgauge.numerics import formats
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


def headline(rule: str, role: str) -> str:
    words = ROLE_WORDS.get(role, role)
    return {
        "saturation": f"values of the {words} are cut off",
        "flushed": f"small values of the {words} vanish",
        "low SQNR": f"the {words} is coarser than its format should make it",
        "lost updates": f"updates of the {words} are lost",
    }[rule]


def of_format(spec: Mapping[str, Any]) -> str:
    name = spec.get("format")
    return f" ({name}, {spec.get('granularity', 'granularity unknown')})" if name else ""


def expectation(spec: Mapping[str, Any]) -> str:
    expected = expected_sqnr_db(spec.get("format"))
    return "" if expected is None else f", where {spec['format']} gives about {expected:.0f} dB"


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
    return (
        "The updates are smaller than half a step of the stored parameter. Take a recipe with a master copy or "
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
