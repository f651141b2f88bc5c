"""When a layer needs attention: rules with thresholds for what was measured of each layer and role."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from narrowgauge.numerics import formats
from narrowgauge.observe.report_precision import Cell, PrecisionReader, Tally

SERIOUS, LOOK, NOTE = "serious", "look", "note"
SEVERITIES = (SERIOUS, LOOK, NOTE)
OVER_AFTER = 3  # calm samples after which a trouble is over
HARMLESS_DB = 3.0  # below what the format gives: what was flushed is little of the whole
UNKNOWN_SQNR_DB = 25.0  # what a format that is no floating-point format is judged against
ROLE_WORDS = {
    "input": "input", "weight": "weight", "grad_output": "gradient of its output", "grad": "gradient",
    "exp_avg": "first moment", "exp_avg_sq": "second moment", "param": "parameter", "collective": "what is sent of it",
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One entry of "What needs attention".

    severity: "serious" (the run is being harmed), "look" (worth a look) or "note". rule: which threshold. step: since
    when, -1: of no step. layer, role, measure: where to look, "" where that is not of one layer. layers: all layers
    concerned, worst first, as {"layer", "step", "value"}.
    """

    severity: str
    rule: str
    title: str
    text: str
    remedy: str
    step: int = -1
    layer: str = ""
    role: str = ""
    measure: str = ""
    layers: Sequence[Mapping[str, Any]] = field(default_factory=tuple)


@dataclass(frozen=True)
class CellRule:
    """Limits of a measure: a cell at or beyond `look` is shown, at or beyond `serious` it is serious while it lasts.

    relative: limits are added to what the cell's format gives (SQNR).
    """

    name: str
    measure: str
    look: float
    serious: float
    what: str
    worst_is_low: bool = False
    relative: bool = False


RULES = (
    CellRule("saturation", "saturated", 1e-3, 1e-2, "of its values were cut off at the largest that the format holds"),
    CellRule("flushed", "flushed", 0.1, 0.5, "of its values that are not zero became zero in the cast"),
    CellRule("low SQNR", "sqnr_db", -10.0, -20.0, "signal to quantization noise", worst_is_low=True, relative=True),
    CellRule("lost updates", "lost", 0.25, 0.75, "of its updates changed no bit of the parameter"),
)
DEAD, RISEN_FROM, RISEN_TO = 1.0, 0.25, 0.5  # shares of exact zeros in a gradient


def expected_sqnr_db(name: Any) -> float | None:
    """SQNR of a format of m mantissa bits where nothing saturates or underflows: 6.02 m + 14.1 dB; None: not known.

    Rounding errors are even over a unit in the last place, 2^-m of the power of two below the value, of values spread
    evenly over the logarithm: their mean square is 3 / (2 ln 2) of that power of two's.
    """
    found = getattr(formats, name, None) if isinstance(name, str) else None
    if not isinstance(found, formats.Format) or found.is_integer:
        return None
    return 10 * math.log10(12 * 1.5 / math.log(2)) + 20 * math.log10(2) * found.mantissa_bits


def cell_tallies() -> dict[str, Tally]:
    """A tally for each measure that a rule looks at."""
    found = {rule.measure: Tally((rule.look, rule.serious), rule.worst_is_low) for rule in RULES}
    return found | {"zero": Tally((DEAD,))}


def thresholds() -> list[str]:
    """What the rules look for, in words, in the order in which they are tried."""
    return [
        "saturation: 0.1 % of a tensor's values or more cut off at the format's largest; from 1 % on it is serious",
        "flushed: 10 % or more of the values that are not zero became zero in the cast; from 50 % on it is serious; a "
        "step less where the SQNR stays within 3 dB of what the format gives",
        "low SQNR: 10 dB or more below what the format gives (6.02 dB for each mantissa bit, and 14.1); from 20 dB on "
        f"it is serious; integers and unknown formats are judged against {UNKNOWN_SQNR_DB:.0f} dB",
        "lost updates: 25 % or more of a parameter's updates changed no bit of it; from 75 % on it is serious",
        "dead gradients: all of a gradient is exactly zero; or zeros rose from below 25 % to 50 % or more",
    ]


def cell_findings(reader: PrecisionReader, specs: Mapping[Cell, Mapping[str, Any]]) -> list[Finding]:
    """What the rules find in the sampled steps: one finding for each rule, role and severity, its worst layer first."""
    found: list[Finding] = []
    for rule in RULES:
        found += _by_role(rule, reader, specs)
    return found + _zeros(reader)


def _by_role(rule: CellRule, reader: PrecisionReader, specs: Mapping[Cell, Mapping[str, Any]]) -> list[Finding]:
    tally = reader.tallies[rule.measure]
    groups: dict[tuple[str, str], list[int]] = {}
    for at in np.flatnonzero(tally.beyond[0]).tolist():
        severity = _severity(tally, at)
        if rule.name == "flushed" and _is_harmless(reader, at, specs):
            severity = SEVERITIES[min(SEVERITIES.index(severity) + 1, len(SEVERITIES) - 1)]
        groups.setdefault((severity, reader.cells[at].role), []).append(at)
    found = []
    for (severity, role), cells in groups.items():
        cells.sort(key=lambda at: tally.worst[at], reverse=not rule.worst_is_low)
        found.append(_finding(rule, severity, role, cells, reader, specs))
    return found


def _severity(tally: Tally, at: int) -> str:
    is_over = tally.calm[0, at] >= OVER_AFTER
    if tally.beyond[1, at]:
        return LOOK if is_over else SERIOUS
    return NOTE if is_over else LOOK


def _is_harmless(reader: PrecisionReader, at: int, specs: Mapping[Cell, Mapping[str, Any]]) -> bool:
    """True where the SQNR of a cell is known and never lay clearly below what its format gives."""
    expected = expected_sqnr_db(specs.get(reader.cells[at], {}).get("format"))
    worst = reader.tallies["sqnr_db"].worst
    return expected is not None and at < len(worst) and bool(worst[at] >= expected - HARMLESS_DB)


def _finding(
    rule: CellRule,
    severity: str,
    role: str,
    cells: list[int],
    reader: PrecisionReader,
    specs: Mapping[Cell, Mapping[str, Any]],
) -> Finding:
    tally = reader.tallies[rule.measure]
    at = cells[0]
    cell = reader.cells[at]
    spec = specs.get(cell, {})
    since = int(tally.since[0, at])
    worst = amount(rule.measure, tally.worst[at])
    if rule.relative:
        said = f"{worst} of {rule.what}{_expectation(spec)}, worst"
    else:
        said = f"{'Up to ' if tally.beyond[0, at] > 1 else ''}{worst} {rule.what}{_of_format(spec)}, worst"
    text = (
        f"{said} at step {tally.worst_step[at]:,}; first at step {since:,}, in {tally.beyond[0, at]:,} of "
        f"{tally.samples[at]:,} sampled steps{_ending(tally, at)}."
    )
    if rule.name == "flushed" and _is_harmless(reader, at, specs):
        sqnr = amount("sqnr_db", reader.tallies["sqnr_db"].worst[at])
        text += f" They are little of the whole: its SQNR was {sqnr} at worst, near the best of its format."
    more = f" and {len(cells) - 1:,} more" if len(cells) > 1 else ""
    return Finding(
        severity, rule.name, f"{cell.layer}{more}: {_headline(rule, role)}", text,
        _remedy(rule.name, cell, spec), since, cell.layer, role, rule.measure,
        tuple(_entry(reader, rule.measure, n, tally.since[0, n], tally.worst[n]) for n in cells),
    )  # fmt: skip


def _entry(reader: PrecisionReader, measure: str, at: int, step: Any, value: float) -> dict[str, Any]:
    return {"layer": reader.cells[at].layer, "step": int(step), "value": amount(measure, value)}


def _ending(tally: Tally, at: int) -> str:
    if tally.calm[0, at] >= OVER_AFTER:
        return f", not since step {tally.until[0, at]:,}"
    if tally.calm[0, at]:
        return f", last at step {tally.until[0, at]:,}"
    if tally.streak[0, at] != tally.since[0, at]:
        return f", and again since step {tally.streak[0, at]:,} up to the last sample"
    return ", up to the last sample"


def _headline(rule: CellRule, role: str) -> str:
    words = ROLE_WORDS.get(role, role)
    return {
        "saturation": f"values of the {words} are cut off",
        "flushed": f"small values of the {words} vanish",
        "low SQNR": f"the {words} is coarser than its format should make it",
        "lost updates": f"updates of the {words} are lost",
    }[rule.name]


def _of_format(spec: Mapping[str, Any]) -> str:
    name = spec.get("format")
    return f" ({name}, {spec.get('granularity', 'granularity unknown')})" if name else ""


def _expectation(spec: Mapping[str, Any]) -> str:
    expected = expected_sqnr_db(spec.get("format"))
    return "" if expected is None else f", where {spec['format']} gives about {expected:.0f} dB"


def _remedy(rule: str, cell: Cell, spec: Mapping[str, Any]) -> str:
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


def _zeros(reader: PrecisionReader) -> list[Finding]:
    tally = reader.tallies["zero"]
    found = []
    for is_dead in (True, False):
        if is_dead:
            chosen = (tally.beyond[0] > 1) & (tally.calm[0] == 0)
        else:
            with np.errstate(invalid="ignore"):
                chosen = (tally.last >= RISEN_TO) & (tally.last < DEAD) & (tally.first < RISEN_FROM)
        cells = np.flatnonzero(chosen).tolist()
        if not cells:
            continue
        cells.sort(key=lambda at: -tally.last[at])
        at = cells[0]
        cell = reader.cells[at]
        more = f" and {len(cells) - 1:,} more" if len(cells) > 1 else ""
        since = int(tally.streak[0, at]) if is_dead else int(tally.worst_step[at])
        if is_dead:
            title = f"{cell.layer}{more}: no gradient arrives"
            text = f"All of its gradient has been exactly zero from step {since:,} up to the last sample."
            remedy = "Dead units, a loss that does not depend on it, or gradients flushed before: look at grad_output."
        else:
            title = f"{cell.layer}{more}: ever more of the gradient is exactly zero"
            text = (
                f"{amount('zero', tally.first[at])} of its gradient was exactly zero in the first sample, "
                f"{amount('zero', tally.last[at])} is in the last."
            )
            remedy = "Look whether grad_output is flushed to zero; a wider or finer-scaled gradient keeps small values."
        layers = [
            _entry(reader, "zero", n, tally.streak[0, n] if is_dead else tally.worst_step[n], tally.last[n])
            for n in cells
        ]
        severity = SERIOUS if is_dead else LOOK
        found.append(
            Finding(severity, "dead gradients", title, text, remedy, since, cell.layer, cell.role, "zero", layers)
        )
    return found


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
