"""Long series in few bins: no extreme is lost, whatever their number, and codes read back within their step."""

from __future__ import annotations

import math

import numpy as np
import pytest

from narrowgauge.observe.report_bins import FEWEST, Bins, coded, packed, shrunk, shrunk_steps
from narrowgauge.observe.report_figures import decoded, unpacked


@pytest.mark.parametrize("samples", [1, 2, 7, 8, 9, 31, 1000, 1001])
def test_every_bin_holds_the_extremes_of_its_own_samples(samples):
    values = np.random.default_rng(0).normal(size=(samples, 3)).astype(np.float32)
    bins = Bins(capacity=8)
    for at, row in enumerate(values):
        bins.add(10 * at + 10, {"amax": row})
    assert bins.count <= 8 and bins.samples == samples
    first, last = bins.first[: bins.count], bins.last[: bins.count]
    assert first[0] == 10 and last[-1] == 10 * samples and (first[1:] == last[:-1] + 10).all()
    for at in range(bins.count):
        inside = values[(first[at] - 10) // 10 : last[at] // 10]
        assert np.array_equal(bins.low("amax")[:, at], inside.min(axis=0))
        assert np.array_equal(bins.high("amax")[:, at], inside.max(axis=0))


def test_series_and_measures_that_come_later_have_no_value_before():
    bins = Bins(capacity=4)
    bins.add(1, {"amax": [1.0]})
    bins.add(2, {"amax": [2.0, 5.0], "lost": [math.nan, 0.5]})
    assert bins.series == 2 and bins.measures() == ["amax", "lost"]
    assert np.array_equal(bins.low("amax"), np.array([[1, 2], [math.nan, 5]], np.float32), equal_nan=True)
    assert np.array_equal(bins.high("lost"), np.array([[math.nan] * 2, [math.nan, 0.5]], np.float32), equal_nan=True)


def test_memory_stays_within_its_budget_and_keeps_the_extremes():
    bins = Bins(capacity=512, budget_bytes=1 << 20)  # 1,000 series x 512 bins x 8 bytes would be 4 MB
    for at in range(1200):
        row = np.zeros(1000, np.float32)
        row[at % 1000] = at + 1
        bins.add(at, {"amax": row})
    assert FEWEST <= bins.capacity <= 128
    assert sum(held.nbytes for table in (bins._low, bins._high) for held in table.values()) <= 1 << 20
    assert np.array_equal(bins.high("amax").max(axis=1)[200:], np.arange(201, 1001, dtype=np.float32))


@pytest.mark.parametrize("count", [1, 5, 64, 65, 1000])
def test_shrinking_keeps_extremes_and_steps(count):
    low = np.random.default_rng(1).normal(size=(2, count)).astype(np.float32)
    high = low + 1
    first = np.arange(count) * 10
    fewer, more = shrunk(low, high, 64)
    begin, end = shrunk_steps(first, first + 9, 64)
    assert fewer.shape[1] == len(begin) == len(end) <= 64
    assert np.array_equal(fewer.min(axis=1), low.min(axis=1)) and np.array_equal(more.max(axis=1), high.max(axis=1))
    assert begin[0] == 0 and end[-1] == first[-1] + 9 and (begin[1:] == end[:-1] + 1).all()


def test_codes_read_back_within_half_a_step():
    values = np.array([[1e-30, 3.5, 0.0, math.nan], [math.inf, 2.0, 2.0, 2.0]], np.float32)
    found = decoded({"cells": packed(np.array([4, 9], np.uint32)), **coded(values, values, True)})
    assert list(found) == [4, 9]
    half_step = math.log2(3.5 / 1e-30) / 65500 / 2
    assert np.allclose(np.log2(found[4][:2, 0]), np.log2(values[0, :2].astype(float)), rtol=0, atol=half_step * 1.01)
    assert found[4][2, 1] == 0.0 and np.isnan(found[4][3]).all()
    assert found[9][0, 0] == math.inf and (found[9][1:] == 2.0).all()


def test_linear_codes_hold_decibels_and_both_infinities():
    values = np.array([[-20.0, 31.25, math.inf, -math.inf]], np.float32)
    found = decoded({"cells": packed(np.array([0], np.uint32)), **coded(values, values, False)})[0][:, 0]
    assert np.allclose(found[:2], [-20, 31.25], atol=51.25 / 65500 / 2 * 1.01)
    assert found[2] == math.inf and found[3] == -math.inf


def test_packed_arrays_are_little_endian():
    assert packed(np.array([1, 258], np.uint16)) == {"type": "u16", "base64": "AQACAQ=="}
    assert unpacked(packed(np.array([1.5], np.float32))).tolist() == [1.5]
