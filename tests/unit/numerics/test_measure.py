from __future__ import annotations

import math

import pytest
import torch

from narrowgauge.numerics import formats, measure, rounding
from narrowgauge.numerics.formats import E4M3FN, E5M2, Format


@pytest.mark.parametrize(("fmt", "low", "high"), [(E4M3FN, 31.0, 32.5), (E5M2, 25.0, 26.5), (formats.BF16, 54.5, 56.5)])
def test_sqnr_of_a_normal_tensor_lies_in_the_formats_window(fmt: Format, low: float, high: float) -> None:
    # uniform error within a spacing of 2^(e-m) gives about 6.02 m + 10 log10(12 E[x^2] / E[2^2e]) = 6.02 m + 13.4 dB
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    scale = torch.tensor(16.0) if fmt.is_narrow else torch.tensor(1.0)
    assert low <= measure.sqnr_db(x, rounding.round_to(x * scale, fmt) / scale) <= high


def test_sqnr_is_exact_for_a_known_error() -> None:
    assert measure.sqnr_db(torch.tensor([10.0, 0.0]), torch.tensor([10.0, 1.0])) == pytest.approx(20.0)
    assert measure.sqnr_db(torch.ones(3), torch.ones(3)) == math.inf


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_sqnr_is_nan_where_a_value_is_not_finite(bad: float) -> None:
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, bad])
    assert math.isnan(measure.sqnr_db(one, other))
    assert math.isnan(measure.sqnr_db(other, one))


def test_saturated_counts_what_lies_beyond_the_maximum_before_the_clamp() -> None:
    x = torch.tensor([448.0, 448.1, -500.0, float("inf"), float("nan"), 0.0])
    assert measure.share_saturated(x, torch.tensor(1.0), E4M3FN) == pytest.approx(3 / 6)
    assert measure.share_saturated(x, torch.tensor(0.5), E4M3FN) == pytest.approx(1 / 6)
    assert measure.share_saturated(torch.empty(0), torch.tensor(1.0), E4M3FN) == 0.0


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, formats.E2M1FN, formats.E3M2FN, formats.E2M3FN, formats.INT8], ids=repr)
def test_flushed_counts_either_zero_but_not_true_zeros(fmt: Format) -> None:
    tiny = fmt.smallest_subnormal / 4
    x = torch.tensor([0.0, -0.0, tiny, -tiny, 1.0, -1.0, fmt.smallest_subnormal, fmt.max])
    assert measure.share_flushed(x, rounding.encode(x, fmt), fmt) == 2 / 8
