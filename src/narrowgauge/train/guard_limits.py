"""Whether what a sampled step measured of one role is beyond the guard's limits, inside them, or well inside."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from narrowgauge.numerics.companding import LINEAR
from narrowgauge.recipes.spec import MOMENT_ROLES, CastSpec
from narrowgauge.train.guard_ladder import FLUSHED, SATURATED, SQNR_DB
from narrowgauge.train.sections import LimitsConfig

# of normally distributed values: 31.5 dB in E4M3, 25.6 in E5M2 and E3M2, about 20 in E2M1: 6.02 for each mantissa bit,
# which halves the step, as docs/guard.md measures them
NORMAL_DB, DB_A_BIT = 13.5, 6.02
# well inside: the hysteresis between what is left alone and what may become narrower again
CALM_SHARE, CALM_DROP = 0.1, 0.5
_MANTISSA_OF_INTEGERS = {8: 3, 4: 1}  # integers are held to what floating formats of their size do


class Verdict(StrEnum):
    """What the samples say. CALM is a part of inside: far enough from every limit to try less."""

    TROUBLE = "trouble"
    INSIDE = "inside"
    CALM = "calm"


class Finding(NamedTuple):
    """A verdict, and the measure that is nearest to its limit or furthest beyond, with value and limit."""

    verdict: Verdict
    measure: str
    value: float
    limit: float


def normal_db(spec: CastSpec) -> float:
    """The SQNR in decibels that the cast of normally distributed values has, at its best scale."""
    fmt = spec.format
    bits = _MANTISSA_OF_INTEGERS.get(fmt.bits, fmt.bits - 2) if fmt.is_integer else fmt.mantissa_bits
    return NORMAL_DB + DB_A_BIT * bits


def judge(role: str, spec: CastSpec, measures: Mapping[str, float], limits: LimitsConfig) -> Finding | None:
    """What the measures of one cast say; None where none of them is judged.

    spec: of the cast in force. Saturation is judged where the scale does not follow from the tensor at hand: else it is
    the scale's own rounding, by an eighth at most. Flushing of operands is judged in formats of 8 bits and more: E2M1
    makes zeros of a tenth of normally distributed values, and of more where tails are longer, which the SQNR weighs.
    The SQNR is judged where values are not companded: a curve has no fixed share of error.
    """
    may_flush = spec.format.bits >= 8 or role in MOMENT_ROLES
    may_saturate = spec.is_delayed or not spec.is_scaled
    found: list[tuple[float, Finding]] = []
    for measure, limit in ((SATURATED, limits.saturated), (FLUSHED, limits.flushed)):
        if not (may_flush if measure == FLUSHED else may_saturate):
            continue
        value = measures.get(measure)
        if value is None or limit >= 1:
            continue
        verdict = Verdict.TROUBLE if value > limit else Verdict.CALM if value <= limit * CALM_SHARE else Verdict.INSIDE
        found.append((value / limit if limit else float(value > 0) * 2, Finding(verdict, measure, value, limit)))
    sqnr_db = measures.get(SQNR_DB)
    if sqnr_db is not None and spec.companding is LINEAR and spec.format.is_narrow:
        drop = normal_db(spec) - sqnr_db
        share = drop / limits.sqnr_drop_db
        verdict = Verdict.TROUBLE if share > 1 else Verdict.CALM if share <= CALM_DROP else Verdict.INSIDE
        found.append((share, Finding(verdict, SQNR_DB, sqnr_db, normal_db(spec) - limits.sqnr_drop_db)))
    if not found:
        return None
    order = [Verdict.CALM, Verdict.INSIDE, Verdict.TROUBLE]
    # of what is in trouble the shares come first: they say what is lacking, the SQNR only that something is
    return max(found, key=lambda each: (order.index(each[1].verdict), each[1].measure != SQNR_DB, each[0]))[1]
