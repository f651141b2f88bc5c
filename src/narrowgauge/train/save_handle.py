"""A save that goes on beside training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from narrowgauge.errors import CheckpointError

_last: list[SaveHandle] = []  # the save that was begun last: one is written at a time


class SaveHandle:
    """A checkpoint that is being written by a thread, from copies: training may go on.

    path: where it will be, whole, once `wait` has returned. Ask for it before the process group is destroyed.
    """

    def __init__(self, path: Path, write: Callable[[], None]) -> None:
        self.path = path
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(write,), name=f"save {path.name}")
        _last[:] = [self]
        self._thread.start()

    @property
    def done(self) -> bool:
        """True where it is written, or has failed."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> Path:
        """Wait until the folder is whole, and return it.

        Raises CheckpointError where it could not be written, or is not within `timeout_s`.
        """
        self._thread.join(timeout_s)
        if not self.done:
            raise CheckpointError(f"{self.path} was not written within {timeout_s} s: wait longer")
        if self._failure is not None:
            raise self._failure
        return self.path

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._failure = error


def wait_for_last() -> None:
    """Let the save that is under way end, before another one or a load begins. Its failure stays with its handle."""
    for handle in _last:
        handle._thread.join()
    _last.clear()
