"""Tokens of rollouts under the policy, the reference and the value model, and the advantages that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from narrowgauge.train.frozen_models import Frozen
from narrowgauge.train.log_probabilities import (
    completion_log_probs,
    entropy,
    importance_ratios,
    kl_estimate,
    vocabulary_kl,
)
from narrowgauge.train.ppo_config import PPOConfig
from narrowgauge.train.ppo_losses import advantages_and_returns, explained_variance, whitened
from narrowgauge.train.ppo_statistics import Tally
from narrowgauge.train.rollout import Experience
from narrowgauge.train.scoring import logits_of, mode, values_of


@dataclass(frozen=True)
class Scorer:
    """Fills in what `Experience` says of micro-batches before the updates."""

    policy: nn.Module
    value: nn.Module
    reference: Frozen
    config: PPOConfig
    kl_coefficient: float

    @torch.no_grad()
    def score(self, experience: Sequence[Experience], tally: Tally, *, measures_floor: bool) -> None:
        """Log-probabilities, values, advantages and returns of all micro-batches; means go to `tally`.

        measures_floor: whether to take the exact KL of policy and reference, too.
        """
        with mode(self.policy, training=False), mode(self.value, training=False):
            for e in experience:
                self._by_models(e, tally, measures_floor)
                self._advantages(e, tally)
        if not experience:
            return
        values, returns = (torch.cat([getattr(e, name)[e.mask] for e in experience]) for name in ("values", "returns"))
        tally.add("explained_variance", explained_variance(values, returns))
        if self.config.whiten_advantages:
            better = whitened([e.advantages for e in experience], [e.learnt for e in experience])
            for e, advantages in zip(experience, better, strict=True):
                e.advantages = advantages

    def _by_models(self, e: Experience, tally: Tally, measures_floor: bool) -> None:
        temperature = self.config.temperature
        logits = logits_of(self.policy, e.ids, e.attention)
        e.log_probs = completion_log_probs(logits, e.ids, e.completion_mask, temperature=temperature)
        with self.reference.region():
            reference = logits_of(self.reference.model, e.ids, e.attention)
        e.reference_log_probs = completion_log_probs(reference, e.ids, e.completion_mask, temperature=temperature)
        e.values = values_of(self.value, e.ids, e.attention)[:, :-1]
        e.learnt = e.mask & e.log_probs.isfinite()
        if e.sampler_log_probs is not None:
            off_policy = importance_ratios(e.log_probs, e.sampler_log_probs, e.mask)
            e.learnt, e.weights = off_policy.mask, off_policy.ratios.clamp(max=self.config.sampler_ratio_cap)
        count = float(e.learnt.sum())
        tally.add("invalid", float(e.mask.sum()) - count)
        uncertainty = entropy(logits[:, :-1], temperature=temperature)
        tally.add("entropy", uncertainty.masked_fill(~e.learnt, 0.0).sum(), count)
        if measures_floor:
            apart = vocabulary_kl(logits[:, :-1], reference[:, :-1], temperature=temperature)
            counted = e.learnt & apart.isfinite()
            tally.add("kl_floor", apart.masked_fill(~counted, 0.0).sum(), float(counted.sum()))

    def _advantages(self, e: Experience, tally: Tally) -> None:
        counted = e.learnt & e.reference_log_probs.isfinite()
        kl = kl_estimate(e.log_probs, e.reference_log_probs, self.config.kl_estimator).masked_fill(~counted, 0.0)
        tally.add("kl", kl.sum(), float(counted.sum()))
        rewards = e.with_scores(-self.kl_coefficient * kl)
        e.advantages, e.returns = advantages_and_returns(rewards, e.values, e.mask, self.config.gamma, self.config.lam)
