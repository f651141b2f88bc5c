"""Learning rate and the band of the loss."""

from __future__ import annotations

import math

import pytest

from narrowgauge.errors import DivergenceError
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.divergence import LossBand
from narrowgauge.train.schedule import learning_rate
from narrowgauge.train.sections import DivergenceConfig, ScheduleConfig
from narrowgauge.train.watch import Watch


def test_rate_rises_in_equal_parts_to_the_peak_and_ends_at_the_final_fraction() -> None:
    schedule = ScheduleConfig(warmup_steps=4, final_fraction=0.1)
    rates = [learning_rate(step, 20, 2e-3, schedule) for step in range(20)]
    assert rates[:4] == pytest.approx([0.5e-3, 1e-3, 1.5e-3, 2e-3])
    assert rates[4] == 2e-3
    assert rates[-1] == pytest.approx(2e-4)
    assert all(later < earlier for earlier, later in zip(rates[4:], rates[5:], strict=False))


@pytest.mark.parametrize(("steps", "warmup_steps"), [(1, 0), (1, 5), (2, 1), (3, 3), (10, 100)])
def test_rate_stays_within_bounds_for_short_runs(steps: int, warmup_steps: int) -> None:
    schedule = ScheduleConfig(warmup_steps=warmup_steps, final_fraction=0.0)
    for step in range(steps):
        assert 0 <= learning_rate(step, steps, 1.0, schedule) <= 1


def falling_noise(step: int) -> float:
    return 2 + 3 * math.exp(-step / 30) + 0.2 * math.sin(step * 12.9898)


def explodes_at(band: LossBand, losses: list[float]) -> int | None:
    """Index of the loss at which the band says that the run has exploded."""
    for index, loss in enumerate(losses):
        band.add(loss)
        if band.has_exploded:
            return index
    return None


FALLING = [falling_noise(step) for step in range(100)]


def test_a_noisy_falling_loss_stays_inside() -> None:
    assert explodes_at(LossBand(DivergenceConfig()), [falling_noise(step) for step in range(400)]) is None


def test_a_spike_shorter_than_the_patience_is_forgiven() -> None:
    losses = FALLING + [50.0, math.nan, 60.0, math.inf] + [2.0] * 10
    assert explodes_at(LossBand(DivergenceConfig(patience=5)), losses) is None


@pytest.mark.parametrize("bad", [9.0, math.nan, math.inf])
def test_an_exploded_loss_stops_at_the_patience(bad: float) -> None:
    assert explodes_at(LossBand(DivergenceConfig(patience=5)), FALLING + [bad] * 10) == 104


def test_a_loss_that_explodes_from_the_start_stops_too() -> None:
    losses = [6.0, 6.1, 5.9] + [10.0 + step for step in range(30)]
    assert explodes_at(LossBand(DivergenceConfig(patience=5)), losses) == 7


def test_a_creeping_rise_does_not_carry_the_band_along() -> None:
    band = LossBand(DivergenceConfig(window=16, patience=5, floor=1.0, spreads=5))
    found = explodes_at(band, [3.0] * 32 + [3.0 + 0.02 * step for step in range(400)])
    assert found is not None and found <= 32 + 1.0 / 0.02 + 5 + 1


def test_a_disabled_band_takes_everything() -> None:
    assert explodes_at(LossBand(DivergenceConfig(enabled=False)), [2.0] * 50 + [math.nan] * 50) is None


def test_the_message_says_what_where_and_what_to_change() -> None:
    watch = Watch(TrainConfig(divergence=DivergenceConfig(patience=2)))
    for step, loss in enumerate([2.0] * 40 + [90.0] * 2, start=1):
        watch.note(step, loss, skipped=False)
    with pytest.raises(DivergenceError, match=r"90 at step 42.*optimizer\.lr"):
        watch.check("", 1.0)


def test_skips_in_a_row_stop_the_run_and_name_the_parameter() -> None:
    watch = Watch(TrainConfig(max_skips=3))
    for step, skipped in enumerate([True, True, False, True, True], start=1):
        watch.note(step, math.nan, skipped)
    watch.check("head.weight", 2.0)
    watch.note(6, math.nan, True)
    with pytest.raises(DivergenceError, match=r"3 steps in a row.*step 6.*'head\.weight'"):
        watch.check("head.weight", 2.0)
    assert watch.skipped_steps == 5
