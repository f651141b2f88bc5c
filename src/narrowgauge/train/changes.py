"""What a run that goes on may be told otherwise: what watches it and what it writes, and not what it computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from narrowgauge.errors import ConfigError, closest
from narrowgauge.train.config import TrainConfig

# keys, and sections all of whose keys may change
CHANGEABLE = (
    "guard", "divergence", "eval_every", "eval_batches", "save_every", "save_async", "keep_last", "log_every",
    "statistics_every", "histograms_every", "max_skips", "tensorboard", "trackio", "wandb", "project", "sample_prompt",
    "sample_tokens", "parallel.timeout_s",
)  # fmt: skip


def changed(config: TrainConfig, changes: Mapping[str, Any]) -> tuple[TrainConfig, list[str]]:
    """The configuration with other values, checked, and what is another one, in words.

    changes: by dotted key; a mapping for a section changes the keys that it names. Raises ConfigError for a key that is
    unknown or says what the run computes, and for values that are out of range.
    """
    known = dict(_leaves(dataclasses.asdict(config)))
    values = dataclasses.asdict(config)
    given = dict(_leaves(dict(changes)))
    for key, value in given.items():
        if key not in known:
            raise ConfigError(f"unknown configuration key '{key}'{closest(key, known)}")
        if not any(key == each or key.startswith(f"{each}.") for each in CHANGEABLE):
            raise ConfigError(
                f"{key}={value!r}: expected a key of what watches a run or of what it writes, found one of what it "
                "computes, and a run that goes on is bitwise the run that it was: start a new one with `narrowgauge "
                f"train --config RUN/config.yaml --name NEW --{key} ...`, or edit config.yaml in its folder, by which "
                f"it goes on; what may change here: {', '.join(CHANGEABLE)}"
            )
        *sections, name = key.split(".")
        section = values
        for each in sections:
            section = section[each]
        section[name] = value
    new = TrainConfig.from_dict(values)
    new.check()
    after = dict(_leaves(dataclasses.asdict(new)))
    return new, [f"{key}: {_word(known[key])} -> {_word(after[key])}" for key in given if known[key] != after[key]]


def _leaves(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value), also of keys within sections; the fields of recipes are one value."""
    for name, value in values.items():
        key = f"{before}{name}"
        if isinstance(value, Mapping) and value and name != "recipe_fields":
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _word(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)
