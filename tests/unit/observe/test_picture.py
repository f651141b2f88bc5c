"""Drawing: round ticks, points where they belong, words escaped."""

from __future__ import annotations

import re

import pytest

from narrowgauge.observe.picture import LEFT, RIGHT, WIDTH, Chart, Line, extent, line_chart, number, numbers, ticks
from narrowgauge.observe.picture_maps import heat_map, stacked


@pytest.mark.parametrize(
    ("low", "high", "is_log", "expected"),
    [
        (0.0, 10.0, False, [0, 2, 4, 6, 8, 10]),
        (1.93, 2.41, False, [2.0, 2.1, 2.2, 2.3, 2.4]),
        (-0.06, 0.13, False, [-0.05, 0.0, 0.05, 0.1]),
        (0.5, 2e4, True, [1, 10, 100, 1000, 1e4]),
        (2.0, 8.0, True, [2, 4, 6, 8]),
        (3.0, 3.0, False, [3.0]),
    ],
)
def test_ticks_are_round_and_inside(low, high, is_log, expected):
    assert ticks(low, high, is_log) == pytest.approx(expected)


def test_ticks_of_what_no_number_lies_between():
    assert ticks(0.0, 5e-324) == [0.0] and ticks(-1.7e308, 1.7e308) == [-1.7e308]


def test_extents_leave_out_what_cannot_be_drawn():
    nothing = float("nan")
    assert extent([1.0, 3.0, nothing, float("inf")], False) == pytest.approx((0.92, 3.08))
    assert extent([0.0, -1.0, 4.0], True) == pytest.approx((2.0, 8.0))
    assert extent([nothing], True) == (0.1, 10.0) and extent([], False) == (0.0, 1.0)


def test_numbers_are_short():
    assert [number(x) for x in (0.0, 0.05, 1234.5, 2e6, 1e-5)] == ["0", "0.05", "1,234", "2e6", "1e-5"]


def test_a_line_goes_through_its_points_and_is_parted_where_one_is_missing():
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, float("nan")), (4.0, 1.0)]
    drawn = line_chart(Chart("a <title>", "a note", "step", "loss", [Line("a & b", points)]))
    assert "a &lt;title&gt;" in drawn and "a &amp; b" in drawn
    path = re.search(r'style="fill: none" stroke-width="1.8" d="([^"]+)"', drawn)
    assert path is not None
    places = [tuple(map(float, each.split())) for each in re.findall(r"[ML]([\d.]+ [\d.]+)", path[1])]
    assert path[1].count("M") == 2 and len(places) == 3
    assert places[0][0] == LEFT and places[-1][0] == WIDTH - RIGHT and places[0][1] == places[-1][1] > places[1][1]


def test_a_map_says_each_value_and_shortens_long_names_at_their_start():
    drawn = heat_map("map", "", ["x" * 40 + "end"], ["input"], {(0, 0): (3, "12 dB")}, [str(n) for n in range(9)])
    assert ">12 dB<" in drawn and 'class="l3"' in drawn and ">..." in drawn and "end<" in drawn


def test_bars_are_as_long_as_their_sizes():
    drawn = stacked("bytes", "", [("a", {"param": 6.0, "grad": 2.0}), ("b", {"param": 4.0})])
    widths = [float(each) for each in re.findall(r'width="([\d.]+)" height="34"', drawn)]
    assert widths[0] == pytest.approx(3 * widths[1], rel=1e-3) and widths[2] == pytest.approx(2 * widths[1], rel=1e-3)


@pytest.mark.parametrize(("x0", "x1", "said"), [(4, 5, ["4", "5"]), (1000, 1001, ["1,000", "1,001"])])
def test_ticks_of_steps_are_whole_and_no_two_the_same(x0, x1, said):
    drawn = line_chart(Chart("a", "", "step", "loss", [Line("a", [(x0, 1.0), (x1, 2.0)])]))
    assert re.findall(r'y="\d+" text-anchor="middle">([^<]+)<', drawn) == said


def test_numbers_of_an_axis_have_digits_enough():
    assert numbers([100000.0, 120000.0]) == ["1e+05", "1.2e+05"]
    assert numbers([1e6, 2e6]) == ["1e6", "2e6"]
    assert numbers([1000.25, 1000.5]) == ["1,000.2", "1,000.5"]
