"""Kernels that several ranks need at once: one compiles, the others read what it has put into Numba's cache."""

from __future__ import annotations

import threading
from typing import Any

from numba.core import event


class InTurn(event.Listener):
    """Holds a lock of several processes wherever Numba, which first looks into its cache, holds its own of threads."""

    def __init__(self, turn: Any) -> None:
        """turn: a `multiprocessing.Lock` of these processes."""
        self._turn = turn
        self._entering = threading.Lock()
        self._entered = 0

    def on_start(self, event: event.Event) -> None:
        with self._entering:
            if self._entered == 0:
                self._turn.acquire()
            self._entered += 1

    def on_end(self, event: event.Event) -> None:
        with self._entering:
            self._entered -= 1
            if self._entered == 0:
                self._turn.release()


def compile_in_turn(turn: Any) -> None:
    """From now on this process and the others that have called this with the same lock compile one after another."""
    event.register("numba:compiler_lock", InTurn(turn))
