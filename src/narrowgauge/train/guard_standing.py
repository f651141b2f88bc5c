"""Where one role of one layer stands with the guard: a small machine that samples move, the same for all of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from narrowgauge.errors import CheckpointError
from narrowgauge.recipes.serialize import spec_from_dict, spec_to_dict
from narrowgauge.train.guard_ladder import Rung
from narrowgauge.train.guard_limits import Verdict

MOST_DOUBLINGS = 20


class Move(StrEnum):
    """What follows from a sample. WAIT: look again at the next step."""

    NONE = "none"
    WAIT = "wait"
    PROMOTE = "promote"
    DEMOTE = "demote"


@dataclass
class Standing:
    """What the guard knows of one role of one layer.

    climbed: the casts that it came from, the recipe's own first; the cast in force is not among them. in_trouble, calm:
    samples in a row. fresh: the cast is new, and trouble in the next sample needs no confirmation. trial: samples in
    which a narrower cast has still to hold. returns: promotions that ended a trial or followed one: each doubles the
    calm that the next trial takes. has_warned: said so once, until it is calm again.
    """

    climbed: list[Rung] = field(default_factory=list)
    in_trouble: int = 0
    calm: int = 0
    fresh: bool = False
    trial: int = 0
    returns: int = 0
    was_narrowed: bool = False
    has_warned: bool = False

    def needed_calm(self, calm: int) -> int:
        """Calm samples before the next trial, where the first takes `calm`."""
        return calm << min(self.returns, MOST_DOUBLINGS)

    @property
    def is_watched(self) -> bool:
        """True where the next step is to be sampled."""
        return self.in_trouble > 0 or self.fresh or self.trial > 0

    def take(self, verdict: Verdict, confirm: int, calm: int, is_regular: bool = True) -> Move:
        """Take in one sample. Where the move says so, the caller changes the cast and calls `promoted` or `demoted`.

        is_regular: False for a sample out of turn, for a closer look: calm is not counted by those.
        """
        at_once = self.fresh or self.trial > 0
        self.fresh = False
        if verdict is Verdict.TROUBLE:
            return self._trouble(confirm, at_once)
        self.in_trouble = 0
        self.trial = max(self.trial - 1, 0)
        if verdict is not Verdict.CALM:
            self.calm = 0
            return Move.NONE
        self.has_warned = False
        self.calm += is_regular
        if self.climbed and self.calm >= self.needed_calm(calm):
            return Move.DEMOTE
        return Move.NONE

    def _trouble(self, confirm: int, at_once: bool) -> Move:
        self.calm = 0
        if self.has_warned:
            return Move.NONE
        self.in_trouble += 1
        if self.in_trouble < confirm and not at_once:
            return Move.WAIT
        self.in_trouble = self.trial = 0
        return Move.PROMOTE

    def promoted(self, before: Rung) -> None:
        """The cast in force was `before` until now, and is a wider one."""
        self.climbed.append(before)
        self.fresh = True
        self.returns += self.was_narrowed
        self.was_narrowed = False
        self.calm = 0

    def demoted(self, confirm: int) -> Rung:
        """Go back to the cast that it came from, which is returned, for a trial of `confirm` samples."""
        self.calm, self.trial, self.was_narrowed = 0, confirm, True
        return self.climbed.pop()

    def warned(self) -> None:
        """Nothing is changed, only said; say it once."""
        self.has_warned, self.in_trouble, self.trial = True, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """All of it, fit for JSON."""
        climbed = [None if spec is None else spec_to_dict(spec) for spec in self.climbed]
        return {**dataclasses.asdict(dataclasses.replace(self, climbed=[])), "climbed": climbed}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """What `state_dict` gave. Raises CheckpointError for anything else."""
        try:
            climbed = [None if spec is None else spec_from_dict(spec) for spec in state["climbed"]]
            return cls(**{**state, "climbed": climbed})
        except (TypeError, KeyError) as error:
            raise CheckpointError(f"the guard's state is of another version, or damaged: {error!r}") from error
