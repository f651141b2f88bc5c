"""Reward functions of trainers: what one raises or returns is said with its name and the batch."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import DataError


def checked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`function` (prompts, completions, ... -> a number or None for each completion), with its answer checked.

    None: this function has nothing to say of that completion. Raises DataError, from what `function` raised, with its
    name and the batch; and for an answer that is no list of finite numbers and None, one for each completion.
    """
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def scored(**batch: Any) -> list[float | None]:
            try:
                found = await function(**batch)
            except Exception as error:
                raise _failure(name, batch, error) from error
            return _rewards(name, found, batch)

        return scored

    @functools.wraps(function)
    def score(**batch: Any) -> list[float | None]:
        try:
            found = function(**batch)
        except Exception as error:
            raise _failure(name, batch, error) from error
        return _rewards(name, found, batch)

    return score


def check_rewards(rewards: Tensor, names: Sequence[str]) -> None:
    """Raise DataError where a completion has no finite reward of any function.

    rewards: [completions, functions], NaN where a function has nothing to say.
    """
    for column, name in zip(rewards.unbind(1), names, strict=True):
        if torch.isinf(column).any():
            row = int(torch.isinf(column).nonzero()[0])
            raise DataError(
                f"reward '{name}' of completion {row} of the batch is {column[row].item()}: expected a number"
            )
    nothing = rewards.isnan().all(dim=1)
    if nothing.any():
        row = int(nothing.nonzero()[0])
        raise DataError(
            f"completion {row} of the batch has no reward: {', '.join(names)} gave None or NaN: return a number from "
            "at least one of them, e.g. 0.0 for what cannot be judged"
        )


def _failure(name: str, batch: dict[str, Any], error: Exception) -> DataError:
    return DataError(f"reward function '{name}' raised {type(error).__name__}: {error}; {_described(batch)}")


def _rewards(name: str, found: Any, batch: dict[str, Any]) -> list[float | None]:
    count = len(batch["completions"])
    is_list = hasattr(found, "__len__") and not isinstance(found, str)
    if not is_list or len(found) != count:
        shape = f"{len(found)} values" if is_list else repr(found)
        raise DataError(
            f"reward function '{name}' returned {shape}: expected a list of {count} numbers, one for each "
            f"completion; {_described(batch)}"
        )
    rewards: list[float | None] = []
    for row, reward in enumerate(found):
        if reward is None:
            rewards.append(None)
            continue
        try:
            value = float(reward)
        except (TypeError, ValueError) as error:
            raise _wrong(name, reward, row, batch) from error
        if not math.isfinite(value):
            raise _wrong(name, reward, row, batch)
        rewards.append(value)
    return rewards


def _wrong(name: str, reward: Any, row: int, batch: dict[str, Any]) -> DataError:
    return DataError(
        f"reward function '{name}' returned {reward!r} for completion {row}: expected a finite number, or None where "
        f"it has nothing to say; {_described(batch, row)}"
    )


def _described(batch: dict[str, Any], row: int = 0) -> str:
    """The batch in few words: its size, and a prompt with its completion."""
    prompt, completion = (_short(batch[key][row]) for key in ("prompts", "completions"))
    return f"batch of {len(batch['completions'])}, prompt {row}: {prompt}, completion: {completion}"


def _short(value: Any, longest: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= longest else f"{text[:longest]}..."
