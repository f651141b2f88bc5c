"""A line on a terminal that is rewritten while something goes on, and is taken down at its end."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Generic, TypeVar

from rich.progress import Progress, TaskID

Line = TypeVar("Line", bound=Progress)


class LiveLine(AbstractContextManager, Generic[Line]):
    """What shows a live line: a context, at whose end the line is taken down, however it ends."""

    _live: Line | None = None
    _task: TaskID | None = None

    def take_down(self) -> None:
        """Take the live line down; a second call does nothing."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the live line down."""
        self.take_down()
