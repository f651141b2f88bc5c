"""The band around a run's losses, against sums by hand: median, spread, floor, and what it does not follow."""

from __future__ import annotations

import math

import pytest

from narrowgauge.observe.loss_band import RobustBand

SD = 1.4826  # standard deviations of a normal distribution in a median absolute deviation


def test_the_end_is_the_median_and_so_many_spreads_or_the_floor() -> None:
    band = RobustBand(window=4, spreads=10.0, floor=1.5)
    assert band.end == math.inf
    ends = []
    for loss in (1.0, 2.0, 4.0, 3.0):
        band.add(loss)
        ends.append(band.end)
    # medians 1, 1.5, 2, 2.5; deviations from them 0 | 0.5 0.5 | 1 0 2 | 1.5 0.5 1.5 0.5
    assert ends == pytest.approx([1.0 + 1.5, 1.5 + 10 * SD * 0.5, 2.0 + 10 * SD * 1.0, 2.5 + 10 * SD * 1.0], rel=1e-12)
    assert band.outside == 0


def test_losses_so_far_make_a_band_until_a_window_is_full_and_then_only_lower_ones() -> None:
    band = RobustBand(window=3, spreads=0.0, floor=1.0)
    ends = []
    for loss in (5.0, 5.5, 6.0, 6.25, 6.5, 6.5, 6.5, 5.0, 4.5, 4.5):
        band.add(loss)
        ends.append(band.end)
    # medians 5, 5.25, 5.5 | 6, 6.25, ... are higher than that of the first whole window; 5, at last, is not
    assert ends == [6.0, 6.25, 6.5, 6.5, 6.5, 6.5, 6.5, 6.5, 6.0, 5.5]


def test_a_loss_outside_is_counted_in_a_row_and_enters_no_window() -> None:
    band = RobustBand(window=5, spreads=0.0, floor=1.0)
    found = []
    for loss in (3.0, 50.0, math.nan, math.inf, -math.inf, 4.0, 4.0, 4.5):
        band.add(loss)
        found.append((band.end, band.outside))
    # the end itself is inside
    assert found == [(4.0, 0), (4.0, 1), (4.0, 2), (4.0, 3), (4.0, 4), (4.5, 0), (5.0, 0), (5.0, 0)]
