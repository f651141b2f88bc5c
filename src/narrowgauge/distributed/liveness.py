"""A rank that dies, hangs or fails ends the run on every other one within a time-out, with its name.

Collectives wait. With gloo a rank whose peer died gets "connection closed", which names an address at best, and one
whose peer hangs waits for the group's time-out of half an hour; with NCCL the watchdog ends processes after ten minutes
and names the collective, not the culprit. Here a thread of each rank tells the run's store that it lives, how many
steps it has made and where its main thread is, watches the next rank, and reads what others found. Its load does not
grow with the number of ranks.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from narrowgauge.distributed import places
from narrowgauge.distributed.agreement import ranks_text
from narrowgauge.distributed.meeting_point import has_peers, meeting_point
from narrowgauge.errors import ProcessError

_POLL_S = 0.05
_FAILED = " failed after step "
EXIT_CODE = 1  # of a process whose main thread cannot be woken


@dataclasses.dataclass(frozen=True)
class Limits:
    """When to give up, in seconds.

    step_s: without a finished step; longer than the longest step, first compilation, evaluation or checkpoint.
    silence_s: without a sign of life. grace_s: from the verdict until a process that still hangs is ended. every_s:
    between signs of life.
    """

    step_s: float = 600.0  # NCCL's own time-out
    silence_s: float = 60.0
    grace_s: float = 10.0
    every_s: float = 5.0


@dataclasses.dataclass
class _Sign:
    """What a rank tells of itself. left: it has ended its loop."""

    rank: int
    beats: int
    steps: int
    stalled_s: float
    waits: bool
    place: str
    process: str
    left: bool = False


class Watch:
    """`with Watch() as watch:` around a training loop that calls `watch.step()` at the end of every step.

    In a rank that lives, the loop then ends with a ProcessError that names the rank at fault: from `step`, or in place
    of the error that a collective raised for want of that rank. A rank whose main thread cannot be woken, since it
    waits inside a collective or hangs itself, is ended with EXIT_CODE after the message and the stacks of its threads
    have gone to stderr, so that torchrun may start the run anew. Time in which this process was itself stopped, as with
    a machine that sleeps, is held against nobody. In a run of one process it does nothing.
    """

    def __init__(self, limits: Limits | None = None, is_ending: Callable[[], bool] = lambda: False) -> None:
        """is_ending: whether this process was told to end, as torchrun does when another has died: then no verdict is
        waited for."""
        self.limits = limits or Limits()
        self._is_ending = is_ending
        self.verdict: str | None = None
        self.rank, self.ranks = 0, 1
        self._steps = self._beats = 0
        self._last_step_s = time.monotonic()
        self._looked_s = time.monotonic()  # when this rank last looked for signs of the others
        self._absences = 0
        self._store: dist.Store | None = None  # the main thread's own connection
        self._stopped = threading.Event()
        self._decided = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if has_peers():
            self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
            # now: a rank that is late at the end may find the process that holds the store gone, and would wait for it
            self._store = self._connect()
            self._tell(self._store)
            self._last_step_s = self._looked_s = time.monotonic()
            self._thread = threading.Thread(target=self._run, name="narrowgauge-watch", daemon=True)
            self._thread.start()
        return self

    def step(self, number: int | None = None) -> None:
        """A step has ended, or after it another stretch of work; number: the step's, None: one more than the last.

        Raises ProcessError where another rank is gone, hangs or has failed.
        """
        self._steps = self._steps + 1 if number is None else number
        self._last_step_s = time.monotonic()
        if self.verdict is not None:
            raise ProcessError(self.verdict)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None or self._store is None:
            return
        try:
            if isinstance(error, Exception) and not isinstance(error, ProcessError):
                self._judge(error, self._store)
        finally:
            self._stopped.set()
            self._thread.join(timeout=2 * self.limits.every_s)
            _quietly(self._leave, self._store)

    def _leave(self, store: dist.Store) -> None:
        self._tell(store, left=True)
        # the process of rank 0 may be the one that holds the store: the others have to read the verdict
        for _ in range(math.ceil(3 * self.limits.every_s / _POLL_S)):
            if self.verdict is None or self.rank != 0 or self._is_ending():
                return
            signs = [self._read(store, rank) for rank in range(1, self.ranks)]
            if all(sign is not None and sign.left for sign in signs):
                return
            time.sleep(_POLL_S)

    def _connect(self) -> dist.Store:
        return meeting_point("liveness", max(self.limits.silence_s, 1.0))

    def _judge(self, error: Exception, store: dist.Store) -> None:
        """Tell the others of an error of this rank's own; raise what is known of one that another rank caused."""
        who = f"rank {self.rank} ({_process()})"
        text = f"{type(error).__name__}: {error}"
        if not places.lost_contact(error):
            failed = f"{who}{_FAILED}{self._steps}: {text}"
            _quietly(self._decide, store, failed)
            return
        if not self._wait_for_verdict():
            lost = (
                f"{who} lost contact with another after step {self._steps}, though every process gives signs of life: "
                f"look at the network between them; {text}"
            )
            _quietly(self._decide, store, lost)
        raise ProcessError(self.verdict or f"{who} lost contact with the other processes: {text}") from error

    def _wait_for_verdict(self) -> bool:
        """Wait until the rank that was lost is found silent, or says itself why it failed; False: it is not."""
        wait_s = min(self.limits.every_s, 1.0)
        waited_s, absences = 0.0, self._absences
        while waited_s < self.limits.silence_s + 3 * self.limits.every_s:
            if self._has_read_verdict() or self._decided.wait(wait_s) or self._is_ending():
                return True
            # the clock would count what this process was stopped for; after that the thread begins anew
            waited_s = waited_s + wait_s if self._absences == absences else 0.0
            absences = self._absences
        return False

    def _has_read_verdict(self) -> bool:
        """Look for a verdict now, where the thread would at its next turn."""
        try:
            verdict = "" if self._store is None else self._read_verdict(self._store)
        except Exception:  # torch raises several kinds where a store does not answer
            return False
        if verdict:
            self._take(verdict)
        return bool(verdict)

    # what follows runs in the thread

    def _run(self) -> None:
        seen: dict[int, tuple[int, float]] = {}  # rank -> beats, and when they were new
        store, unreachable_since_s = self._connect(), None
        while not self._stopped.wait(self.limits.every_s) and self.verdict is None:
            try:
                self._tell(store)
                self._forgive_own_absence(seen)
                found = self._read_verdict(store) or self._silent(store, seen) or self._stalled(store)
                if found:
                    self._decide(store, found)
                unreachable_since_s = None
            except Exception as error:  # torch raises several kinds where a store does not answer
                now_s = time.monotonic()
                unreachable_since_s = unreachable_since_s or now_s
                if now_s - unreachable_since_s > self.limits.silence_s:
                    self._take(
                        f"the store of this run has not answered rank {self.rank} for {self.limits.silence_s:g} s: the "
                        f"machine of rank 0, or of torchrun's first node, is gone ({type(error).__name__})"
                    )
        if self.verdict is not None and not self._stopped.wait(self.limits.grace_s):
            self._end_process()

    def _tell(self, store: dist.Store, left: bool = False) -> None:
        self._beats += 1
        waits, place = places.of_main_thread()
        stalled_s = time.monotonic() - self._last_step_s
        sign = _Sign(self.rank, self._beats, self._steps, stalled_s, waits, place, _process(), left)
        store.set(f"rank/{self.rank}", json.dumps(dataclasses.asdict(sign)))

    def _read(self, store: dist.Store, rank: int) -> _Sign | None:
        key = f"rank/{rank}"
        return _Sign(**json.loads(store.get(key))) if store.check([key]) else None

    def _read_verdict(self, store: dist.Store) -> str:
        return store.get("verdict").decode() if store.check(["verdict"]) else ""

    def _forgive_own_absence(self, seen: dict[int, tuple[int, float]]) -> None:
        """Begin to wait anew where this rank has not looked for so long that it knows nothing of the others."""
        now_s = time.monotonic()
        absent_s = now_s - self._looked_s - self.limits.every_s
        if absent_s > self.limits.silence_s / 2:
            seen.clear()
            self._last_step_s += absent_s
            self._absences += 1
        self._looked_s = now_s

    def _silent(self, store: dist.Store, seen: dict[int, tuple[int, float]]) -> str:
        """The next ranks that have given no sign for too long, up to the first that has."""
        silent: list[_Sign] = []
        now_s = time.monotonic()
        for distance in range(1, self.ranks):
            rank = (self.rank + distance) % self.ranks
            sign = self._read(store, rank) or _Sign(rank, 0, 0, 0.0, False, "", "never seen")
            beats, since_s = seen.get(rank, (-1, now_s))
            if sign.beats != beats:
                seen[rank] = (sign.beats, now_s)
            if sign.left:
                continue
            if sign.beats != beats or now_s - since_s <= self.limits.silence_s:
                break
            silent.append(sign)
        if not silent:
            return ""
        named = "; ".join(f"rank {s.rank} ({s.process}), last seen after step {s.steps}{_at(s)}" for s in silent)
        return (
            f"no sign of life for {self.limits.silence_s:g} s from {named}: the process died, was stopped, or its "
            "machine is gone; look into its log and the kernel's (out of memory?)"
        )

    def _stalled(self, store: dist.Store) -> str:
        """Who keeps the others waiting, where this rank has made no step for too long."""
        if time.monotonic() - self._last_step_s <= self.limits.step_s:
            return ""
        signs = [sign for rank in range(self.ranks) if (sign := self._read(store, rank)) is not None]
        waiting = [sign for sign in signs if sign.waits and not sign.left]
        others = [sign for sign in signs if not sign.waits or sign.left]
        by_place: dict[str, list[int]] = {}
        for sign in signs:
            by_place.setdefault("its end" if sign.left else sign.place, []).append(sign.rank)
        where = "; ".join(f"{ranks_text(ranks)} at {place}" for place, ranks in by_place.items())
        head = f"no step for {self.limits.step_s:g} s after step {min(sign.steps for sign in signs)}"
        if waiting and others:
            named = ", ".join(f"rank {s.rank} ({s.process}){' has left the loop' * s.left or _at(s)}" for s in others)
            return f"{head}: {ranks_text(s.rank for s in waiting)} waited for {named}"
        return f"{head}, and no rank stands out: {where}; a time-out shorter than a step would look the same"

    def _decide(self, store: dist.Store, text: str) -> None:
        """Make `text` the verdict unless another rank was first."""
        self._take(store.compare_set("verdict", "", text).decode())

    def _take(self, verdict: str) -> None:
        self.verdict = verdict
        self._decided.set()

    def _end_process(self) -> None:
        sys.stderr.write(f"narrowgauge, rank {self.rank}: {self.verdict}\nThis process waits still and is ended.\n")
        faulthandler.dump_traceback(all_threads=True)
        sys.stderr.flush()
        os._exit(EXIT_CODE)  # nothing else ends a main thread that waits in C++


def has_raised(verdict: str) -> bool:
    """Whether a verdict is of a rank that lives and has raised an error, which it tells by itself."""
    return _FAILED in verdict


def _at(sign: _Sign) -> str:
    return f" at {sign.place}" if sign.place else ""


def _process() -> str:
    return f"{socket.gethostname()}, process {os.getpid()}"


def _quietly(call: Callable[..., Any], *args: Any) -> None:
    try:
        call(*args)
    except Exception:  # a store that is gone when the run ends is no fault
        return
