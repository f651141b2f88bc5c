"""What the processes of one run do together: the first one writes, all of them decide alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from narrowgauge.distributed import Layout, agreement, layout
from narrowgauge.distributed.layout import GroupReducer
from narrowgauge.errors import ConfigError, NarrowgaugeError, ProcessError
from narrowgauge.ops.reduce import any_of
from narrowgauge.train.sections import ParallelConfig

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The processes of a run. layout: how the model is spread over them; None: one process.

    Every method is a collective: all ranks call it, in the same order.
    """

    layout: Layout | None = None

    @classmethod
    def of(cls, config: ParallelConfig, device: torch.device) -> Ranks:
        """The processes that the configuration asks for. Raises ConfigError where they are not there."""
        if not dist.is_initialized():
            if config.ranks == 1:
                return cls()
            raise ConfigError(
                f"parallel: expected {config.ranks} processes ({config}), found one: start the command with "
                f"`torchrun --nproc-per-node {config.ranks} -m narrowgauge train ...`"
            )
        sizes = {"data": config.data, "shard": config.shard, "tensor": config.tensor, "pipeline": config.pipeline}
        return cls(layout(**sizes, device_type=device.type))

    def check_same(self, values: Mapping[str, Any]) -> None:
        """Raise ProcessError, with keys, values and ranks, where the processes were given different ones.

        values: nested, fit for JSON. All processes would go by the first one's, which is not what was asked for.
        """
        if self.layout is None:
            return
        try:
            agreement.check({agreement.EVERYONE: _flat(values)})
        except ProcessError as error:
            error.is_told_elsewhere = not self.is_first
            raise

    @property
    def is_first(self) -> bool:
        """True on the process that writes the run's folder and renders its events."""
        return self.layout is None or dist.get_rank() == 0

    @property
    def batch_rank(self) -> int:
        """This process's place among those that read different sequences."""
        return 0 if self.layout is None else self.layout.batch_rank

    @property
    def batch_ranks(self) -> int:
        """Processes that read different sequences."""
        return 1 if self.layout is None else self.layout.batch_ranks

    def from_first(self, function: Callable[[], T]) -> T:
        """What `function` gives on the first process, on all of them; what it raises there, all raise."""
        if self.layout is None:
            return function()
        answer: list[Any] = [None, None]
        failure: Exception | None = None
        if self.is_first:
            try:
                answer = [function(), None]
            except Exception as error:
                failure = error
                answer = [None, (type(error), str(error))]
        dist.broadcast_object_list(answer, src=0)
        if failure is not None:
            raise failure
        if answer[1] is not None:
            raise _told_elsewhere(*answer[1])
        return answer[0]

    def opened_by_first(self, function: Callable[[], T], elsewhere: T) -> T:
        """What `function` opens on the first process; `elsewhere` on the others. What it raises there, all raise."""
        opened: list[T] = []
        self.from_first(lambda: opened.append(function()))
        return opened[0] if opened else elsewhere

    def together(self, function: Callable[[], T]) -> T:
        """`function` on every process; where it raises on one, all raise, and the first of the run tells it.

        Nothing in it may communicate.
        """
        if self.layout is None:
            return function()
        value: T | None = None
        failure: Exception | None = None
        try:
            value = function()
        except Exception as error:
            failure = error
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, None if failure is None else (type(failure), str(failure)))
        failed = [rank for rank, each in enumerate(found) if each is not None]
        if not failed:
            return value  # type: ignore[return-value]
        if self.is_first and failure is not None:
            raise failure
        kind, message = found[failed[0]]
        raise _told_elsewhere(kind, message) if not self.is_first else _as_ours(kind, f"rank {failed[0]}: {message}")

    def first_then_others(self, function: Callable[[], T]) -> T:
        """`function` on every process, on the others once the first has made what they find in its cache."""
        if self.layout is None:
            return function()
        made: list[T] = []
        self.from_first(lambda: made.append(function()))
        return made[0] if self.is_first else function()

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any process."""
        return flag if self.layout is None else any_of(flag, GroupReducer(None), self.layout.mesh.device_type)

    def mean(self, value: float) -> float:
        """The mean over processes that read different sequences, taken in the same order on all."""
        return self.sums([value])[0] / self.batch_ranks

    def sums(self, values: list[float]) -> list[float]:
        """Sums over processes that read different sequences."""
        if self.layout is None or self.batch_ranks == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.layout.mesh.device_type)
        dist.all_reduce(total, group=self.layout.batch)
        return total.tolist()

    def text(self, text: str) -> str:
        """The text of the first process that has any."""
        if self.layout is None:
            return text
        found: list[Any] = [""] * dist.get_world_size()
        dist.all_gather_object(found, text)
        return next((each for each in found if each), "")


ONE = Ranks()


def _as_ours(kind: type[Exception], message: str) -> NarrowgaugeError:
    """Another process's error."""
    return kind(message) if issubclass(kind, NarrowgaugeError) else NarrowgaugeError(message)


def _told_elsewhere(kind: type[Exception], message: str) -> NarrowgaugeError:
    """The first process's error, which it tells."""
    error = _as_ours(kind, message)
    error.is_told_elsewhere = True
    return error


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by the keys that a command line has for them, e.g. "optimizer.lr"."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def finite_name(norm: float, name: Callable[[], str], ranks: Ranks) -> str:
    """The first bad parameter's name where the norm, which all ranks share, is not finite; else ""."""
    return "" if math.isfinite(norm) else ranks.text(name())
