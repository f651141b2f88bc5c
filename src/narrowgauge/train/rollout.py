"""What PPO learns from: prompts, completions, their rewards, and the micro-batches made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from narrowgauge.errors import DataError
from narrowgauge.train.frozen_models import Frozen
from narrowgauge.train.scoring import padded, scores_of

Ids = list[int]
# (prompts, completions without their end token) -> a number for each; None or NaN: no reward
RewardFunction = Callable[[list[Ids], list[Ids]], Sequence[float | None] | Tensor]


@dataclass
class Samples:
    """Prompts and what followed. completions end with a stop id where one was drawn.

    scores: the reward of each. sampler_log_probs: one a token of the completion, or None where the sampler gave none.
    """

    prompts: list[Ids]
    completions: list[Ids]
    scores: list[float] = field(default_factory=list)
    sampler_log_probs: list[Sequence[float | None]] | None = None

    def without_bad(self) -> Samples:
        """Those whose score is a finite number."""
        good = [i for i, score in enumerate(self.scores) if math.isfinite(score)]
        sampler = self.sampler_log_probs
        return Samples(
            [self.prompts[i] for i in good],
            [self.completions[i] for i in good],
            [self.scores[i] for i in good],
            None if sampler is None else [sampler[i] for i in good],
        )


@dataclass
class Experience:
    """A micro-batch. ids int64 [B, T] and attention bool [B, T], padded on the right.

    All others are [B, T - 1]: entry t is about ids[:, t + 1], which was drawn after ids[:, : t + 1]. mask: tokens of
    completions. learnt: those whose log-probabilities are numbers. weights: of tokens, against a sampler that was not
    quite the policy. Log-probabilities and values are those before the updates.
    """

    ids: Tensor
    attention: Tensor
    mask: Tensor
    scores: Tensor
    sampler_log_probs: Tensor | None
    log_probs: Tensor = field(default_factory=lambda: torch.empty(0))
    reference_log_probs: Tensor = field(default_factory=lambda: torch.empty(0))
    values: Tensor = field(default_factory=lambda: torch.empty(0))
    entropy: Tensor = field(default_factory=lambda: torch.empty(0))
    learnt: Tensor = field(default_factory=lambda: torch.empty(0))
    weights: Tensor | None = None
    advantages: Tensor = field(default_factory=lambda: torch.empty(0))
    returns: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def completion_mask(self) -> Tensor:
        """`mask` over ids: bool [B, T]."""
        return torch.nn.functional.pad(self.mask, (1, 0))

    def with_scores(self, penalties: Tensor) -> Tensor:
        """Rewards of tokens: `penalties` [B, T - 1], and the sequence's score at its last token."""
        rewards = penalties.clone()
        positions = torch.arange(self.mask.shape[1], device=self.mask.device)
        last = (self.mask * positions).argmax(dim=1)
        has_any = self.mask.any(dim=1)
        rows = torch.arange(len(last), device=last.device)
        rewards[rows, last] += self.scores * has_any
        return rewards


def experience_of(samples: Samples, rows: Sequence[int], pad_id: int, device: torch.device) -> Experience:
    """A micro-batch of the samples of these numbers."""
    prompts, completions = [samples.prompts[i] for i in rows], [samples.completions[i] for i in rows]
    ids, attention = padded([p + c for p, c in zip(prompts, completions, strict=True)], pad_id, device)
    starts = torch.tensor([len(p) for p in prompts], device=device)
    mask = (attention & (torch.arange(ids.shape[1], device=device)[None] >= starts[:, None]))[:, 1:]
    scores = torch.tensor([samples.scores[i] for i in rows], dtype=torch.float32, device=device)
    sampler = None
    if samples.sampler_log_probs is not None:
        sampler = torch.full(mask.shape, math.nan, device=device)
        for k, i in enumerate(rows):
            row = [math.nan if x is None else float(x) for x in samples.sampler_log_probs[i]]
            if len(row) > len(completions[k]):
                raise DataError(
                    f"sample {i}: {len(row)} log-probabilities for a completion of {len(completions[k])} tokens: "
                    "expected at most one a token"
                )
            start = len(prompts[k]) - 1
            sampler[k, start : start + len(row)] = torch.tensor(row, device=device)
    return Experience(ids, attention, mask, scores, sampler)


def scored(
    samples: Samples,
    reward: Frozen | RewardFunction,
    *,
    stop_ids: Sequence[int],
    pad_id: int,
    device: torch.device,
    micro_batch_size: int,
    bad_rewards: str,
) -> list[float]:
    """A reward for each sample; NaN for those to drop. Raises DataError for a bad one where `bad_rewards` is "error".

    A reward model reads prompt and completion with its end token; a function gets completions without it.
    """
    if isinstance(reward, Frozen):
        scores = _by_model(samples, reward, pad_id, device, micro_batch_size)
    else:
        bare = [c[:-1] if c and c[-1] in stop_ids else c for c in samples.completions]
        scores = _by_function(samples.prompts, bare, reward, bad_rewards)
    for number, score in enumerate(scores):
        if not math.isfinite(score) and bad_rewards == "error":
            raise DataError(f"{_sample(samples, number)} has reward {score}: {_MEND}")
    return [score if math.isfinite(score) else math.nan for score in scores]


_MEND = "expected a finite number; mend the reward, or set bad_rewards='drop' to leave such samples out and count them"


def _sample(samples: Samples, number: int) -> str:
    prompt, completion = samples.prompts[number], samples.completions[number]
    return (
        f"sample {number} (prompt of {len(prompt)} tokens that begins with {prompt[:8]}, completion of "
        f"{len(completion)} that begins with {completion[:8]})"
    )


@torch.no_grad()
def _by_model(
    samples: Samples, reward: Frozen, pad_id: int, device: torch.device, micro_batch_size: int
) -> list[float]:
    rows = [p + c for p, c in zip(samples.prompts, samples.completions, strict=True)]
    # transformers' classifiers without a pad token refuse more than one sequence
    alone = getattr(getattr(reward.model, "config", None), "pad_token_id", pad_id) is None
    size = 1 if alone else micro_batch_size
    scores: list[float] = []
    for at in range(0, len(rows), size):
        with reward.region():
            scores += scores_of(reward.model, *padded(rows[at : at + size], pad_id, device)).tolist()
    return scores


def _by_function(prompts: list[Ids], completions: list[Ids], reward: RewardFunction, bad_rewards: str) -> list[float]:
    try:
        return _numbers(reward(prompts, completions), len(prompts))
    except DataError:
        raise
    except Exception:  # a user's function may raise anything: one sample after the other says for which it does
        return [
            _alone(number, p, c, reward, bad_rewards)
            for number, (p, c) in enumerate(zip(prompts, completions, strict=True))
        ]


def _alone(number: int, prompt: Ids, completion: Ids, reward: RewardFunction, bad_rewards: str) -> float:
    try:
        return _numbers(reward([prompt], [completion]), 1)[0]
    except DataError:
        raise
    except Exception as error:
        if bad_rewards == "drop":
            return math.nan
        one = Samples([prompt], [completion])
        named = _sample(one, 0).replace("sample 0", f"sample {number}", 1)
        raise DataError(f"the reward of {named} raised {type(error).__name__}: {error}; {_MEND}") from error


def _numbers(found: Sequence[float | None] | Tensor, expected: int) -> list[float]:
    values = found.reshape(-1).tolist() if isinstance(found, Tensor) else list(found)
    if len(values) != expected:
        raise DataError(f"the reward function returned {len(values)} numbers: expected {expected}, one a completion")
    return [math.nan if value is None else float(value) for value in values]
