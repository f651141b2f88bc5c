"""Log-probabilities of tokens and what preference training makes of them, in float32 whatever the logits are.

Every function is pure and an island: inside `torch.autocast` it computes in float32 all the same (float64 where it is
given float64), and logits in 16 bits are widened a chunk at a time, in forward and in backward, so that no float32 copy
of the logits of a long sequence ever lives.

Symbols: B sequences, T tokens, V entries of the vocabulary; `mask` is bool [B, T], True where a token counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from narrowgauge.errors import ConfigError, DataError
from narrowgauge.models.gpt import IGNORED
from narrowgauge.train.vocabulary import entropy_of, log_probs_of, vocabulary_kl_of

__all__ = [
    "IGNORED", "ImportanceRatios", "KLEstimator", "as_log_probs", "completion_log_probs", "entropy", "implicit_rewards",
    "importance_ratios", "kl_estimate", "masked_mean", "sequence_log_probs", "token_log_probs", "vocabulary_kl",
]  # fmt: skip

KLEstimator = Literal["k1", "k2", "k3"]
P = ParamSpec("P")
R = TypeVar("R")


def _island(function: Callable[P, R]) -> Callable[P, R]:
    """Let `function` run outside of any autocast region; its first argument says on which type of device."""

    @functools.wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0] if args else next(iter(kwargs.values()))
        kind = first.device.type if isinstance(first, Tensor) else "cpu"
        if kind == "meta":
            return function(*args, **kwargs)
        with torch.autocast(kind, enabled=False):
            return function(*args, **kwargs)

    return outside


@_island
def token_log_probs(logits: Tensor, labels: Tensor, *, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature)[labels]: logits [..., T, V], labels int64 [..., T] -> float32 [..., T].

    A label of -100 gives 0 and no gradient. The gradient, onehot(label) - softmax, is made chunk by chunk in float32
    and has the logits' dtype. Saved for backward: the logits themselves, no copy of them, and two numbers a token.

    Raises DataError for shapes that do not belong together and for labels outside the vocabulary, ConfigError for a
    temperature that is not above 0.
    """
    _check_temperature(temperature)
    if logits.shape[:-1] != labels.shape:
        raise DataError(
            f"logits {list(logits.shape)} and labels {list(labels.shape)}: expected [..., T, V] and [..., T]; shift "
            "them against each other first, or use completion_log_probs"
        )
    outside = (labels != IGNORED) & ((labels < 0) | (labels >= logits.shape[-1]))
    if bool(outside.any()):
        raise DataError(
            f"label {int(labels[outside][0])}: expected 0 to {logits.shape[-1] - 1}, or {IGNORED} for a token that "
            "counts for nothing"
        )
    return log_probs_of(logits, labels, temperature)


def completion_log_probs(logits: Tensor, ids: Tensor, mask: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of the tokens of sequences under a causal model's logits, shifted: float32 [B, T - 1].

    logits: [B, T, V] of `ids` int64 [B, T]. Entry t is that of ids[:, t + 1]; 0, without gradient, where mask[:, t + 1]
    is False, as prompts and padding are. mask: bool [B, T].
    """
    labels = ids[:, 1:].masked_fill(~mask[:, 1:], IGNORED)
    return token_log_probs(logits[:, :-1], labels, temperature=temperature)


@_island
def sequence_log_probs(log_probs: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sums over the tokens that count: log_probs [..., T] of any floating dtype -> float32 [...].

    Summed in float64 and rounded once: in bfloat16 a running sum of like terms stands still at 256 of them. What does
    not count may be NaN.
    """
    wide = log_probs.double() if log_probs.device.type != "mps" else log_probs.float()
    if mask is not None:
        wide = wide.masked_fill(~mask, 0.0)
    return wide.sum(dim=-1).to(_wide(log_probs.dtype))


@_island
def implicit_rewards(log_probs: Tensor, reference_log_probs: Tensor, mask: Tensor | None, beta: float) -> Tensor:
    """DPO's rewards, beta * log(policy / reference) of whole sequences (Rafailov et al. 2023, arXiv:2305.18290).

    log_probs, reference_log_probs: of tokens, [..., T]. Returns float32 [...]. Differences are taken token by token,
    before the sums: those of long sequences are large and nearly equal.
    """
    return beta * sequence_log_probs(_widened(log_probs) - _widened(reference_log_probs), mask)


@_island
def entropy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """-sum p log p of p = softmax(logits / temperature), in nats: [..., T, V] -> float32 [..., T], differentiable.

    Entries of -inf count for nothing. Memory as in `token_log_probs`.
    """
    _check_temperature(temperature)
    return entropy_of(logits, temperature)


@_island
def vocabulary_kl(logits: Tensor, reference_logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """KL(policy || reference) over the whole vocabulary, in nats: both logits [..., T, V] -> float32 [..., T].

    Exactly 0 for equal logits, and never below. Infinite where the reference rules out what the policy may draw. Both
    gradients are taken in float32 from log(reference / policy), and so keep their digits where the two are close, as
    a difference of two probabilities would not:

        d KL / d logits           = p * (log(p / q) - KL)
        d KL / d reference_logits = p * expm1(log(q / p))  =  q - p

    Memory as in `token_log_probs`. Raises DataError where the shapes differ.
    """
    _check_temperature(temperature)
    if logits.shape != reference_logits.shape:
        raise DataError(
            f"logits {list(logits.shape)} and reference logits {list(reference_logits.shape)}: expected the same "
            "shape; policy and reference must share a vocabulary and score the same tokens"
        )
    return vocabulary_kl_of(logits, reference_logits, temperature)


@_island
def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor, estimator: KLEstimator = "k1") -> Tensor:
    """Estimates of KL(policy || reference) from tokens drawn by the policy, one a token, float32, differentiable.

    With d = log_probs - reference_log_probs (Schulman 2020, "Approximating KL divergence"): k1 = d, unbiased;
    k2 = d^2 / 2, biased and never negative; k3 = exp(-d) - 1 + d, both unbiased and never negative.
    """
    d = _widened(log_probs) - _widened(reference_log_probs)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        # below that the terms of exp(-d) - 1 + d cancel: the first terms of its series are exact to float32
        small = d.clamp(-0.01, 0.01)
        series = small.square() / 2 * (1 - small / 3 * (1 - small / 4 * (1 - small / 5)))
        return torch.where(d.abs() < 0.01, series, torch.expm1(-d) + d)
    raise ConfigError(f"KL estimator {estimator!r}: expected 'k1', 'k2' or 'k3'")


@dataclass(frozen=True)
class ImportanceRatios:
    """policy / sampler for each token, and which tokens count.

    ratios: float32 [B, T], 1 without gradient where `mask` is False. mask: bool [B, T], the tokens that counted before
    and whose two log-probabilities are finite numbers. invalid: int64, 0-dim: how many were taken out.
    """

    ratios: Tensor
    mask: Tensor
    invalid: Tensor


@_island
def importance_ratios(
    log_probs: Tensor, sampler_log_probs: Tensor | Sequence[Sequence[float | None]], mask: Tensor
) -> ImportanceRatios:
    """exp(log_probs - sampler_log_probs), without the tokens for which one of the two is missing, NaN or infinite.

    log_probs: [B, T], differentiable. sampler_log_probs: [B, T], or rows of numbers as an engine gives them, see
    `as_log_probs`; they get no gradient. mask: bool [B, T]. The gradients of all other tokens have the bits that they
    have where the tokens are taken out of `mask` by hand.
    """
    if not isinstance(sampler_log_probs, Tensor):
        sampler_log_probs = as_log_probs(sampler_log_probs, log_probs.shape[-1], log_probs.device)
    if not log_probs.shape == sampler_log_probs.shape == mask.shape:
        raise DataError(
            f"log-probabilities {list(log_probs.shape)}, the sampler's {list(sampler_log_probs.shape)} and mask "
            f"{list(mask.shape)}: expected one shape [B, T]"
        )
    new, old = _widened(log_probs), _widened(sampler_log_probs.detach())
    valid = mask & new.detach().isfinite() & old.isfinite()
    # filled before they meet: NaN times a gradient of zero is NaN
    difference = new.masked_fill(~valid, 0.0) - old.masked_fill(~valid, 0.0)
    return ImportanceRatios(difference.exp(), valid, (mask & ~valid).sum())


def as_log_probs(
    rows: Sequence[Sequence[float | None]], tokens: int | None = None, device: torch.device | str | None = None
) -> Tensor:
    """Rows of numbers or None, e.g. a generation engine's, as float32 [B, tokens]; NaN where there is none.

    tokens: None: as many as the longest row has. Raises DataError for a row that is longer.
    """
    longest = max((len(row) for row in rows), default=0)
    width = longest if tokens is None else tokens
    if longest > width:
        raise DataError(f"a row of {longest} log-probabilities: expected at most {width}, one a token")
    filled = [
        [float("nan") if x is None else float(x) for x in row] + [float("nan")] * (width - len(row)) for row in rows
    ]
    return torch.tensor(filled, dtype=torch.float32, device=device).reshape(len(rows), width)


@_island
def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the values where `mask` is True, in float32, 0-dim; 0 where there are none. The others may be NaN."""
    return _widened(values).masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)


def _widened(x: Tensor) -> Tensor:
    return x.to(_wide(x.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _check_temperature(temperature: float) -> None:
    if not 0 < temperature < float("inf"):
        raise ConfigError(f"temperature={temperature!r}: expected a finite number above 0")
