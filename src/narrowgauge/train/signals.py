"""SIGINT and SIGTERM during a run: finish the step in hand, save, stop. A second SIGINT aborts at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

WATCHED = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """A context that notes the first signal instead of dying of it, and puts the old handlers back at its end.

    Outside the main thread, where Python allows no handlers, it notes nothing.
    """

    def __init__(self, on_signal: Callable[[str], None]) -> None:
        """`on_signal` is called with the signal's name, once, from the handler."""
        self._on_signal = on_signal
        self._old: dict[int, Any] = {}
        self.requested = False

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._handle) for number in WATCHED}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return  # process managers repeat SIGTERM; the save is under way
        self.requested = True
        self._on_signal(signal.Signals(number).name)
