"""What a step of PPO did, in numbers."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class PPOStatistics:
    """One step of PPO. Means are over what was learnt from; nats.

    reward_mean, reward_std: of the scores of the samples, without the KL penalty. kl: of policy and reference, a
    sequence; kl_per_token; kl_coefficient: that the step paid. kl_floor: mean exact KL a token that the difference in
    precision alone was found to give, see `PPOTrainer`; 0 where policy and reference compute alike. entropy: of the
    policy before the step. policy_kl: of the policies before and after each update, k3. clip_fraction,
    value_clip_fraction: tokens that the clips held back. explained_variance: of the returns by the values.
    policy_grad_norm, value_grad_norm: before clipping. completion_tokens: mean length. ended: share of completions with
    an end token. samples; dropped: left out for their rewards. skipped: optimizer steps that were not taken as a
    gradient was not finite. invalid_log_probs: tokens left out since a log-probability was missing or not finite.
    """

    step: int
    reward_mean: float
    reward_std: float
    kl: float
    kl_per_token: float
    kl_coefficient: float
    kl_floor: float
    entropy: float
    policy_loss: float
    value_loss: float
    policy_kl: float
    clip_fraction: float
    value_clip_fraction: float
    explained_variance: float
    policy_grad_norm: float
    value_grad_norm: float
    completion_tokens: float
    ended: float
    samples: int
    dropped: int
    skipped: int
    invalid_log_probs: int

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        return dataclasses.asdict(self)


class Tally:
    """Sums that stay on the device until they are read."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = defaultdict(float)
        self._counts: dict[str, float] = defaultdict(float)

    def add(self, name: str, total: Tensor | float, count: float = 1.0) -> None:
        """Add what `count` values sum up to."""
        self._sums[name] = self._sums[name] + (total.detach() if isinstance(total, Tensor) else total)
        self._counts[name] += count

    def counts(self, name: str) -> bool:
        """True where something was added."""
        return self._counts.get(name, 0.0) > 0

    def total(self, name: str) -> float:
        """The sum; 0 where nothing was added."""
        return float(self._sums.get(name, 0.0))

    def mean(self, name: str) -> float:
        """The mean; 0 where nothing was added."""
        count = self._counts.get(name, 0.0)
        return self.total(name) / count if count else 0.0


def has_ended(completion: Sequence[int], stop_ids: Sequence[int]) -> bool:
    """True for a completion with an end token."""
    return bool(completion) and completion[-1] in stop_ids


def statistics_of(
    tally: Tally,
    scores: Sequence[float],
    completions: Sequence[Sequence[int]],
    stop_ids: Sequence[int],
    *,
    step: int,
    kl_floor: float,
    kl_coefficient: float,
) -> PPOStatistics:
    """scores: of the samples that were kept. completions: of all."""
    kept = torch.tensor(scores, dtype=torch.float64)
    lengths = [len(completion) for completion in completions]
    return PPOStatistics(
        step=step,
        reward_mean=float(kept.mean()) if len(kept) else float("nan"),
        reward_std=float(kept.std(unbiased=False)) if len(kept) else float("nan"),
        kl=tally.total("kl") / max(len(kept), 1),
        kl_per_token=tally.mean("kl"),
        kl_coefficient=kl_coefficient,
        kl_floor=kl_floor,
        entropy=tally.mean("entropy"),
        policy_loss=tally.mean("policy_loss"),
        value_loss=tally.mean("value_loss"),
        policy_kl=tally.mean("policy_kl"),
        clip_fraction=tally.mean("clipped"),
        value_clip_fraction=tally.mean("value_clipped"),
        explained_variance=tally.mean("explained_variance"),
        policy_grad_norm=tally.mean("policy_grad_norm"),
        value_grad_norm=tally.mean("value_grad_norm"),
        completion_tokens=sum(lengths) / len(lengths),
        ended=sum(has_ended(completion, stop_ids) for completion in completions) / len(lengths),
        samples=len(kept),
        dropped=len(completions) - len(kept),
        skipped=int(tally.total("skipped")),
        invalid_log_probs=int(tally.total("invalid")),
    )
