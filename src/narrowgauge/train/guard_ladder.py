"""To which cast the guard goes from another: the next wider one for what is lacking.

Each rung answers one fault, so that no more is given up than the fault asks for:

- A scale that does not follow the tensor's largest value (delayed, none, E8M0 rounded down) goes first, whatever was
  measured: the format may do.
- Fewer than 8 bits become E4M3 in the same tiles: the layout stays, mantissa and range grow.
- One scale for more than 32 values becomes one for 32 (OCP MX v1.0): an outlier then costs its neighbours only. The
  scale is a power of two, so that no product rounds twice.
- What still flushes in such blocks needs range: E5M2 has 2^15 times E4M3's.
- Else the operand is left in the compute dtype, as one in FP16 is at once.

Moments: what has fewer than 8 bits, or one scale for a whole tensor, becomes 8 bits on the square-root curve in tiles
of 128 (narrow8's own). From there exp_avg goes to BF16 and FP32, exp_avg_sq to FP32 at once: with beta2 = 0.999 an
update of it is a thousandth, below half a unit in BF16's last place, and it would stand still.
"""

from __future__ import annotations

import dataclasses

from narrowgauge.numerics.formats import BF16, E4M3FN, E5M2, FP32
from narrowgauge.numerics.granularity import Block
from narrowgauge.numerics.scaling import CURRENT, CURRENT_POW2, E8M0_FLOOR, E8M0_RULES, E8M0_UP, NONE, NVFP4
from narrowgauge.recipes.casts import MOMENTS, MX_BLOCK
from narrowgauge.recipes.roles import MOMENT_ROLES
from narrowgauge.recipes.spec import CastSpec

FLUSHED, SATURATED, SQNR_DB = "flushed", "saturated", "sqnr_db"  # measures, as in the journal

Rung = CastSpec | None  # None: an operand is left in the compute dtype


def is_last(role: str, spec: Rung) -> bool:
    """True where there is nothing wider to go to: an operand that is not cast, a moment in FP32."""
    return spec is None or (role in MOMENT_ROLES and spec.format is FP32)


def next_wider(role: str, spec: CastSpec, measure: str) -> Rung:
    """The cast that `role` goes to from `spec`, which is not its last, where `measure` is beyond its limit."""
    return _wider_moment(role, spec) if role in MOMENT_ROLES else _wider_operand(spec, measure)


def words(spec: Rung) -> str:
    """The cast in words."""
    return "the compute dtype" if spec is None else str(spec)


def _wider_operand(spec: CastSpec, measure: str) -> Rung:
    fmt, scale = spec.format, spec.scale
    if not fmt.is_narrow:  # FP16, whose range is what lacks
        return None
    if spec.is_delayed or scale is NONE:
        return dataclasses.replace(spec, scale=CURRENT)
    if scale is E8M0_FLOOR:
        return dataclasses.replace(spec, scale=E8M0_UP)
    if fmt.bits < 8:
        return dataclasses.replace(spec, format=E4M3FN, scale=CURRENT_POW2 if scale is NVFP4 else scale)
    if _is_larger(spec.granularity, MX_BLOCK):
        scale = scale if scale in E8M0_RULES else CURRENT_POW2
        return dataclasses.replace(spec, granularity=Block(1, MX_BLOCK), scale=scale)
    if measure == FLUSHED and fmt is E4M3FN:
        return dataclasses.replace(spec, format=E5M2)
    return None


def _is_larger(tile: Block, values: int) -> bool:
    return tile.rows is None or tile.columns is None or tile.rows * tile.columns > values


def _wider_moment(role: str, spec: CastSpec) -> CastSpec:
    companded = MOMENTS[8][MOMENT_ROLES.index(role)]
    if spec.format.is_narrow and spec != companded:
        return companded
    return CastSpec(BF16) if role == "exp_avg" and spec.format.is_narrow else CastSpec(FP32)
