"""What a PPO run is told, checked when it is made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from narrowgauge.errors import ConfigError, closest
from narrowgauge.train.log_probabilities import KLEstimator

_CHOICES = {
    "kl_estimator": ("k1", "k2", "k3"),
    "bad_rewards": ("error", "drop"),
    "long_prompts": ("error", "truncate"),
}
_COUNTS = ("max_new_tokens", "batch_size", "micro_batch_size", "epochs", "kl_horizon", "max_skips")
_COUNTS_OR_NONE = ("minibatch_size", "sampling_batch_size")
# name -> (lowest, whether that itself is allowed, highest)
_NUMBERS: dict[str, tuple[float, bool, float]] = {
    "temperature": (0.0, False, math.inf),
    "learning_rate": (0.0, True, math.inf),
    "weight_decay": (0.0, True, math.inf),
    "gamma": (0.0, True, 1.0),
    "lam": (0.0, True, 1.0),
    "clip_range": (0.0, False, math.inf),
    "sampler_ratio_cap": (0.0, False, math.inf),
    "kl_coefficient": (0.0, True, math.inf),
    "entropy_coefficient": (0.0, True, math.inf),
    "max_grad_norm": (0.0, False, math.inf),
}
_NUMBERS_OR_NONE: dict[str, tuple[float, bool, float]] = {
    "value_learning_rate": (0.0, True, math.inf),
    "value_clip_range": (0.0, False, math.inf),
    "kl_target": (0.0, False, math.inf),
    "missing_end_penalty": (0.0, True, math.inf),
}


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Numbers of proximal policy optimization for language models.

    Rollouts. max_new_tokens: longest completion. temperature: of sampling, and of every log-probability. batch_size:
    prompts of a step of `train`. sampling_batch_size: prompts sampled at once; None: all of the step. long_prompts:
    those that leave no room for a completion in the model's context: "error", or "truncate" at their front.
    bad_rewards: what becomes of a sample whose reward is NaN, infinite, or raised: "error", or "drop" and count it.
    missing_end_penalty: taken from the score of a completion without an end token.

    Updates. epochs: passes over a step's rollouts. minibatch_size: sequences of one optimizer step; None: all.
    micro_batch_size: sequences of one forward pass; the gradients of a minibatch's are summed exactly.
    learning_rate, value_learning_rate (None: the same), weight_decay: AdamW's. max_grad_norm: largest gradient norm of
    each model. max_skips: skipped steps in a row that end the run.

    Objective. gamma, lam: of generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438). clip_range: of
    the probability ratio; value_clip_range: of the values; None: values are not clipped (Schulman et al. 2017,
    arXiv:1707.06347). whiten_advantages: to mean 0 and variance 1 over the tokens of a step. entropy_coefficient: of
    the entropy bonus. sampler_ratio_cap: largest weight of a token whose log-probability the sampler gave.

    KL penalty. kl_coefficient: of the penalty that each token pays for leaving the reference (InstructGPT,
    arXiv:2203.02155). kl_target: nats a sequence that the coefficient is adapted to, over `kl_horizon` sequences
    (Ziegler et al. 2019, arXiv:1909.08593); None: the coefficient is fixed. kl_estimator: "k1", "k2" or "k3".

    seed: of the generator that `PPOTrainer` makes where it is given none.

    Raises ConfigError for values out of range; `from_dict` and `replace` also for unknown names.
    """

    max_new_tokens: int = 32
    temperature: float = 1.0
    batch_size: int = 32
    sampling_batch_size: int | None = None
    long_prompts: str = "error"
    bad_rewards: str = "error"
    missing_end_penalty: float | None = None
    epochs: int = 4
    minibatch_size: int | None = None
    micro_batch_size: int = 8
    learning_rate: float = 1e-5
    value_learning_rate: float | None = None
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    max_skips: int = 50
    gamma: float = 1.0
    lam: float = 0.95
    clip_range: float = 0.2
    value_clip_range: float | None = 0.2
    whiten_advantages: bool = True
    entropy_coefficient: float = 0.0
    sampler_ratio_cap: float = 2.0
    kl_coefficient: float = 0.05
    kl_target: float | None = None
    kl_horizon: int = 10_000
    kl_estimator: KLEstimator = "k1"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in _COUNTS:
            self._check_count(name)
        for name in _COUNTS_OR_NONE:
            if getattr(self, name) is not None:
                self._check_count(name)
        for name, bounds in _NUMBERS.items():
            self._check_number(name, *bounds)
        for name, bounds in _NUMBERS_OR_NONE.items():
            if getattr(self, name) is not None:
                self._check_number(name, *bounds)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(map(repr, choices))}")
        if not isinstance(self.whiten_advantages, bool):
            raise ConfigError(f"whiten_advantages={self.whiten_advantages!r}: expected true or false")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed!r}: expected a whole number from 0 to 2^63 - 1")
        if self.minibatch_size is not None and self.minibatch_size % self.micro_batch_size:
            raise ConfigError(
                f"minibatch_size={self.minibatch_size} is no multiple of micro_batch_size={self.micro_batch_size}: "
                "change one, e.g. make them equal"
            )

    def _check_count(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r}: expected a whole number, at least 1")

    def _check_number(self, name: str, lowest: float, lowest_is_allowed: bool, highest: float) -> None:
        value = getattr(self, name)
        expected = f"expected a finite number {'>=' if lowest_is_allowed else '>'} {lowest:g}"
        expected += "" if highest == math.inf else f" and <= {highest:g}"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{name}={value!r}: {expected}")
        if not (value > lowest or (lowest_is_allowed and value == lowest)) or value > highest or value == math.inf:
            raise ConfigError(f"{name}={value!r}: {expected}")

    def replace(self, **fields: Any) -> Self:
        """A copy with other fields. Raises ConfigError for a field that there is not, naming the closest."""
        _check_fields(fields)
        return dataclasses.replace(self, **fields)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON; `from_dict` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """The config with these fields, the others as they are by default."""
        _check_fields(fields)
        return cls(**fields)


FIELDS = tuple(f.name for f in dataclasses.fields(PPOConfig))


def _check_fields(fields: Mapping[str, Any]) -> None:
    for field in fields:
        if field not in FIELDS:
            raise ConfigError(f"unknown PPO setting '{field}'{closest(str(field), FIELDS)}")
