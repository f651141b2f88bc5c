"""What losses say to the guard: steps in a row that are not finite, or above a robust band of earlier ones."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from narrowgauge.observe.loss_band import RobustBand
from narrowgauge.train.sections import GuardConfig

NONFINITE, SPIKE = "nonfinite", "loss"  # measures, as in the journal


class Trouble(NamedTuple):
    """Losses that the guard answers. since: the first step of them. value: the last loss, or the steps in a row."""

    step: int
    since: int
    measure: str
    value: float
    limit: float


class Losses:
    """Follows losses in order."""

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._band = RobustBand(config.spike_window, config.spike_spreads, config.spike_floor)
        self._nonfinite = 0
        self._since = 0  # the first step of the trouble in hand
        self._answered = False  # it was answered, and has not ended since
        self._outside_since_sample = 0
        self._look_from, self._look_to = 0, 0
        self.rollbacks = 0

    def take(self, step: int, loss: float, skipped: bool, loss_scale: float) -> Trouble | None:
        """Take in a step; what is to be answered, once."""
        if skipped and math.isfinite(loss) and loss_scale > 1:
            return None  # the loss scaler is looking for a scale
        is_bad = skipped or not math.isfinite(loss)
        self._nonfinite = self._nonfinite + 1 if is_bad else 0
        if not is_bad:
            self._band.add(loss)
        if not self._nonfinite and not self._band.outside:
            self._since, self._answered = 0, False
            return None
        self._since = self._since or step
        self._outside_since_sample += 1
        if self._answered:
            return None
        if self._nonfinite >= self._config.nonfinite:
            found = Trouble(step, self._since, NONFINITE, self._nonfinite, self._config.nonfinite)
        elif self._band.outside >= self._config.spike_patience:
            found = Trouble(step, self._since, SPIKE, loss, self._band.end)
        else:
            return None
        self._answered = True
        return found

    @property
    def unanswered_since(self) -> int:
        """The first step of the trouble in hand, while it is not answered; 0: there is none."""
        return 0 if self._answered else self._since

    def asks_for(self, step: int) -> bool:
        """True where the step is to be sampled: losses are in trouble, or were there before the run went back."""
        return self._since > 0 or self._look_from <= step <= self._look_to

    def calm_since_sample(self) -> bool:
        """True where all losses since the last call were finite and inside the band."""
        outside, self._outside_since_sample = self._outside_since_sample, 0
        return outside == 0

    def went_back(self, trouble: Trouble) -> None:
        """The run goes on from a state before the trouble; the steps around its beginning will be sampled."""
        self.rollbacks += 1
        self._look_from, self._look_to = trouble.since - 2 * self._config.confirm, trouble.step
        self._nonfinite = self._since = self._band.outside = 0
        self._answered = False

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        own = {name: value for name, value in vars(self).items() if name not in ("_config", "_band")}
        band = {name: list(value) if name == "_window" else value for name, value in vars(self._band).items()}
        return {**own, "band": band}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        for name in vars(self):
            if name in state:
                setattr(self, name, state[name])
        band = state["band"]
        self._band._window.clear()
        self._band._window.extend(band["_window"])
        for name in ("_lowest", "_end", "outside"):
            setattr(self._band, name, band[name])
