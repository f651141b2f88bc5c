"""One process's part of a run: from its beginning or a checkpoint to its end, a signal, or divergence."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from narrowgauge.errors import CheckpointError
from narrowgauge.layers.report import report
from narrowgauge.observe.journal import Contents
from narrowgauge.observe.ledger import Ledger, SavedActivations, ledger
from narrowgauge.observe.observation import Precision
from narrowgauge.observe.shares import shares_by_role
from narrowgauge.train import events
from narrowgauge.train.assemble import Parts
from narrowgauge.train.checkpoint import load
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.evaluate import evaluate
from narrowgauge.train.events import Evaluated, OnEvent, Result, Status
from narrowgauge.train.folder import size_bytes
from narrowgauge.train.guard_run import RunGuard
from narrowgauge.train.run_folder import RunFolder
from narrowgauge.train.run_journal import RunJournal, is_recipe, unreadable
from narrowgauge.train.sample import sample_text
from narrowgauge.train.save_handle import SaveHandle
from narrowgauge.train.schedule import learning_rate
from narrowgauge.train.signals import Interruption
from narrowgauge.train.step import StepResult, optimizer_step
from narrowgauge.train.watch import Watch


class Session:
    """Steps, validations and checkpoints in order, the journal beside them. `begin`, then `train`, then `close`."""

    def __init__(self, config: TrainConfig, folder: RunFolder, on_event: OnEvent, parts: Parts) -> None:
        self.config, self.folder, self.emit, self.parts = config, folder, on_event, parts
        self.step = 0
        self.watch = Watch(config)
        self.evaluation: Evaluated | None = None
        self.ledger: Ledger | None = None
        self.train_s = 0.0
        self.ranks = parts.ranks
        sequences = config.batch_size * config.accumulation * self.ranks.batch_ranks
        self.tokens_per_step = sequences * parts.stream.sequence_length
        self._steps_taken = 0  # also those that the guard has gone back over
        self.journal = RunJournal(folder.journal, on_event)
        self.guard = RunGuard(self)
        self.observation = self.guard.observation()
        self._saving: tuple[SaveHandle, int, float] | None = None  # what is written, of which step, since when

    def begin(self, start: int | None) -> None:
        """Open the journal, take in the checkpoint of step `start` if there is one, and say what will be trained.

        Of several ranks the first has the journal; what follows from it, all take in.
        """
        path = None if start is None else self.folder.checkpoint(start)
        contents = self.ranks.from_first(lambda: self.journal.open(start, self.parts))
        if contents is not None:
            self.take_in(contents)
            if not is_recipe(contents.header.get("recipe"), self.parts.recipe):
                self.journal.warn("the recipe is not the one that this run began with: from here on it is another run")
        if path is not None:
            # `RunFolder.choose` has verified it
            extra = load(path, self.parts.model, self.parts.optimizer, is_verified=True)
            self.guard.load(path, extra)
            self.parts.load_state(extra)
            self.step = self.journal.step = int(extra["step"])
            self.journal.resumed()
        for removed in self.folder.remove_after(self.step) if self.ranks.is_first else []:
            self.journal.warn(f"{removed} was removed: the run goes on from step {self.step}")
        self.emit(
            events.RunStarted(
                step=self.step,
                run_dir=self.folder.path,
                config=self.config,
                steps=self.config.steps,
                parameters=self.parts.parameters,
                tokens_per_step=self.tokens_per_step,
                train_tokens=len(self.parts.dataset.train.tokens),
                report=report(self.parts.model),
                device=str(self.parts.device),
                resumed_from=path,
            )
        )

    def train(self, interruption: Interruption, on_progress: Callable[[int], None] = lambda step: None) -> Result:
        """Go on to the last step, or to the end of the step in which a signal arrives.

        on_progress: called after each step, validation and checkpoint, with the number of the step.
        """
        config = self.config
        evaluated_step = self.evaluation.step if self.evaluation else 0
        if self.step > evaluated_step and self._is_due(config.eval_every):
            self._evaluate()  # the signal that ended the run at this step left it out
        while self.step < config.steps:
            went_back = self._step()
            on_progress(self.step)
            if went_back:
                continue
            is_last = self.step == config.steps
            requested = self.ranks.any(interruption.requested)  # a signal reaches the ranks one after the other
            if is_last or (self._is_due(config.eval_every) and not requested):
                self._evaluate()
                requested = self.ranks.any(interruption.requested)  # one may have arrived meanwhile
                on_progress(self.step)
            stops = requested and not is_last
            if stops or is_last or self._is_due(config.save_every):
                self._save(must_succeed=stops or is_last)
                on_progress(self.step)
            if stops:
                return self._finish(Status.INTERRUPTED)
        self._sample()
        return self._finish(Status.FINISHED)

    def close(self) -> None:
        """Let the save under way end, and close the journal; a second call does nothing."""
        self.end_save()
        self.journal.close()

    def on_signal(self, name: str) -> None:
        """Say that the run will stop: called from the signal handler."""
        self.emit(events.Interrupting(step=self.step, signal=name))

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _step(self) -> bool:
        """Take a step. True where the guard has gone back to an earlier one."""
        config, parts = self.config, self.parts
        if self._saving is not None and self._saving[0].done:
            self.end_save()
        lr = learning_rate(self.step, config.steps, config.optimizer.lr, config.schedule)
        for group in parts.optimizer.param_groups:
            group["lr"] = lr
        self.step += 1
        self.journal.step = self.step
        begin_s = time.perf_counter()
        batches = [parts.stream.next() for _ in range(config.accumulation)]
        batches = [(ids.to(parts.device), targets.to(parts.device)) for ids, targets in batches]
        # torch.compile would compile a second model for the hooks that measure
        measures_activations = self.ledger is None and not config.compile
        measured = SavedActivations(parts.model) if measures_activations else None
        with self.observation.step(self.step):
            result = optimizer_step(
                parts.model,
                parts.optimizer,
                parts.scaler,
                batches,
                config.clip,
                first_forward=measured,
                before_zero_grad=lambda: self._count_bytes(measured),
                ranks=self.ranks,
                pipeline=parts.pipeline,
            )
        seconds = time.perf_counter() - begin_s
        precision = self.observation.read()
        self._record(result, lr, seconds, precision)
        self._note_recipe()
        return self.guard.end(result, precision)

    def _count_bytes(self, measured: SavedActivations | None) -> None:
        """Count bytes by role, in the first step and in those that are looked at."""
        if self.ledger is None or self.observation.due(self.step):
            earlier = None if self.ledger is None else self.ledger.activation
            activation = measured.bytes if measured else earlier
            self.ledger = ledger(self.parts.model, self.parts.optimizer, activation=activation)

    def _note_recipe(self) -> None:
        """Say so where the step that has just ended was the last by its recipe: the model has taken up the next."""
        recipe = self.parts.recipe
        if any(step == self.step for step, _ in recipe.schedule):
            names = {"before": recipe.at(self.step - 1).name, "after": recipe.at(self.step).name}
            self.journal.write("recipe", **names)
            self.emit(events.RecipeChanged(step=self.step, report=report(self.parts.model), **names))

    def _eager(self) -> AbstractContextManager[Any]:
        """A context in which a compiled model runs as it was written."""
        return torch.compiler.set_stance("force_eager") if self.config.compile else nullcontext()

    def _record(self, result: StepResult, lr: float, seconds: float, precision: Precision | None) -> None:
        """Put a step into the journal and the events, and stop a run that goes nowhere. Raises DivergenceError."""
        self.train_s += seconds
        self._steps_taken += 1
        loss_scale = float(self.parts.scaler.get_scale())
        fields: dict[str, Any] = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "tokens": self.step * self.tokens_per_step,
            "tokens_per_s": self.tokens_per_step / seconds,
            "skipped": result.skipped,
            "loss_scale": loss_scale,
        }
        statistics = None if precision is None else shares_by_role(precision.layers)
        extra: dict[str, Any] = {} if statistics is None else {"statistics": statistics}
        if result.bad_parameter:
            extra |= {"bad_parameter": result.bad_parameter}
        self.journal.write("step", **fields, **extra)
        if self.ledger is not None:
            self.journal.bytes(self.ledger)
        if precision is not None:
            self.journal.precision(precision)
        self.emit(
            events.StepDone(
                step=self.step,
                steps=self.config.steps,
                seconds=seconds,
                statistics=statistics,
                precision=None if precision is None else precision.layers,
                bytes_by_role=None if self.ledger is None else self.ledger.roles,
                **fields,
            )
        )
        self.watch.note(self.step, result.loss, result.skipped)
        if result.skipped:
            self.emit(
                events.Skipped(
                    step=self.step,
                    consecutive=self.watch.skips_in_a_row,
                    max_skips=self.config.max_skips,
                    parameter=result.bad_parameter,
                    loss_scale=loss_scale,
                )
            )
        self.watch.check(result.bad_parameter, loss_scale)

    def _evaluate(self) -> None:
        begin_s = time.perf_counter()
        found = evaluate(
            self.parts.model,
            self.parts.dataset,
            batch_size=self.config.batch_size,
            sequence_length=self.parts.stream.sequence_length,
            batches=self.config.eval_batches,
            device=self.parts.device,
            ranks=self.ranks,
            loss_of=self.parts.pipeline.loss if self.parts.pipeline else None,
        )
        fields = {
            "loss": found.loss,
            "perplexity": found.perplexity,
            "bits_per_byte": found.bits_per_byte,
            "tokens": found.tokens,
        }
        self.journal.write("evaluation", **fields)
        self.evaluation = Evaluated(step=self.step, seconds=time.perf_counter() - begin_s, **fields)
        self.emit(self.evaluation)

    def _save(self, *, must_succeed: bool) -> None:
        """Write a checkpoint. Where the disk refuses it, warn and go on, unless it is the run's last word."""
        self.end_save()
        begin_s = time.perf_counter()
        asynchronous = self.config.save_async and not must_succeed
        try:
            self.journal.sync()  # the journal must never be behind a checkpoint
            state = self.parts.state() | self.guard.state()
            saved = self.folder.save(
                self.step, self.parts.model, self.parts.optimizer, asynchronous=asynchronous, **state
            )
        except (CheckpointError, OSError) as error:
            self.journal.warn(f"no checkpoint at step {self.step}: {error}")
            if must_succeed:
                raise CheckpointError(f"the run stopped without its last checkpoint: {error}") from error
            return
        if isinstance(saved, SaveHandle):
            self._saving = saved, self.step, begin_s
        else:
            self._note_saved(saved, self.step, begin_s)

    def save_now(self) -> None:
        """Write a checkpoint, and wait for it; where the disk refuses it, warn and go on."""
        self._save(must_succeed=False)
        self.end_save()

    def end_save(self) -> None:
        """Wait for the checkpoint that is being written beside training, and say whether it is there."""
        if self._saving is None:
            return
        (handle, step, begin_s), self._saving = self._saving, None
        try:
            self._note_saved(handle.wait(), step, begin_s)
        except (CheckpointError, OSError) as error:
            self.journal.warn(f"no checkpoint at step {step}: {error}")

    def _note_saved(self, path: Path, step: int, begin_s: float) -> None:
        self.folder.remove_before(step, self.config.keep_last, self.guard.trouble_since)
        seconds = time.perf_counter() - begin_s
        self.emit(events.CheckpointSaved(step=step, path=path, bytes=size_bytes(path), seconds=seconds))

    def _sample(self) -> None:
        prompt = self.config.sample_prompt
        if self.config.sample_tokens and self.parts.pipeline is None:  # a stage cannot write text
            parts = self.parts
            with self._eager():  # compiled code would be made anew for every length of the text
                text = sample_text(
                    parts.model, parts.dataset.tokenizer, prompt, self.config.sample_tokens, seed=self.config.seed
                )
            self.emit(events.Sampled(step=self.step, prompt=prompt, text=text))

    def _finish(self, status: Status) -> Result:
        tokens = self._steps_taken * self.tokens_per_step
        common: dict[str, Any] = {
            "status": status,
            "step": self.step,
            "run_dir": self.folder.path,
            "last_loss": self.watch.last_loss,
            "evaluation": self.evaluation,
            "ledger": self.ledger,
        }
        self.emit(
            events.Finished(
                seconds=self.train_s,
                tokens=tokens,
                tokens_per_s=tokens / self.train_s if self.train_s else 0.0,
                skipped_steps=self.watch.skipped_steps,
                **common,
            )
        )
        return Result(**common)

    def take_in(self, contents: Contents) -> None:
        """Rebuild from the journal what follows from the steps before the checkpoint."""
        try:
            for row in contents.of_kind("step"):
                self.watch.note(row["step"], row["loss"], row["skipped"])
            for row in contents.of_kind("evaluation")[-1:]:
                figures = {key: row[key] for key in ("step", "loss", "perplexity", "bits_per_byte", "tokens")}
                self.evaluation = Evaluated(seconds=0.0, **figures)
        except (KeyError, TypeError) as error:
            raise unreadable(self.folder.journal, error) from error
