"""What a recipe did, for transformers' `Trainer` and its trackers: steps skipped, and what precision cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from transformers import TrainerCallback

from narrowgauge.integrations.callback_journal import CallbackJournal
from narrowgauge.observe.observation import Observation, Precision
from narrowgauge.observe.shares import shares_by_role, worst_by_role
from narrowgauge.optim.replace import inmost
from narrowgauge.optim.scaler import LossScaler
from narrowgauge.recipes.spec import Recipe

_LOGGED = ("sqnr_db", "lost", "zero")  # of the worst layer; others are means of shares


class RecipeCallback(TrainerCallback):
    """For transformers' `Trainer` with a prepared model and optimizer; `RecipeCallback().add_to(trainer)`.

    - A step that was skipped for gradients that are not finite does not advance the scheduler.
    - Every `statistics_every` optimizer steps (0: never) it looks at what precision does (`narrowgauge.observe`), and
      adds to the next logged loss `saturated/ROLE` and `flushed/ROLE` of the products' operands, mean shares of the
      values cast in [0, 1]; and of the worst layer `sqnr_db/ROLE`, `zero/grad` (gradients that are zero) and
      `lost/param` (updates that changed nothing). Exponents are counted every `histograms_every` steps; None: at every
      fourth sample.
    - It writes `journal.jsonl` into the trainer's output directory, unless `journal` is False: what was logged, and
      what the samples showed layer by layer. `narrowgauge report OUTPUT_DIR` shows it.
    - With the loss it logs `skipped_steps`, all so far, once there are any, and `loss_scale` where there is one.

    Given to the trainer as one of `callbacks`, it does the same, but trackers that the arguments name come before it
    and miss what it adds; `trainer.state.log_history` has it either way.
    """

    def __init__(self, statistics_every: int = 100, histograms_every: int | None = None, journal: bool = True) -> None:
        self.statistics_every, self.histograms_every = statistics_every, histograms_every
        self.writes_journal = journal
        self.journal: CallbackJournal | None = None
        self.recipe: Recipe | None = None  # the trainer's, where it has one
        self.skipped_steps = 0
        self._has_skipped = False
        self._observation: Observation | None = None
        self._next: dict[str, float] = {}
        self._scaler: LossScaler | None = None

    def add_to(self, trainer: Any) -> RecipeCallback:
        """Listen before the trackers do; returns this callback."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def note(self, values: dict[str, float]) -> None:
        """Log these with the next loss."""
        self._next |= values

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stop()  # of a run that an error ended
        self.skipped_steps, self._next = 0, {}

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stop()

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if model is None:
            return
        optimizer = kwargs.get("optimizer")
        if self._observation is None:  # before the first step all is prepared, in several processes, too
            self._observation = Observation(model, optimizer, self.statistics_every, self.histograms_every)
            if self.journal is not None:
                self.journal.complete_header(model, optimizer, self.recipe)
            elif self.writes_journal and state.is_world_process_zero:
                self.journal = CallbackJournal.begin(
                    Path(args.output_dir), state.global_step, model, optimizer, self.recipe
                )
        step = state.global_step + 1
        if self._observation.due(step):
            self._observation.begin(step)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        scaler = getattr(optimizer, "scaler", None)
        self._scaler = scaler if isinstance(scaler, LossScaler) and scaler.is_enabled() else None
        self._has_skipped = optimizer is not None and was_skipped(optimizer)
        self.skipped_steps += self._has_skipped
        if optimizer is not None:
            optimizer._is_overflow = self._has_skipped  # where accelerate notes it
        step = state.global_step + 1
        if self.journal is not None and optimizer is not None and not self._has_skipped:
            self.journal.stepped(step, kwargs["model"], optimizer)
        found = self._read()
        if found is not None:
            self._note_sample(found)
            if self.journal is not None:
                self.journal.sampled(step, found)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self._complete(logs, state)
        if logs and self.journal is not None:
            self.journal.logged(state.global_step, logs, self._has_skipped)

    def _complete(self, logs: dict[str, Any], state: Any) -> None:
        """Add what was noted to the figures of a step."""
        more: dict[str, float] = dict(self._next)
        if self.skipped_steps:
            more["skipped_steps"] = self.skipped_steps
        if self._scaler is not None:
            more["loss_scale"] = self._scaler.get_scale()
        self._next = {}
        logs.update(more)
        if state.log_history:
            state.log_history[-1].update(more)

    def _note_sample(self, found: Precision) -> None:
        shares = shares_by_role(found.layers)
        self.note({f"{measure}/{role}": share for role, of in shares.items() for measure, share in of.items()})
        worst = worst_by_role(found.layers)
        self.note({f"{name}/{role}": of[name] for role, of in worst.items() for name in _LOGGED if name in of})

    def _read(self) -> Precision | None:
        if self._observation is None:
            return None
        self._observation.end()
        return self._observation.read()

    def _stop(self) -> None:
        if self._observation is not None:
            self._observation.end()
            self._observation = None
        if self.journal is not None and self.journal.owns_steps:
            self.journal.close()
            self.journal = None


def was_skipped(optimizer: Optimizer) -> bool:
    """Whether the last step of an optimizer, or of the one that accelerate wraps, changed nothing."""
    return bool(getattr(inmost(optimizer), "step_was_skipped", False))
