"""Tallies add up over casts and processes, and their measures are those of the whole."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from narrowgauge.numerics.measure import sqnr_db
from narrowgauge.numerics.tally import Figures, Tally, pieces


def tally_of(x: Tensor, approximation: Tensor) -> Tally:
    tally = Tally(has_bins=True)
    tally.add(values=x.numel(), flushed=((x != 0) & (approximation == 0)).sum())
    tally.raise_to(amax=x.abs().max(), scale=None)
    tally.add_error(x, approximation)
    tally.add_bins(x)
    return tally


def test_parts_have_the_measures_of_the_whole_whether_they_meet_on_the_device_or_later() -> None:
    x = torch.randn(64, 32) * torch.logspace(-9, 3, 64)[:, None]
    x[5, ::2] = x[20, ::4] = 0
    approximation = x.bfloat16().float()
    approximation[0] = 0
    whole = tally_of(x, approximation).read()
    parts = [tally_of(x[rows], approximation[rows]) for rows in (slice(0, 10), slice(10, 64))]
    later = parts[0].read().merged(parts[1].read())
    parts[0].take(parts[1])
    for found in (later, parts[0].read()):
        assert found.measures() == pytest.approx(whole.measures(), rel=1e-12)
        assert (found.bins, found.zeros) == (whole.bins, whole.zeros)
    assert whole.zeros == 16 + 8
    measures = whole.measures()
    assert measures["sqnr_db"] == pytest.approx(sqnr_db(x, approximation), abs=1e-9)
    assert measures["flushed"] == 32 / 2048 and measures["amax"] == x.abs().max().item() and "scale" not in measures


def test_figures_with_counts_and_those_without_are_merged_either_way() -> None:
    bare, counted = Figures({"values": 2.0}, {"amax": 1.0}), Figures({"values": 3.0, "lost": 1.0}, {}, [1, 0, 2], 4)
    for found in (bare.merged(counted), counted.merged(bare)):
        assert found == Figures({"values": 5.0, "lost": 1.0}, {"amax": 1.0}, [1, 0, 2], 4)
    assert counted.merged(counted) == Figures({"values": 6.0, "lost": 2.0}, {}, [2, 0, 4], 8)
    assert bare.merged(bare) == Figures({"values": 4.0}, {"amax": 1.0})


def test_what_is_not_known_has_no_measure() -> None:
    assert Tally().read().measures() == {}
    tally = Tally()
    tally.add(updates=0, lost=0)
    assert tally.read().measures() == {}  # a share of nothing
    tally.add_error(torch.ones(3), torch.tensor([1.0, math.inf, 1.0]))
    assert "sqnr_db" not in tally.read().measures()


def test_an_exact_cast_has_infinite_sqnr_and_one_that_loses_all_has_zero_db() -> None:
    exact, lost = Tally(), Tally()
    exact.add_error(torch.ones(3), torch.ones(3))
    lost.add_error(torch.full((3,), 1e-30), torch.zeros(3))  # whose squares are no float32 numbers
    assert exact.read().measures() == {"sqnr_db": math.inf}
    assert lost.read().measures() == {"sqnr_db": 0.0}
    from_nothing = Tally()
    from_nothing.add_error(torch.zeros(3), torch.ones(3))
    assert from_nothing.read().measures() == {"sqnr_db": -math.inf}


def test_a_factor_is_of_the_approximation() -> None:
    tally = Tally()
    tally.add_error(torch.tensor([1.0, 2.0, 3.0]), torch.ones(3), torch.tensor(2.0))
    assert tally.read().sums == {"signal": 14.0, "noise": 2.0}  # 2, 2, 2 in place of 1, 2, 3


@pytest.mark.parametrize("numel", [0, 1, 1 << 15, (1 << 15) + 1, 100_000])
def test_the_error_is_that_of_every_value_of_a_large_tensor(numel: int) -> None:
    x = torch.zeros(numel)
    x[-1:] = 3.0  # in the last piece, whatever its length
    tally = Tally()
    tally.add_error(x, torch.zeros(numel))
    assert tally.read().sums == ({"signal": 9.0, "noise": 9.0} if numel else {})
    assert torch.equal(torch.cat([x[part] for part in pieces(x)] or [x]), x)


def test_a_nan_among_maxima_stays() -> None:
    figures = [Figures({}, {"amax": value}) for value in (math.nan, 1.0)]
    assert math.isnan(figures[0].merged(figures[1]).maxima["amax"])
    assert math.isnan(figures[1].merged(figures[0]).maxima["amax"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_counted_by_the_floor_of_their_logarithm(dtype: torch.dtype) -> None:
    values = [0.0, -0.0, 1.0, -1.5, 1.99, 2.0, 0.25, 2.0**-126, 1.5 * 2.0**-130, 2.0**-133, 3e38, math.inf, math.nan]
    x = torch.tensor(values, dtype=dtype)
    tally = Tally(has_bins=True)
    tally.add_bins(x)
    histogram = tally.read().histogram()
    assert histogram is not None
    expected: dict[int, int] = {}
    for value in x.double().tolist():
        if value and math.isfinite(value):
            exponent = math.frexp(value)[1] - 1
            expected[exponent] = expected.get(exponent, 0) + 1
    low, counts = histogram["low"], histogram["counts"]
    assert isinstance(low, int) and isinstance(counts, list)
    assert {low + i: n for i, n in enumerate(counts) if n} == expected and histogram["zeros"] == 2
    assert low == -133 and len(counts) == 127 + 133 + 1


def test_a_histogram_of_zeros_is_empty() -> None:
    tally = Tally(has_bins=True)
    tally.add_bins(torch.zeros(5))
    assert tally.read().histogram() == {"low": 0, "counts": [], "zeros": 5}
    assert Tally().read().histogram() is None
