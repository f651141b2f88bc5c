"""Costs from measurements: closed forms, and that noisy loss changes drawn together come nearer to the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest

from narrowgauge.tune.estimate import Estimate, Estimates, shrunk, whole
from narrowgauge.tune.measure import Effect, Measured


def measured(changes: dict[str, list[float]], errors: float = 0.0) -> Measured:
    """Of one choice, "narrow"."""
    effects = {
        (layer, "narrow"): Effect(list(values), [errors] * len(values), [0.0] * len(values))
        for layer, values in changes.items()
    }
    return Measured(effects, {"narrow": Effect()}, [1.0])


def test_a_cost_is_the_loss_change_and_the_steps_lost() -> None:
    effect = Effect([0.02, 0.04], [0.10, 0.30], [0.0, 0.0])
    # 0.02 + 0.025 and 0.04 + 0.075: mean 0.08, standard deviation 0.07 / sqrt(2), error 0.035
    assert whole(effect, 0.5) == Estimate(pytest.approx(0.08), pytest.approx(0.035))
    assert math.isnan(whole(Effect([0.02], [0.1], [0.0]), 0.5).error)


def test_a_loss_that_fell_earns_nothing_when_choosing_and_counts_in_a_sum() -> None:
    found = Estimates(measured({"a": [-0.02, -0.04], "b": [0.03, 0.05]}, errors=0.1))
    assert found.cost("a", "narrow", 0.5).value == pytest.approx(0.025)
    assert found.cost("b", "narrow", 0.5).value == pytest.approx(0.04 + 0.025)
    assert found.cost("a", "wide", 0.5) == found.expected({"a": "wide", "b": "wide"}, 0.5) == Estimate(0, 0)
    both = found.expected({"a": "narrow", "b": "narrow"}, 0.2)
    assert both == Estimate(pytest.approx(0.01 + 2 * 0.01), pytest.approx(0.0, abs=1e-12))  # the same in both batches
    assert found.expected({"a": "narrow", "b": "wide"}, 0.2).value == pytest.approx(-0.03 + 0.01)


def test_the_share_that_is_drawn_together_by_hand() -> None:
    # means 1, 2, 3, 4, 10, 4: their mean 4, S = 9 + 4 + 1 + 36 = 50; each layer's two batches lie 2 d apart, about
    # their mean, in pairs of opposite sign, so that all layers have nothing in common: variance 2 d^2
    means, d = [1.0, 2.0, 3.0, 4.0, 10.0, 4.0], 2.0
    changes = {str(at): [mean - d * (-1) ** at, mean + d * (-1) ** at] for at, mean in enumerate(means)}
    kept = 1 - (6 - 3) * (6 * 2 * d**2 / (2 * 5)) / 50
    assert 0 < kept < 1
    found = shrunk(changes)
    for at, mean in enumerate(means):
        assert sum(found[str(at)]) / 2 == pytest.approx(4 + kept * (mean - 4))
    assert sum(map(sum, found.values())) == pytest.approx(2 * sum(means))
    drawn = shrunk({name: [4 + 50 * (each - 4) for each in values] for name, values in changes.items()})
    assert drawn["4"] == pytest.approx([4 + kept * 50 * (each - 4) for each in changes["4"]])  # of any size


def test_what_all_layers_have_in_common_is_no_noise_of_theirs() -> None:
    apart = {str(at): [at - 0.1, at + 0.1] if at % 2 else [at + 0.1, at - 0.1] for at in range(6)}
    together = {name: [first + 7.0, second - 7.0] for name, (first, second) in apart.items()}
    for name, values in shrunk(apart).items():
        assert shrunk(together)[name] == pytest.approx([values[0] + 7, values[1] - 7])


def test_pure_noise_becomes_its_mean_and_few_layers_stay() -> None:
    noise = {str(at): [1.0, -1.0] if at % 2 else [-1.0, 1.0001] for at in range(8)}
    assert all(sum(values) / 2 == pytest.approx(0.000025) for values in shrunk(noise).values())
    few = {"a": [1.0, -1.0], "b": [0.5, 0.2], "c": [0.0, 0.1]}
    assert shrunk(few) == few
    same = dict.fromkeys("abcd", [0.25, 0.25])
    assert shrunk(same) == same


def test_layers_that_are_not_finite_take_no_part() -> None:
    good = {str(at): [float(at), at + (-1.0) ** at] for at in range(5)}
    bad = {"bad": [0.0, math.nan]}
    found = shrunk(good | bad)
    assert {name: found[name] for name in good} == shrunk(good) and math.isnan(found["bad"][1])
    estimates = Estimates(measured(good | bad))
    assert estimates.cost("bad", "narrow", 1.0).value == math.inf
    assert estimates.expected({"0": "narrow", "bad": "narrow"}, 1.0).value == math.inf
    assert math.isfinite(estimates.expected({"0": "narrow", "bad": "wide"}, 1.0).value)


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
def test_estimates_are_nearer_to_the_truth_and_their_sum_is_not_biased(spread: float) -> None:
    """Noise of one unit in each batch, eight batches, sixteen layers, truths of so much spread, 400 times."""
    random = np.random.default_rng(0)
    raw, drawn, sums = 0.0, 0.0, []
    for _ in range(400):
        truth = random.gamma(1.0, spread, 16) if spread else np.zeros(16)
        changes = truth[:, None] + random.normal(0, 1, (16, 8))
        found = shrunk({str(at): row.tolist() for at, row in enumerate(changes)})
        means = np.array([np.mean(found[str(at)]) for at in range(16)])
        raw += float(((changes.mean(1) - truth) ** 2).sum())
        drawn += float(((means - truth) ** 2).sum())
        sums.append(float(means.sum() - truth.sum()))
    assert raw / 400 == pytest.approx(16 / 8, rel=0.1)
    assert drawn < raw * {0.0: 0.25, 0.3: 0.75, 3.0: 1.0}[spread]
    assert abs(np.mean(sums)) < 3 * np.std(sums) / math.sqrt(400)
