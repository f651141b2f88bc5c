"""What travels between processes: every collective says its role, its dtype and the bytes that this rank sends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

CONTROL = "control"  # amax values, norms, flags: what is neither a gradient nor a parameter nor an activation


class Row(NamedTuple):
    """Calls and bytes of one kind of collective. bytes: what this rank sends to others, by the ideal algorithm."""

    role: str
    collective: str
    dtype: torch.dtype
    calls: int
    bytes: int


class Count:
    """Collectives since this count began, by role, collective and dtype."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, torch.dtype], list[int]] = {}

    def add(self, role: str, collective: str, dtype: torch.dtype, sent_bytes: int) -> None:
        """Count one call."""
        entry = self._found.setdefault((role, collective, dtype), [0, 0])
        entry[0] += 1
        entry[1] += sent_bytes

    def clear(self) -> None:
        """Begin anew."""
        self._found.clear()

    @property
    def rows(self) -> list[Row]:
        """One row for each kind, in the order in which they first came."""
        return [Row(*key, calls, size) for key, (calls, size) in self._found.items()]

    @property
    def bytes(self) -> int:
        """Bytes sent by this rank."""
        return sum(size for _, size in self._found.values())

    def bytes_of(self, role: str) -> int:
        """Bytes sent for one role."""
        return sum(row.bytes for row in self.rows if row.role == role)


class _StepCount(Count):
    """Collectives of the optimizer step under way, or of the one just ended until the next communicates.

    Torch's hook on all optimizers tells where one ends; it is there from the first collective on.
    """

    def __init__(self) -> None:
        super().__init__()
        self._watches = self._has_ended = False

    def add(self, role: str, collective: str, dtype: torch.dtype, sent_bytes: int) -> None:
        if not self._watches:
            register_optimizer_step_post_hook(self._end)
            self._watches = True
        if self._has_ended:
            self.clear()
            self._has_ended = False
        super().add(role, collective, dtype, sent_bytes)

    def _end(self, *args: object) -> None:
        self._has_ended = True


SINCE_STEP = _StepCount()  # for the ledger
_counts: list[Count] = [SINCE_STEP]


def record(role: str, collective: str, dtype: torch.dtype, sent_bytes: int) -> None:
    """Count a collective that this rank takes part in.

    role: one of the recipe's communication roles, or CONTROL. collective: torch's name of it, e.g. "all_gather".
    dtype: of the values on the wire; codes travel as bytes and are counted as uint8.
    """
    for count in _counts:
        count.add(role, collective, dtype, sent_bytes)


@contextmanager
def counted() -> Iterator[Count]:
    """`with counted() as count:` counts the collectives of this process inside the context."""
    count = Count()
    _counts.append(count)
    try:
        yield count
    finally:
        # by identity: two counts are never the same
        del _counts[next(i for i, each in enumerate(_counts) if each is count)]
