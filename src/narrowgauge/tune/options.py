"""What `tune` is asked for, and what it tells while it works."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from narrowgauge.errors import ConfigError, closest
from narrowgauge.tune.choices import DEFAULT_CHOICES
from narrowgauge.tune.measure import LEAST_BATCHES

HAND_RULES = ("layers", "blocks")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to tune.

    choices: named recipes whose casts a layer may take, beside the compute dtype. bytes_per_token: most bytes that the
    layers keep for backward, a token; bytes_share, time_share: most bytes, and most time of the layers' products at
    tensor cores' peak rates, as shares of all layers wide; wide_layers: most layers in the compute dtype. With none of
    them the bytes are those of the hand rule, first and last layer wide; hand_rule: "layers" or "blocks" of layers at
    the ends. batches, probe_batch_size: of the measurement.
    steps: of each short run. seeds: how many runs of each kind. name: of the recipe.
    """

    choices: tuple[str, ...] = DEFAULT_CHOICES
    bytes_per_token: float | None = None
    bytes_share: float | None = None
    time_share: float | None = None
    wide_layers: int | None = None
    batches: int = 8
    probe_batch_size: int = 4
    steps: int = 80
    seeds: int = 1
    hand_rule: str = HAND_RULES[0]
    name: str = "tuned"

    def __post_init__(self) -> None:
        """Raise ConfigError for the first value that is out of range."""
        for key in ("bytes_per_token", "bytes_share", "time_share"):
            value = getattr(self, key)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{key}={value!r}: expected a finite number above 0: change {key}, or leave it out")
        if self.bytes_per_token is not None and self.bytes_share is not None:
            raise ConfigError("expected bytes_per_token or bytes_share, found both: leave one out")
        for key, least in (("batches", LEAST_BATCHES), ("probe_batch_size", 1), ("steps", 0), ("seeds", 1)):
            if getattr(self, key) < least:
                raise ConfigError(f"{key}={getattr(self, key)}: expected at least {least}: raise {key}")
        if self.hand_rule not in HAND_RULES:
            raise ConfigError(f"unknown hand_rule '{self.hand_rule}'{closest(self.hand_rule, HAND_RULES)}")
        if self.wide_layers is not None and self.wide_layers < 0:
            raise ConfigError(f"wide_layers={self.wide_layers}: expected 0 or more: change wide_layers")


@dataclass(frozen=True)
class Progress:
    """How far one stage of tuning is: done of total; text: what it is about."""

    text: str
    done: int
    total: int


OnProgress = Callable[[Progress], None]


def ignore(progress: Progress) -> None:
    """A listener that drops everything."""
