"""Kernels of the CPU over ranges of their work, in threads.

A compiled kernel releases the GIL, so that Python's threads run it at once; a form of it that Numba itself spreads
over threads would take as long to compile again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

T = TypeVar("T")

# the least work of a range, in casts of a value: 35 us, where handing a range over and waiting for it costs 15 us
MIN_CHUNK = 131072
# ranges of values start at multiples of this, so that no two threads write one cache line
GRAIN = 256


class _Range:
    """One range of a call: run once, by a helper or by the caller, whichever takes it first."""

    __slots__ = ("_done", "_error", "_result", "_taken", "_work")

    def __init__(self, work: Callable[[int, int], Any], first: int, last: int) -> None:
        self._work: tuple[Callable[[int, int], Any], int, int] | None = (work, first, last)
        self._result, self._error = None, None
        self._taken, self._done = threading.Lock(), threading.Lock()
        self._done.acquire()

    def run(self) -> bool:
        """Run it, unless another thread has taken it: False."""
        if not self._taken.acquire(blocking=False):
            return False
        assert self._work is not None
        (work, first, last), self._work = self._work, None  # the queue may hold the range longer than its tensors live
        try:
            self._result = work(first, last)
        except BaseException as error:
            self._error = error
        finally:
            del work  # before the caller goes on, who may wish its tensors gone
            self._done.release()
        return True

    def wait(self) -> None:
        """Return when it has been run."""
        self._done.acquire()

    def result(self) -> Any:
        """What it returned or raised."""
        if self._error is None:
            return self._result
        try:
            raise self._error
        finally:
            self._error = None  # its traceback holds this frame, which holds it


class _Helpers:
    """Threads that run ranges, as many as one call ever asked for; they end with the process."""

    def __init__(self) -> None:
        self._ranges: SimpleQueue[_Range] = SimpleQueue()
        self._count, self._lock = 0, threading.Lock()

    def offer(self, ranges: list[_Range]) -> None:
        """Have the ranges run by helpers, where these come to it before the caller does."""
        if self._count < len(ranges):
            with self._lock:
                while self._count < len(ranges):
                    threading.Thread(target=self._serve, name="narrowgauge-kernels", daemon=True).start()
                    self._count += 1
        for each in ranges:
            self._ranges.put(each)

    def _serve(self) -> None:
        while True:
            self._ranges.get().run()


_helpers = _Helpers()


def _renew() -> None:
    global _helpers
    _helpers = _Helpers()


os.register_at_fork(after_in_child=_renew)  # a forked child (a DataLoader worker) has none of the parent's threads


def in_threads(work: Callable[[int, int], T], items: int, casts: int, grain: int = 1) -> list[T]:
    """`work(first, last)` over the ranges that `items` are cut into, at once; what each returned, in order.

    casts: the cost of all items, in plain casts of one value to its code. grain: ranges start at multiples of it. The
    first error of a range is raised when all have ended.
    """
    most = max(min(torch.get_num_threads(), casts // MIN_CHUNK), 1)
    size = -(-items // (most * grain)) * grain
    if size >= items:
        return [work(0, items)]
    ranges = [_Range(work, first, min(first + size, items)) for first in range(0, items, size)]
    _helpers.offer(ranges[1:])
    ranges[0].run()
    # no helper may be free, or have woken yet: what nobody has taken is run here, from the end that they reach last
    taken = [each for each in reversed(ranges[1:]) if not each.run()]
    for each in taken:
        each.wait()
    return [each.result() for each in ranges]
