"""PPO's formulas against slow twins and closed forms, and what its settings refuse."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.errors import ConfigError
from narrowgauge.train.ppo_config import PPOConfig
from narrowgauge.train.ppo_losses import (
    adapted_coefficient,
    advantages_and_returns,
    explained_variance,
    policy_loss,
    value_loss,
    whitened,
)


@pytest.fixture(autouse=True)
def small_and_seeded(one_thread: None, seeded: None) -> None:
    """Applies to every test of this file."""


def gae_of_one(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = sum over l of (gamma lam)^l delta_{t+l}, as the paper's equation 16 has it."""
    padded = [*values, 0.0]
    deltas = [r + gamma * padded[t + 1] - padded[t] for t, r in enumerate(rewards)]
    return [
        sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))
    ]  # fmt: skip


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=4),
    st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_advantages_are_those_of_the_scalar_twin(spans, gamma: float, lam: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(len(spans), 9, generator=generator) for _ in range(2))
    mask = torch.zeros(len(spans), 9, dtype=torch.bool)
    for i, (start, length) in enumerate(spans):
        mask[i, start : start + length] = True
    advantages, returns = advantages_and_returns(
        rewards.masked_fill(~mask, math.nan), values.masked_fill(~mask, math.nan), mask, gamma, lam
    )
    for i, (start, length) in enumerate(spans):
        own = slice(start, start + length)
        expected = gae_of_one(rewards[i, own].tolist(), values[i, own].tolist(), gamma, lam)
        assert advantages[i, own].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert returns[i, own].tolist() == pytest.approx(
            [a + v for a, v in zip(expected, values[i, own].tolist(), strict=True)], rel=1e-4, abs=1e-5
        )
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()


def test_advantages_at_the_ends_of_lambda() -> None:
    rewards, values = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0.5, 1.5, -1.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    # lam 0: r + gamma V' - V; lam 1: discounted sum of rewards - V
    assert advantages_and_returns(rewards, values, mask, 0.5, 0.0)[0].tolist() == [[1.25, 0.0, 5.0]]
    assert advantages_and_returns(rewards, values, mask, 0.5, 1.0)[1].tolist() == [[3.0, 4.0, 4.0]]


def test_whitening_is_over_what_counts_in_all_parts_together() -> None:
    parts, masks = [torch.randn(3, 5) * 4 + 7, torch.randn(2, 8) - 3], [torch.rand(3, 5) < 0.6, torch.rand(2, 8) < 0.6]
    found = whitened(parts, masks)
    counted = torch.cat([p[m] for p, m in zip(parts, masks, strict=True)]).double()
    together = torch.cat([f[m] for f, m in zip(found, masks, strict=True)]).double()
    torch.testing.assert_close(together, (counted - counted.mean()) / counted.std(unbiased=False), rtol=1e-5, atol=1e-5)
    assert all((f[~m] == 0).all() for f, m in zip(found, masks, strict=True))
    one = [torch.tensor([[3.0, 1.0]])]
    assert whitened(one, [torch.tensor([[True, False]])])[0] is one[0]
    assert whitened([], []) == []
    same = whitened([torch.full((1, 4), 2.0)], [torch.ones(1, 4, dtype=torch.bool)])[0]
    assert (same == 0).all()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.1, 2.0, -2.2, -2.0, False),
        (1.5, 2.0, -2.4, 0.0, True),  # held at 1.2
        (0.5, 2.0, -1.0, -2.0, False),
        (1.5, -2.0, 3.0, 2.0, False),
        (0.5, -2.0, 1.6, 0.0, True),  # held at 0.8
    ],
)
def test_policy_loss_by_closed_form(ratio, advantage, loss, slope, clipped) -> None:
    ratios = torch.tensor([[ratio, math.nan]]).requires_grad_()
    mask = torch.tensor([[True, False]])
    found = policy_loss(ratios, torch.tensor([[advantage, math.nan]]), mask, 0.2, tokens=4.0)
    assert float(found.loss.detach()) == pytest.approx(loss / 4)
    assert int(found.clipped) == clipped
    assert float(found.kl) == pytest.approx(ratio - 1 - math.log(ratio), rel=1e-4)
    (grad,) = torch.autograd.grad(found.loss, ratios)
    assert grad.tolist() == [[pytest.approx(slope / 4), 0.0]]
    half = policy_loss(ratios.detach(), torch.tensor([[advantage, 0.0]]), mask, 0.2, 4.0, torch.tensor([[0.5, 9.0]]))
    assert float(half.loss) == pytest.approx(loss / 8)


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope", "clipped"),
    [
        (1.1, 1.0, 2.0, 0.81 / 2, -0.9, False),
        (1.6, 1.0, 2.0, 0.64 / 2, 0.0, True),  # held at 1.2
        (0.0, 1.0, 2.0, 4.0 / 2, -2.0, False),  # moved away: not held
    ],
)
def test_value_loss_by_closed_form(value, old, target, loss, slope, clipped) -> None:
    values = torch.tensor([[value, math.nan]]).requires_grad_()
    mask = torch.tensor([[True, False]])
    rest = (torch.tensor([[old, math.nan]]), torch.tensor([[target, math.nan]]), mask)
    found = value_loss(values, *rest, 0.2, tokens=2.0)
    assert float(found.loss.detach()) == pytest.approx(loss / 2)
    assert int(found.clipped) == clipped
    assert torch.autograd.grad(found.loss, values)[0].tolist() == [[pytest.approx(slope / 2), 0.0]]
    free = value_loss(values, *rest, None, tokens=2.0)
    assert float(free.loss.detach()) == pytest.approx((value - target) ** 2 / 4)
    assert int(free.clipped) == 0


def test_micro_batches_add_up_to_the_minibatch() -> None:
    ratios, advantages = torch.rand(4, 6) + 0.5, torch.randn(4, 6)
    mask = torch.rand(4, 6) < 0.7
    whole = policy_loss(ratios, advantages, mask, 0.2, float(mask.sum())).loss
    parts = [policy_loss(ratios[r], advantages[r], mask[r], 0.2, float(mask.sum())).loss for r in ([0], [1, 2, 3])]
    torch.testing.assert_close(sum(parts), whole)


def test_explained_variance() -> None:
    returns = torch.randn(100)
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(returns + 5, returns) == pytest.approx(1.0)
    assert explained_variance(torch.zeros(100), returns) == pytest.approx(0.0, abs=1e-12)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0, rel=1e-6)
    assert explained_variance(torch.ones(3), torch.ones(3)) == explained_variance(torch.ones(1), torch.ones(1)) == 0.0


def test_the_coefficient_follows_the_kl() -> None:
    assert adapted_coefficient(0.1, 6.0, 6.0, 64, 1000) == 0.1
    assert adapted_coefficient(0.1, 6.6, 6.0, 100, 1000) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert adapted_coefficient(0.1, 60.0, 6.0, 100, 1000) == pytest.approx(0.1 * (1 + 0.2 * 0.1))
    assert adapted_coefficient(0.1, 0.0, 6.0, 100, 1000) == pytest.approx(0.1 * (1 - 0.2 * 0.1))
    assert adapted_coefficient(0.1, math.nan, 6.0, 100, 1000) == 0.1
    assert adapted_coefficient(0.1, math.inf, 6.0, 100, 1000) == 0.1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"epochs": 0}, "epochs=0: expected a whole number, at least 1"),
        ({"epochs": True}, "epochs=True: expected a whole number"),
        ({"gamma": 1.5}, "gamma=1.5: expected a finite number >= 0 and <= 1"),
        ({"learning_rate": -1e-5}, "learning_rate=-1e-05: expected a finite number >= 0"),
        ({"learning_rate": math.nan}, "learning_rate=nan"),
        ({"temperature": 0}, "temperature=0: expected a finite number > 0"),
        ({"kl_target": 0}, "kl_target=0: expected"),
        ({"kl_estimator": "k9"}, "kl_estimator='k9': expected one of 'k1', 'k2', 'k3'"),
        ({"bad_rewards": "ignore"}, "expected one of 'error', 'drop'"),
        ({"whiten_advantages": 1}, "whiten_advantages=1: expected true or false"),
        ({"seed": -1}, "seed=-1"),
        ({"minibatch_size": 12}, "minibatch_size=12 is no multiple of micro_batch_size=8"),
    ],
)
def test_settings_out_of_range_are_named(fields, message) -> None:
    with pytest.raises(ConfigError, match=message):
        PPOConfig(**fields)


def test_settings_round_trip_and_unknown_ones_are_named() -> None:
    config = PPOConfig(epochs=2, kl_target=6.0, value_clip_range=None)
    assert PPOConfig.from_dict(config.to_dict()) == config
    assert config.replace(epochs=3).epochs == 3
    with pytest.raises(ConfigError, match="unknown PPO setting 'learning_rat'; did you mean 'learning_rate'"):
        PPOConfig.from_dict({"learning_rat": 1.0})
    with pytest.raises(ConfigError, match="unknown PPO setting"):
        config.replace(beta=1.0)
