"""torch.distributed.pipelining's schedules by name: who runs which stages, and how many micro-batches they need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from narrowgauge.distributed.stages import Span
from narrowgauge.errors import ConfigError, NarrowgaugeError, closest


@dataclass(frozen=True)
class Schedule:
    """One of torch's schedules.

    kind: torch's class of it, by name. several: whether a rank may have more than one stage. default: how many it has
    where nobody says. turns: whether stages run down the ranks and up again, two a rank, in place of round and round.
    puts_off: whether weight gradients are a pass of their own (zero bubble). fills: whether it needs as many
    micro-batches as there are stages. in_rounds: whether micro-batches come in rounds of equal size.
    """

    name: str
    kind: str
    several: bool = False
    default: int = 1
    turns: bool = False
    puts_off: bool = False
    fills: bool = False
    in_rounds: bool = False

    def stages_of(self, rank: int, ranks: int, per_rank: int) -> list[int]:
        """The stages of a rank, in order."""
        if self.turns:
            return [rank, 2 * ranks - 1 - rank]
        return [rank + ranks * turn for turn in range(per_rank)]

    def rank_of(self, stage: int, ranks: int) -> int:
        """The rank of a stage."""
        return min(stage, 2 * ranks - 1 - stage) if self.turns else stage % ranks

    def check_stages(self, per_rank: int) -> None:
        """Raise ConfigError for a number of stages a rank that the schedule does not take."""
        if isinstance(per_rank, bool) or not isinstance(per_rank, int) or per_rank < 1:
            raise ConfigError(f"stages_per_rank={per_rank!r}: expected a whole number of at least 1")
        if per_rank == self.default or (self.several and not self.turns):
            return
        raise ConfigError(
            f"schedule '{self.name}' has {self.default} stage{'s' if self.default > 1 else ''} a rank, found "
            f"stages_per_rank={per_rank}: leave it out, or use schedule 'interleaved'"
        )

    def check_micro_batches(self, micro_batches: int, ranks: int) -> None:
        """Raise ConfigError for a number of micro-batches that the schedule cannot run."""
        if self.fills and micro_batches < ranks:
            raise ConfigError(
                f"schedule '{self.name}' expects at least as many micro-batches a step as there are pipeline stages, "
                f"{ranks}, found {micro_batches}: raise accumulation to {ranks} or more, or use schedule 'gpipe'"
            )
        rounds = max(1, micro_batches // ranks)
        if self.in_rounds and micro_batches % rounds:
            raise ConfigError(
                f"schedule '{self.name}' expects rounds of equal size, found {micro_batches} micro-batches a step for "
                f"{ranks} ranks: use a multiple of {ranks}"
            )


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("gpipe", "ScheduleGPipe"),
        Schedule("1f1b", "Schedule1F1B", fills=True),
        Schedule("interleaved", "ScheduleInterleaved1F1B", several=True, default=2, in_rounds=True),
        Schedule("zero_bubble", "ScheduleInterleavedZeroBubble", True, puts_off=True, in_rounds=True),
        Schedule("zbv", "ScheduleZBVZeroBubble", True, 2, turns=True, puts_off=True),
    )
}


def schedule_named(name: str) -> Schedule:
    """Raises ConfigError for an unknown name, e.g. those of torch's schedules that are not offered."""
    found = SCHEDULES.get(name) if isinstance(name, str) else None
    if found is None:
        raise ConfigError(
            f"pipeline schedule {name!r} is not offered: expected {', '.join(SCHEDULES)}{closest(str(name), SCHEDULES)}"
        )
    return found


def make_stage(
    module: nn.Module,
    span: Span,
    device: torch.device,
    group: ProcessGroup,
    reads: Tensor,
    sends: Tensor,
    take_gradients: Callable[[], Callable[[], None]] | None,
) -> Any:
    """torch's stage. Examples of what it reads and sends are given, so that it learns no shapes by running."""
    from torch.distributed.pipelining import PipelineStage  # on first use: it takes as long to load as half of torch

    return PipelineStage(
        module,
        span.index,
        span.stages,
        device,
        input_args=reads,
        output_args=sends,
        group=group,
        dw_builder=take_gradients,
    )


def make(schedule: Schedule, stages: list[Any], micro_batches: int, loss: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """torch's schedule over this rank's stages. loss: of what the last stage gives and the targets."""
    from torch.distributed import pipelining

    stage = stages if schedule.several else stages[0]
    return getattr(pipelining, schedule.kind)(stage, micro_batches, loss_fn=loss, scale_grads=False)


@contextmanager
def own_errors() -> Iterator[None]:
    """Our errors as they were raised, in place of those that torch's schedules make of them."""
    try:
        yield
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, NarrowgaugeError):
                raise cause from None
            cause = cause.__cause__
        raise
