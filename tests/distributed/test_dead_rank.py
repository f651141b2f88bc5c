"""A rank that dies, hangs, stops or fails: the others end within the time-out, with its name.

Time in which this process does not run is not counted: it says that the machine was stopped or busy, and the ranks with
it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from narrowgauge.distributed.liveness import Limits, Watch

pytestmark = pytest.mark.multiproc
RANKS, CULPRIT = 3, 1
NEVER_S = 600.0
SILENCE_S, STEP_S, GRACE_S = 2.0, 2.0, 0.5
GROUP_TIMEOUT_S = 240  # gloo's own, and that of a store which is gone: neither must be what ends a test
LIMIT_S = 120.0  # for processes to begin and to end on a busy machine
POLL_S = 0.05


def go_astray(how: str, folder: Path) -> None:
    """What the culprit does in its third step."""
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stops":
        while True:  # whoever stops and continues all processes of a machine must not undo it
            os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "fails":
        raise ValueError("no such file: tokens.bin")
    elif how == "hangs":
        time.sleep(NEVER_S)
    elif how == "goes on":
        while not (folder / "goes-on").exists():
            time.sleep(POLL_S)


def train(rank: int, port: int, how: str, limits: Limits, folder: Path) -> None:
    """Five steps of a loop whose ranks meet in a collective; stderr goes to a file."""
    sys.stderr.flush()
    os.dup2(os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )  # fmt: skip
    values = torch.ones(1000)
    with Watch(limits) as watch:
        for step in range(5):
            if rank == CULPRIT and step == 2:
                (folder / "astray").touch()
                go_astray(how, folder)
            dist.all_reduce(values)
            watch.step()
            time.sleep(0.2)  # a few signs of life
        if rank != 0:
            wait_until_closed(port)
    dist.destroy_process_group()


def wait_until_closed(port: int) -> None:
    """Until the process of rank 0, which holds the store, has ended."""
    with contextlib.suppress(ConnectionError):
        while True:
            socket.create_connection(("127.0.0.1", port)).close()
            time.sleep(POLL_S)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def running_s(happened: Any, limit_s: float = LIMIT_S) -> float:
    """Seconds until `happened()`, without those in which this process was stopped."""
    counted_s = 0.0
    while not happened():
        assert counted_s < limit_s, f"waited {limit_s} s"
        before_s = time.monotonic()
        time.sleep(POLL_S)
        counted_s += min(time.monotonic() - before_s, 2 * POLL_S)
    return counted_s


@contextlib.contextmanager
def ranks(how: str, limits: Limits, folder: Path) -> Any:
    """The processes of `train`, begun; what still runs at the end is killed."""
    # a process that has torch, and is copied
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["narrowgauge.distributed.liveness"])
    port = free_port()
    processes = [context.Process(target=train, args=(rank, port, how, limits, folder)) for rank in range(RANKS)]
    try:
        for process in processes:
            process.start()
        running_s(lambda: (folder / "astray").exists() or any(p.exitcode is not None for p in processes))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def told(folder: Path) -> list[str]:
    return [(folder / f"stderr-{rank}").read_text() for rank in range(RANKS)]


def test_a_run_that_is_stopped_for_longer_than_any_limit_goes_on_and_ends_by_itself(tmp_path):
    limits = Limits(step_s=2 * SILENCE_S, silence_s=SILENCE_S, grace_s=GRACE_S, every_s=0.05)
    with ranks("goes on", limits, tmp_path) as processes:
        for number, seconds in ((signal.SIGSTOP, limits.step_s + 1.0), (signal.SIGCONT, 0.0)):
            for process in processes:
                os.kill(process.pid, number)
            time.sleep(seconds)
        (tmp_path / "goes-on").touch()
        running_s(lambda: all(process.exitcode is not None for process in processes))
        # torch itself may tell of the store that went with rank 0
        assert [process.exitcode for process in processes] == [0] * RANKS, told(tmp_path)


@pytest.mark.parametrize(
    "how, step_s, least_s, says",
    [
        ("dies", NEVER_S, 0, "no sign of life for 2 s from {culprit}, last seen after step 2"),
        ("stops", NEVER_S, SILENCE_S, "no sign of life for 2 s from {culprit}, last seen after step 2"),
        ("hangs", STEP_S, STEP_S, "no step for 2 s after step 2: ranks 0, 2 waited for {culprit} at {place}"),
        ("fails", NEVER_S, 0, "{culprit} failed after step 2: ValueError: no such file: tokens.bin"),
    ],
)
def test_the_others_end_within_the_time_out_and_name_it(how, step_s, least_s, says, tmp_path):
    limits = Limits(step_s=step_s, silence_s=SILENCE_S, grace_s=GRACE_S, every_s=0.05)
    with ranks(how, limits, tmp_path) as processes:
        others = [process for rank, process in enumerate(processes) if rank != CULPRIT]
        seconds = running_s(lambda: all(process.exitcode is not None for process in others))
        by_the_clock_s = time.time() - (tmp_path / "astray").stat().st_mtime
        if how != "stops":
            running_s(lambda: processes[CULPRIT].exitcode is not None)
    assert all(process.exitcode not in (0, None) for process in processes)
    culprit = rf"rank 1 \({re.escape(socket.gethostname())}, process \d+\)"
    place = r"distributed/test_dead_rank.py:\d+ in go_astray"
    pattern = re.escape(says).replace(r"\{culprit\}", culprit).replace(r"\{place\}", place)
    for rank in (0, 2):
        assert re.search(pattern, told(tmp_path)[rank]), told(tmp_path)[rank]
    most_s = max(least_s, SILENCE_S if how == "dies" else 0)
    assert least_s <= by_the_clock_s
    assert seconds <= most_s + GRACE_S + 6.0  # and what processes take to end on a busy machine
