"""The updates of PPO: forward and backward of policy and value model over a minibatch, and one step of each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowgauge.errors import DivergenceError
from narrowgauge.layers.gradients import accumulate
from narrowgauge.optim.clip import clip_grad_norm_
from narrowgauge.optim.scaler import LossScaler
from narrowgauge.train.log_probabilities import completion_log_probs, entropy, importance_ratios
from narrowgauge.train.ppo_config import PPOConfig
from narrowgauge.train.ppo_losses import policy_loss, value_loss
from narrowgauge.train.ppo_statistics import Tally
from narrowgauge.train.rollout import Experience
from narrowgauge.train.scoring import logits_of, values_of


@dataclass(frozen=True)
class Trained:
    """A prepared model, its optimizer, and the loss scaler, which is inert unless the recipe is fp16."""

    model: nn.Module
    optimizer: Optimizer
    scaler: LossScaler

    def step(self, max_norm: float) -> tuple[float, bool]:
        """Clip, and step unless a gradient is not finite: (norm before clipping, whether the step was skipped)."""
        self.scaler.unscale_(self.optimizer)
        norm = float(clip_grad_norm_(list(self.model.parameters()), max_norm))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return norm, bool(getattr(self.optimizer, "step_was_skipped", False))


def update(policy: Trained, value: Trained, minibatch: Sequence[Experience], config: PPOConfig, tally: Tally) -> None:
    """One optimizer step of policy and value model each, by the mean over the minibatch's tokens.

    The micro-batches' gradients are summed in float32 and cast once. Raises DivergenceError where no token of the
    minibatch has a finite log-probability under the policy as it is now, or from an optimizer after too many skips.
    """
    tokens = float(sum(e.learnt.sum() for e in minibatch))
    value_tokens = float(sum(e.mask.sum() for e in minibatch))
    if not tokens:
        return
    invalid = 0
    with ExitStack() as stack:
        for trained in (policy, value) if len(minibatch) > 1 else ():
            stack.enter_context(accumulate(trained.model))
        for e in minibatch:
            invalid += int(_policy_backward(policy, e, tokens, config, tally))
            _value_backward(value, e, value_tokens, config, tally)
    tally.add("invalid", invalid)
    if invalid >= tokens:
        raise DivergenceError(
            f"all {invalid} log-probabilities of a minibatch are NaN or infinite under the policy: go back to an "
            "earlier checkpoint, and lower the learning rate or raise kl_coefficient"
        )
    for name, trained in (("policy", policy), ("value", value)):
        norm, skipped = trained.step(config.max_grad_norm)
        tally.add("skipped", float(skipped))
        if not skipped:
            tally.add(f"{name}_grad_norm", norm)


def _policy_backward(policy: Trained, e: Experience, tokens: float, config: PPOConfig, tally: Tally) -> Tensor:
    """The gradient of the policy's loss; returns how many tokens have no finite log-probability any more."""
    logits = logits_of(policy.model, e.ids, e.attention)
    now = completion_log_probs(logits, e.ids, e.completion_mask, temperature=config.temperature)
    ratios = importance_ratios(now, e.log_probs, e.learnt)
    found = policy_loss(ratios.ratios, e.advantages, ratios.mask, config.clip_range, tokens, e.weights)
    loss = found.loss
    if config.entropy_coefficient:
        uncertainty = entropy(logits[:, :-1], temperature=config.temperature)
        loss = loss - config.entropy_coefficient * uncertainty.masked_fill(~ratios.mask, 0.0).sum() / tokens
    policy.scaler.scale(loss).backward()
    counted = float(e.learnt.sum())
    tally.add("policy_loss", found.loss * tokens, counted)
    tally.add("policy_kl", found.kl, counted)
    tally.add("clipped", found.clipped, counted)
    return ratios.invalid


def _value_backward(value: Trained, e: Experience, tokens: float, config: PPOConfig, tally: Tally) -> None:
    values = values_of(value.model, e.ids, e.attention)[:, :-1]
    found = value_loss(values, e.values, e.returns, e.mask, config.value_clip_range, tokens)
    value.scaler.scale(found.loss).backward()
    counted = float(e.mask.sum())
    tally.add("value_loss", found.loss * tokens, counted)
    tally.add("value_clipped", found.clipped, counted)


def minibatches(number: int, size: int, generator: torch.Generator) -> list[list[int]]:
    """`number` micro-batches in an order drawn anew, `size` together."""
    order = torch.randperm(number, generator=generator, device=generator.device).tolist()
    return [order[at : at + size] for at in range(0, number, size)]
