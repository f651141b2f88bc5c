"""Early stop: tells a loss that has exploded from one that is only noisy."""

from __future__ import annotations

from narrowgauge.observe.loss_band import RobustBand
from narrowgauge.train.sections import DivergenceConfig


class LossBand(RobustBand):
    """Watches the losses of a run, in order, as `divergence` in its configuration says."""

    def __init__(self, config: DivergenceConfig) -> None:
        super().__init__(config.window, config.spreads, config.floor)
        self.config = config

    @property
    def has_exploded(self) -> bool:
        """True where `patience` losses in a row were outside."""
        return self.outside >= self.config.patience

    def add(self, loss: float) -> None:
        """Take in the next step's loss, nats a token; nothing where the section is not enabled."""
        if self.config.enabled:
            super().add(loss)
