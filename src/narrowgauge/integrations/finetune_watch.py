"""What a trainer reports, into the journal and to the listener; a signal ends the run after a checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from narrowgauge.distributed.wire import SINCE_STEP
from narrowgauge.errors import DivergenceError
from narrowgauge.integrations.finetune_config import FinetuneConfig, GRPOConfig
from narrowgauge.integrations.finetune_events import HeldOut, Started, Stepped
from narrowgauge.observe.journal_rows import Row
from narrowgauge.observe.journal_writer import JournalWriter
from narrowgauge.optim.guard import MAX_SKIPS
from narrowgauge.train.events import CheckpointSaved, Interrupting, OnEvent, Warned
from narrowgauge.train.ranks import ONE, Ranks
from narrowgauge.train.signals import Interruption

_EVALUATION = "eval_"  # how transformers begins the names of figures on held-out data
_RATE = "learning_rate"
_TOKENS = "num_tokens"


class NothingLeft(Exception):
    """A run that goes on has all of its steps behind it."""


class Watch(TrainerCallback):
    """Turns a trainer's log into rows and events. `trainer` is set once it is made."""

    journal: JournalWriter | None = None  # set before the first step, on the first of several processes only

    def __init__(self, config: FinetuneConfig, run_dir: Path, on_event: OnEvent, ranks: Ranks = ONE) -> None:
        self.config, self.run_dir, self.on_event, self.ranks = config, run_dir, on_event, ranks
        self.on_progress: Callable[[int], None] = lambda step: None  # called after each step and batch held out
        self.interruption = Interruption(self._interrupted)
        self.trainer: Any = None
        self.resumed_from: Path | None = None
        self.figures: dict[str, float] = {}  # of the last step
        self.held_out: dict[str, float] | None = None
        self.evaluated_at: int | None = None  # the last step after which held-out examples were read
        self.step = 0
        self.wire: int | None = None  # bytes that this process has sent in the last step
        self.tokens_before = 0.0  # in the steps before the checkpoint: TRL counts from there again
        self._began_s = time.monotonic()
        self._bad = 0

    @property
    def is_ending(self) -> bool:
        """Whether a signal asked this process to end."""
        return self.interruption.requested

    def warn(self, message: str) -> None:
        """Say what the run survives, and write it down."""
        self._write("warning", message=message)
        self.on_event(Warned(step=self.step, message=message))

    def continue_from(self, checkpoint: Path, rows: list[Row]) -> None:
        """Go on after `rows`, those of the journal up to a checkpoint."""
        self.resumed_from = checkpoint
        if isinstance(self.config, GRPOConfig):  # TRL keeps its count in the trainer's state, and goes on with it
            return
        self.tokens_before = next((row[_TOKENS] for row in reversed(rows) if _TOKENS in row), 0.0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """The model is prepared: say what is trained."""
        trainer, self.step = self.trainer, state.global_step
        evaluated = trainer.eval_dataset
        self.on_event(
            Started(
                step=self.step,
                run_dir=self.run_dir,
                config=self.config,
                steps=state.max_steps,
                parameters=sum(p.numel() for p in trainer.model.parameters()),
                examples=len(trainer.train_dataset),
                eval_examples=0 if evaluated is None else len(evaluated),
                report=trainer.conversion_report,
                device=args.device.type if self.ranks.layout is None else f"{args.world_size} x {args.device.type}",
                resumed_from=self.resumed_from,
            )
        )
        self.start_clock()

    def start_clock(self) -> None:
        """A step begins."""
        self._began_s = time.monotonic()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Raise NothingLeft where all steps are done: transformers looks whether they are after each step only."""
        if state.global_step >= state.max_steps:
            raise NothingLeft

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Stop where a signal asked for it, after a checkpoint."""
        self.step = state.global_step
        self.on_progress(self.step)
        if self.ranks.any(self.interruption.requested):  # a signal reaches the processes one after the other
            control.should_save = control.should_training_stop = True

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Note what the step has sent, before more is sent."""
        self.wire = SINCE_STEP.bytes if self.ranks.layout is not None else None

    def on_prediction_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """A batch of held-out examples was read."""
        self.on_progress(self.step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **others: Any) -> None:
        """Write a step's figures, or an evaluation's."""
        figures = {key: float(value) for key, value in (logs or {}).items() if isinstance(value, int | float)}
        if any(key.startswith(_EVALUATION) for key in figures):
            self.evaluated({key.removeprefix(_EVALUATION): figures[key] for key in figures if key != "epoch"})
        elif "loss" in figures:
            self.stepped(state.global_step, state.max_steps, figures)

    def stepped(self, step: int, steps: int, figures: dict[str, float]) -> None:
        """One step is done. Raises DivergenceError where the loss has not been finite for many steps in a row."""
        now_s = time.monotonic()
        seconds, self._began_s = now_s - self._began_s, now_s
        figures = {("lr" if key == _RATE else key): value for key, value in figures.items()}
        self._add_earlier(figures)
        self.figures, self.step = figures, step
        self._write("step", **figures, seconds=seconds)
        self.on_event(Stepped(step=step, steps=steps, seconds=seconds, figures=figures))
        if math.isfinite(figures["loss"]):
            self._bad = 0
            return
        self._bad += 1
        if self._bad == 1:
            self.warn(f"the loss of step {step} is {figures['loss']}")
        if self._bad >= MAX_SKIPS:
            raise DivergenceError(
                f"step {step}: expected finite losses, found none for {self._bad} steps in a row: lower the learning "
                f"rate ({self.config.learning_rate:g}), or look at the data"
            )

    def evaluated(self, figures: dict[str, float]) -> None:
        """The held-out examples were read."""
        loss = figures.get("loss")
        if self.config.task == "sft" and loss is not None:
            figures["perplexity"] = math.exp(loss) if loss < 709 else math.inf  # exp(709.8) is the largest double
        self._add_earlier(figures)
        self.held_out, self.evaluated_at = figures, self.step
        self._write("evaluation", **figures)
        self.on_event(HeldOut(step=self.step, figures=figures))
        self._began_s = time.monotonic()

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Say where the checkpoint is; the journal is on the disk before anyone resumes from it."""
        self.saved(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def saved(self, path: Path) -> None:
        """A checkpoint was written."""
        self.on_progress(self.step)
        if self.journal is not None:
            self.journal.sync()
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        now_s = time.monotonic()
        seconds, self._began_s = now_s - self._began_s, now_s
        self.on_event(CheckpointSaved(step=self.step, path=path, bytes=size, seconds=seconds))

    def _add_earlier(self, figures: dict[str, float]) -> None:
        if _TOKENS in figures:
            figures[_TOKENS] += self.tokens_before

    def _write(self, kind: str, **fields: Any) -> None:
        if self.journal is not None:
            self.journal.write(kind, step=self.step, **fields)

    def _interrupted(self, signal: str) -> None:
        self.on_event(Interrupting(step=self.step, signal=signal))
