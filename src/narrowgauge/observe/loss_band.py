"""A robust band around a run's losses: tells a loss that has left it from one that is only noisy."""

from __future__ import annotations

import math
import statistics
from collections import deque

MAD_TO_SD = 1.4826  # median absolute deviation to standard deviation, for a normal distribution


class RobustBand:
    """Watches losses, in order.

    The band ends at median + max(spreads * spread, floor), of the window with the lowest median so far: a run that
    creeps upwards does not carry its band along. Losses outside it never enter a window. Until a window is full, the
    losses so far make one.
    """

    def __init__(self, window: int = 32, spreads: float = 10.0, floor: float = 1.5) -> None:
        """window: losses that make a band. spreads: its width, in spreads. floor: its least width, nats a token."""
        self.spreads, self.floor = spreads, floor
        self._window: deque[float] = deque(maxlen=window)
        self._lowest = math.inf
        self._end = math.inf
        self.outside = 0  # losses in a row

    @property
    def end(self) -> float:
        """The largest loss that is still inside, nats a token; infinite before the first loss."""
        return self._end

    def add(self, loss: float) -> None:
        """Take in the next step's loss, nats a token."""
        if math.isfinite(loss) and loss <= self._end:
            self.outside = 0
            self._widen(loss)
        else:
            self.outside += 1

    def _widen(self, loss: float) -> None:
        self._window.append(loss)
        median = statistics.median(self._window)
        is_full = len(self._window) == self._window.maxlen
        if is_full and median > self._lowest:
            return
        spread = MAD_TO_SD * statistics.median(abs(value - median) for value in self._window)
        self._end = median + max(self.spreads * spread, self.floor)
        if is_full:
            self._lowest = median
