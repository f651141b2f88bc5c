"""When a layer needs attention: rules with thresholds for what was measured of each layer and role."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from narrowgauge.observe.report_precision import Cell, PrecisionReader, Tally
from narrowgauge.observe.report_words import (
    amount,
    best_sqnr_db,
    expectation,
    headline,
    is_stochastic,
    of_format,
    remedy,
)  # fmt: skip

SERIOUS, LOOK, NOTE = "serious", "look", "note"
SEVERITIES = (SERIOUS, LOOK, NOTE)
OVER_AFTER = 3  # calm samples after which a trouble is over
HARMLESS_DB = 3.0  # below what the format gives: what was flushed is little of the whole
UNKNOWN_SQNR_DB = 25.0  # what a format that is no floating-point format is judged against


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
# a second moment of zero divides the update by nothing; a first moment of zero makes a step of nothing, as it should
FLUSHED_MOMENTS = {"exp_avg": (math.nan, math.nan), "exp_avg_sq": (1e-3, 1e-2)}
DEAD, RISEN_FROM, RISEN_TO = 1.0, 0.25, 0.5  # shares of exact zeros in a gradient


def cell_tallies(spec_of: Callable[[Cell], Mapping[str, Any]]) -> dict[str, Tally]:
    """A tally for each measure that a rule looks at. spec_of: the format of a cell, as a journal's header has it."""
    found = {rule.measure: Tally(_limits_of(rule, spec_of), 2, rule.worst_is_low) for rule in RULES}
    return found | {"zero": Tally(lambda cell: (DEAD,), 1)}


def _limits_of(rule: CellRule, spec_of: Callable[[Cell], Mapping[str, Any]]) -> Callable[[Cell], tuple[float, ...]]:
    def limits(cell: Cell) -> tuple[float, ...]:
        if rule.name == "lost updates" and is_stochastic(spec_of(cell)):
            return math.nan, math.nan
        if rule.name == "flushed":
            return FLUSHED_MOMENTS.get(cell.role, (rule.look, rule.serious))
        if not rule.relative:
            return rule.look, rule.serious
        given = best_sqnr_db(spec_of(cell))
        given = UNKNOWN_SQNR_DB if given is None else given
        return given + rule.look, given + rule.serious

    return limits


def thresholds() -> list[str]:
    """What the rules look for, in words, in the order in which they are tried."""
    return [
        "saturation: 0.1 % of a tensor's values or more cut off at the format's largest; from 1 % on it is serious",
        "flushed: 10 % or more of the values that are not zero became zero in the cast, of second moments 0.1 %; from "
        "50 % and 1 % on it is serious; first moments are not judged",
        f"both count less where the SQNR stays within {HARMLESS_DB:.0f} dB of what the format gives: flushed a step, "
        "and saturation, if the scale is not a delayed one, is a note",
        "low SQNR: 10 dB or more below what the format gives (6.02 dB for each mantissa bit, and 14.1); from 20 dB on "
        f"it is serious; integers and unknown formats are judged against {UNKNOWN_SQNR_DB:.0f} dB",
        "lost updates: 25 % or more of a parameter's updates changed no bit of it; from 75 % on it is serious; of "
        "parameters that are rounded stochastically they arrive in the mean, and are not judged",
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
        if _is_harmless(rule, reader, at, specs):
            severity = NOTE if severity != SERIOUS or rule.name == "saturation" else LOOK
        groups.setdefault((severity, reader.cells[at].role), []).append(at)
    found = []
    for (severity, role), cells in groups.items():
        cells.sort(key=lambda at: tally.worst[at], reverse=not rule.worst_is_low)
        found.append(_finding(rule, severity, role, cells, reader, specs))
    return found


def _severity(tally: Tally, at: int) -> str:
    if tally.beyond[1, at] and tally.calm[1, at] < OVER_AFTER:
        return SERIOUS
    return LOOK if tally.beyond[1, at] or tally.calm[0, at] < OVER_AFTER else NOTE


def _is_harmless(rule: CellRule, reader: PrecisionReader, at: int, specs: Mapping[Cell, Mapping[str, Any]]) -> bool:
    """True where what was flushed, or cut off by a scale of the values' own, is little of the whole.

    The cell's SQNR says so: it never lay clearly below what the format gives. A delayed scale that is too small once
    may be far too small the next time.
    """
    spec = specs.get(reader.cells[at], {})
    is_own = bool(spec.get("scale")) and "delayed" not in str(spec["scale"]).lower()
    if rule.name != "flushed" and not (rule.name == "saturation" and is_own):
        return False
    expected = best_sqnr_db(spec)
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
        said = f"{worst} of {rule.what}{expectation(spec)}, worst"
    else:
        said = f"{'Up to ' if tally.beyond[0, at] > 1 else ''}{worst} {rule.what}{of_format(spec)}, worst"
    text = (
        f"{said} at step {tally.worst_step[at]:,}; first at step {since:,}, in {tally.beyond[0, at]:,} of "
        f"{tally.samples[at]:,} sampled steps{_ending(tally, at)}."
    )
    if _is_harmless(rule, reader, at, specs):
        sqnr = amount("sqnr_db", reader.tallies["sqnr_db"].worst[at])
        text += f" They are little of the whole: its SQNR was {sqnr} at worst, near the best of its format."
    more = f" and {len(cells) - 1:,} more" if len(cells) > 1 else ""
    return Finding(
        severity, rule.name, f"{cell.layer}{more}: {headline(rule.name, role)}", text,
        remedy(rule.name, cell, spec), since, cell.layer, role, rule.measure,
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
