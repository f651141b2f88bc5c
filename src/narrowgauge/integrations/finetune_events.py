"""What fine-tuning tells its caller beside the events of `train.events`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from narrowgauge.integrations.finetune_config import FinetuneConfig
from narrowgauge.layers.report import ConversionReport
from narrowgauge.observe.ledger import Ledger
from narrowgauge.train.events import Event, Status


@dataclass(frozen=True, kw_only=True)
class Noted(Event):
    """What a user is to know of the model, the tokenizer or the data, e.g. which token pads."""

    message: str


@dataclass(frozen=True, kw_only=True)
class Started(Event):
    """The model is prepared and the first step comes next; `step` is 0, or the checkpoint's on resume."""

    run_dir: Path
    config: FinetuneConfig
    steps: int
    parameters: int
    examples: int
    eval_examples: int
    report: ConversionReport
    device: str
    resumed_from: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Stepped(Event):
    """One optimizer step. figures: what the trainer logs, such as loss, grad_norm, reward, kl."""

    steps: int
    seconds: float
    figures: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class HeldOut(Event):
    """An evaluation on held-out examples; figures as in `Stepped`, without a prefix."""

    figures: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Ended(Event):
    """The last event of a run that did not raise. figures: of the last step; held_out: of the last evaluation.

    ledgers: bytes by role of each model that is trained or asked. model: the Hugging Face directory of the trained
    model; None where the run was interrupted.
    """

    status: Status
    run_dir: Path
    steps: int
    seconds: float
    figures: dict[str, float]
    held_out: dict[str, float] | None
    ledgers: dict[str, Ledger]
    model: Path | None
