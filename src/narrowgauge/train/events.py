"""What training tells its caller: `run` prints nothing, it emits these.

Every event carries `step`, the number of optimizer steps finished when it was emitted (skipped steps count).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge.train.guard_decisions import Decision

if TYPE_CHECKING:
    from narrowgauge.layers.report import ConversionReport
    from narrowgauge.observe.ledger import Ledger
    from narrowgauge.train.config import TrainConfig


class Status(StrEnum):
    """How a run ended. INTERRUPTED: by SIGINT or SIGTERM, after a checkpoint; the command line exits with 130."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events."""

    step: int


@dataclass(frozen=True, kw_only=True)
class Preparing(Event):
    """Something slow is about to happen before the first step: reading text, training the tokenizer, compiling."""

    what: str


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """The model is built and the first step comes next; `step` is 0, or the checkpoint's on resume."""

    run_dir: Path
    config: TrainConfig
    steps: int
    parameters: int
    tokens_per_step: int
    train_tokens: int
    report: ConversionReport
    device: str
    resumed_from: Path | None = None


@dataclass(frozen=True, kw_only=True)
class StepDone(Event):
    """One optimizer step. `loss` is the mean over the step's tokens, `grad_norm` the norm before clipping, unscaled.

    A skipped step has `skipped=True`; its loss and norm may be NaN or infinite. `statistics` is None except on sampled
    steps: {role: {"saturated": share, "flushed": share}}, means over layers, shares in [0, 1]. So is `precision`:
    {layer: {role: {measure: value}}}, see docs/journal.md. `bytes_by_role`: as counted last.
    """

    steps: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    tokens_per_s: float
    skipped: bool
    loss_scale: float
    statistics: dict[str, dict[str, float]] | None = None
    precision: dict[str, dict[str, dict[str, float]]] | None = None
    bytes_by_role: Mapping[str, int] | None = None


@dataclass(frozen=True, kw_only=True)
class RecipeChanged(Event):
    """From the next step on the model runs by another recipe of its schedule; `report` says what its layers run in."""

    before: str
    after: str
    report: ConversionReport


@dataclass(frozen=True, kw_only=True)
class Skipped(Event):
    """The step's gradient was not finite: nothing was changed. `parameter` is the first one with a bad gradient."""

    consecutive: int
    max_skips: int
    parameter: str
    loss_scale: float


@dataclass(frozen=True, kw_only=True)
class GuardActed(Event, Decision):
    """The guard decided something."""


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """Validation: mean loss in nats a token, perplexity, bits a byte of text."""

    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is on the disk, under its final name."""

    path: Path
    bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Warned(Event):
    """Something went wrong that the run survives, e.g. a full disk during a save."""

    message: str


@dataclass(frozen=True, kw_only=True)
class Interrupting(Event):
    """A signal arrived: the step in hand is finished and saved, then the run stops. A second SIGINT aborts at once."""

    signal: str


@dataclass(frozen=True, kw_only=True)
class Sampled(Event):
    """Text that the trained model wrote after `prompt`."""

    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Finished(Event):
    """The last event of a run that did not raise. `ledger` holds bytes per role; `evaluation` the last validation."""

    status: Status
    run_dir: Path
    seconds: float
    tokens: int
    tokens_per_s: float
    skipped_steps: int
    last_loss: float
    evaluation: Evaluated | None = None
    ledger: Ledger | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """What `run` and `resume` return."""

    status: Status
    step: int
    run_dir: Path
    last_loss: float
    evaluation: Evaluated | None = None
    ledger: Ledger | None = None
    extra: dict[str, Any] = field(default_factory=dict)


OnEvent = Callable[[Event], None]


def ignore(event: Event) -> None:
    """A listener that drops every event."""
