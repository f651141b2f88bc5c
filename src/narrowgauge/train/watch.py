"""What a run's losses and skipped steps so far say about going on."""

from __future__ import annotations

import math

from narrowgauge.errors import DivergenceError
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.divergence import LossBand


class Watch:
    """Counts skipped steps and follows the loss. All of it follows from the journal, so nothing is in checkpoints."""

    def __init__(self, config: TrainConfig) -> None:
        self.max_skips = config.max_skips
        self.last_step = 0
        self.last_loss = math.nan
        self.skips_in_a_row = 0
        self.skipped_steps = 0
        self.band = LossBand(config.divergence)

    def note(self, step: int, loss: float, skipped: bool) -> None:
        """Take in one step, in order."""
        self.last_step, self.last_loss = step, loss
        self.skips_in_a_row = self.skips_in_a_row + 1 if skipped else 0
        self.skipped_steps += skipped
        if not skipped:  # skips have a limit of their own
            self.band.add(loss)

    def check(self, bad_parameter: str, loss_scale: float) -> None:
        """Raise DivergenceError where too many steps in a row were skipped, or too many losses outside their band."""
        if self.skips_in_a_row >= self.max_skips:
            raise DivergenceError(
                f"{self.skips_in_a_row} steps in a row were skipped, up to step {self.last_step}: the gradient of "
                f"'{bad_parameter}' is not finite (loss scale {loss_scale:g}): look at the data and at that layer, "
                "lower optimizer.lr, or use a recipe with a wider range"
            )
        if self.band.has_exploded:
            raise DivergenceError(
                f"the loss has exploded: expected at most {self.band.end:.4g} (robust band of earlier losses), found "
                f"{self.last_loss:.4g} at step {self.last_step}, outside for {self.band.outside} steps: lower "
                "optimizer.lr, lengthen schedule.warmup_steps, or use a wider recipe; then start anew, or resume from "
                "a checkpoint before the rise"
            )
