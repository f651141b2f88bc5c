"""What a cast of a sampled step did to its operand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from narrowgauge.numerics import scaling
from narrowgauge.numerics.tally import Tally

if TYPE_CHECKING:
    from narrowgauge.ops.operands import Cast


def counts(x: Tensor, saturated: int | Tensor | None, flushed: int | Tensor | None) -> Tally:
    """The tally of a cast that has only its counts yet."""
    tally = Tally()
    tally.add(
        values=x.numel(), saturated=0 if saturated is None else saturated, flushed=0 if flushed is None else flushed
    )
    return tally


def complete(done: Cast, x: Tensor, has_bins: bool) -> None:
    """Complete the tally of a cast of the values `x`: the cast's error, magnitudes, scales, and exponents."""
    tally = done.tally
    assert tally is not None
    tally.raise_to(amax=done.amax, scale=_largest_scale(done))
    tally.add_error(x, done.unscaled(), done.dequant_scale)
    tally.has_bins = has_bins
    tally.add_bins(x)


def _largest_scale(done: Cast) -> Tensor | None:
    """The largest dequantization scale of the tiles, or that of the tensor; None: there is none."""
    if done.block_scale is None or not done.block_scale.numel():
        return done.dequant_scale
    largest = scaling.block_factors(done.block_scale).max()
    return largest if done.dequant_scale is None else largest * done.dequant_scale
