"""The guard within a session: its rows and events, its state in checkpoints, and the way back to one of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge.errors import CheckpointError
from narrowgauge.observe.journal import Journal
from narrowgauge.observe.observation import Precision
from narrowgauge.optim.guard import StepGuard
from narrowgauge.train import events
from narrowgauge.train.checkpoint import load
from narrowgauge.train.guard import Guard
from narrowgauge.train.guard_decisions import Decision
from narrowgauge.train.guard_looks import Looks
from narrowgauge.train.step import StepResult
from narrowgauge.train.watch import Watch

if TYPE_CHECKING:
    from narrowgauge.train.session import Session

STATE = "guard"  # in a checkpoint's extra


class RunGuard:
    """Watches over the steps of a session, and leads it back where its losses ask for that."""

    def __init__(self, session: Session) -> None:
        config, parts = session.config, session.parts
        self._session = session
        self._guard = Guard(parts.model, parts.optimizer, parts.recipe, config.guard, go_back=self._go_back)

    def observation(self) -> Looks:
        """What looks at the session's steps: where the configuration says so, and where the guard is due."""
        config, parts = self._session.config, self._session.parts
        return Looks(self._guard, parts.model, parts.optimizer, config.statistics_every, config.histograms_every)

    @property
    def trouble_since(self) -> int:
        """The first step of losses in trouble that the run may yet go back for; 0: there are none."""
        return self._guard.trouble_since

    def end(self, result: StepResult, precision: Precision | None) -> bool:
        """After a step is in the journal. True where the run has gone back, and its next step is an earlier one."""
        session, before = self._session, self._session.step
        layers = None
        if self._guard.due(before):  # not where only the journal looks: decisions do not depend on its period
            layers = {} if precision is None else precision.layers
        loss_scale = float(session.parts.scaler.get_scale())
        decisions = self._guard.end(before, result.loss, skipped=result.skipped, loss_scale=loss_scale, layers=layers)
        for decision in decisions:
            self._tell(decision)
        went_back = session.step < before
        if went_back:
            session.save_now()  # so that whoever resumes goes on from here, and not into the same trouble
        return went_back

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of the guard."""
        return {} if self._guard.config.mode == "off" else {STATE: self._guard.state_dict()}

    def load(self, path: Path, extra: dict[str, Any]) -> None:
        """Go on from the checkpoint `path`, whose `extra` this is, and which model and optimizer have been loaded from.

        A run that is resumed with its guard off goes on by its recipe.
        """
        parts, state = self._session.parts, extra.get(STATE)
        if state is None:
            return
        if self._guard.config.mode == "off":
            if state["casts"] or state["everything"]["climbed"]:
                self._session.journal.warn("guard.mode is off: what it had widened is cast as the recipe says again")
        elif self._guard.load_state_dict(state):
            # moments are kept otherwise than when they were first loaded
            load(path, parts.model, parts.optimizer, is_verified=True)

    def _tell(self, decision: Decision) -> None:
        session = self._session
        session.journal.write("guard", **decision.row())
        session.emit(events.GuardActed(step=decision.step, **decision.row()))

    def _go_back(self, since: int) -> int | None:
        """Take the session to its newest whole checkpoint before the step `since`; None where there is none.

        The data goes on beyond where it is, so that what has made the trouble is not read again, nor, if it is a part
        of the data, the rest of that part: `guard.leave_out` batches are left out in all, every time twice as many.
        """
        session = self._session
        session.end_save()
        step = session.ranks.from_first(lambda: self._newest_before(since))
        if step is None:
            return None
        left, parts = session.step - step, session.parts
        earlier = session.ranks.from_first(lambda: self._decisions_after(step))
        contents = session.ranks.from_first(lambda: session.journal.cut(step))
        session.watch, session.evaluation = Watch(session.config), None
        session.take_in(contents)
        data = parts.stream.state_dict()
        parts.load_state(load(session.folder.checkpoint(step), parts.model, parts.optimizer, is_verified=True))
        skips = StepGuard.on(parts.optimizer)
        if skips is not None:
            skips.skips_in_a_row = 0
        config = session.config
        wanted = config.guard.leave_out * 2**self._guard.rollbacks - left * config.accumulation
        data["position"] += max(wanted, 0) * parts.stream.batch_size * parts.stream.world_size
        parts.stream.load_state_dict(data)
        session.step = session.journal.step = step
        if session.ranks.is_first:
            session.folder.remove_after(step)
        for row in earlier:  # they still hold, and the steps that they were taken in are no more
            session.journal.write("guard", **row)
        return step

    def _newest_before(self, since: int) -> int | None:
        folder = self._session.folder
        for step in reversed([step for step in folder.steps() if step < since]):
            try:
                folder.verify(step)
            except CheckpointError:
                continue
            return step
        return None

    def _decisions_after(self, step: int) -> list[dict[str, Any]]:
        rows = [row for row in Journal(self._session.folder.journal).of_kind("guard") if row["step"] > step]
        return [
            {
                **{key: value for key, value in row.items() if key not in ("kind", "step", "message")},
                "message": f"{row['message']} (in step {row['step']} of the path not taken)",
            }
            for row in rows
        ]
