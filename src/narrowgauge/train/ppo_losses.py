"""The formulas of PPO, in float32: advantages, clipped losses, and the coefficient of the KL penalty.

B sequences, T tokens. `mask` is bool [B, T]; the tokens of a sequence that count stand side by side. What does not
count may hold anything, also NaN. Losses are sums over tokens divided by `tokens`, so that those of the micro-batches
of a minibatch add up to the mean over the minibatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def advantages_and_returns(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438): float32 [B, T] twice, 0 where masked.

        delta_t = r_t + gamma * V_{t+1} - V_t,   A_t = delta_t + gamma * lam * A_{t+1},   R_t = A_t + V_t

    V and A after a sequence's last token are 0.
    """
    counts = mask.float()
    rewards, values = (x.float().masked_fill(~mask, 0.0) for x in (rewards, values))
    advantages = torch.zeros_like(rewards)
    following = next_value = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        following = (delta + gamma * lam * following) * counts[:, t]
        next_value = values[:, t]
        advantages[:, t] = following
    return advantages, (advantages + values).masked_fill(~mask, 0.0)


def whitened(advantages: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    """All advantages with mean 0 and variance 1 over the tokens that count, taken over all tensors together.

    The variance is that of the population, plus 1e-8. Fewer than two tokens stay as they are.
    """
    counted = torch.cat([a[m] for a, m in zip(advantages, masks, strict=True)]) if advantages else torch.empty(0)
    if counted.numel() < 2:
        return list(advantages)
    mean, variance = counted.mean(), counted.var(unbiased=False)
    factor = (variance + 1e-8).rsqrt()
    return [((a - mean) * factor).masked_fill(~m, 0.0) for a, m in zip(advantages, masks, strict=True)]


class PolicyLoss(NamedTuple):
    """loss: 0-dim, differentiable. clipped: how many tokens the clip holds back; kl: sum of k3 of old and new."""

    loss: Tensor
    clipped: Tensor
    kl: Tensor


def policy_loss(
    ratios: Tensor, advantages: Tensor, mask: Tensor, clip_range: float, tokens: float, weights: Tensor | None = None
) -> PolicyLoss:
    """-sum min(rho A, clip(rho, 1 - eps, 1 + eps) A) / tokens (Schulman et al. 2017, arXiv:1707.06347, equation 7).

    ratios: new policy / old policy, [B, T]. weights: of the tokens, without gradient; None: 1.
    """
    advantages = advantages.masked_fill(~mask, 0.0)
    if weights is not None:
        advantages = advantages * weights.masked_fill(~mask, 0.0)
    ratios = ratios.masked_fill(~mask, 1.0)
    free, held = -ratios * advantages, -ratios.clamp(1 - clip_range, 1 + clip_range) * advantages
    loss = torch.maximum(free, held).sum() / tokens
    with torch.no_grad():
        clipped = ((held > free) & mask).sum()
        kl = ((ratios - 1) - ratios.log()).masked_fill(~mask, 0.0).sum()
    return PolicyLoss(loss, clipped, kl)


class ValueLoss(NamedTuple):
    """loss: 0-dim, differentiable. clipped: how many tokens the clip holds back."""

    loss: Tensor
    clipped: Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip_range: float | None, tokens: float
) -> ValueLoss:
    """sum max((V - R)^2, (V_old + clip(V - V_old, -eps, eps) - R)^2) / 2 / tokens; clip_range None: no second term."""
    values, old_values, returns = (x.float().masked_fill(~mask, 0.0) for x in (values, old_values, returns))
    free = (values - returns).square()
    if clip_range is None:
        return ValueLoss(free.sum() / (2 * tokens), torch.zeros((), dtype=torch.int64, device=mask.device))
    held = (old_values + (values - old_values).clamp(-clip_range, clip_range) - returns).square()
    loss = torch.maximum(free, held).sum() / (2 * tokens)
    return ValueLoss(loss, ((held > free) & mask).sum())


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - var(returns - values) / var(returns) of the tokens given, float32 [N]; 0 where the returns do not vary."""
    if values.numel() < 2:
        return 0.0
    spread = returns.double().var(unbiased=False)
    return float(1 - (returns.double() - values.double()).var(unbiased=False) / spread) if spread > 0 else 0.0


def adapted_coefficient(coefficient: float, kl: float, target: float, sequences: int, horizon: int) -> float:
    """The KL penalty's next coefficient (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    beta * (1 + clip(kl / target - 1, -0.2, 0.2) * sequences / horizon); a KL that is not finite changes nothing.
    """
    error = kl / target - 1
    if not abs(error) < float("inf"):
        return coefficient
    return coefficient * (1 + min(max(error, -0.2), 0.2) * sequences / horizon)
