"""A rank that dies, hangs, stops or fails: the others end within the time-out, with its name."""

from __future__ import annotations

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

import pytest
import torch
import torch.distributed as dist

from narrowgauge.distributed.liveness import Limits, Watch

pytestmark = pytest.mark.multiproc
RANKS, CULPRIT = 3, 1
STEP_S, SILENCE_S, GRACE_S = 4.0, 2.0, 0.5
GROUP_TIMEOUT_S = 120  # gloo's own, which must not be what ends the test


def go_astray(how: str) -> None:
    """What the culprit does in its third step."""
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "fails":
        raise ValueError("no such file: tokens.bin")
    elif how == "hangs":
        time.sleep(600)


def train(rank: int, port: int, how: str, folder: Path) -> None:
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
    with Watch(Limits(step_s=STEP_S, silence_s=SILENCE_S, grace_s=GRACE_S, every_s=0.05)) as watch:
        for step in range(5):
            if rank == CULPRIT and step == 2:
                (folder / "astray").touch()
                go_astray(how)
            dist.all_reduce(values)
            watch.step()
            time.sleep(0.2)  # a few signs of life
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run(how: str, folder: Path) -> tuple[list[int | None], list[str], float]:
    """Exit codes, stderr, and seconds from where the culprit goes astray to the end of the others."""
    # a process that has torch, and is copied
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["narrowgauge.distributed.liveness"])
    port = free_port()
    processes = [context.Process(target=train, args=(rank, port, how, folder)) for rank in range(RANKS)]
    try:
        for process in processes:
            process.start()
        for rank, process in enumerate(processes):
            if rank != CULPRIT:
                process.join(timeout=60)
        end_s = time.time()
    finally:
        processes[CULPRIT].join(timeout=0 if how == "stops" else 5)
        for process in processes:
            process.kill()
            process.join()
    told = [(folder / f"stderr-{rank}").read_text() for rank in range(RANKS)]
    return [process.exitcode for process in processes], told, end_s - (folder / "astray").stat().st_mtime


def test_a_run_in_which_nothing_happens_ends_by_itself(tmp_path):
    codes, told, _ = run("nothing", tmp_path)
    assert codes == [0] * RANKS and told == [""] * RANKS


@pytest.mark.parametrize(
    "how, least_s, most_s, says",
    [
        ("dies", 0, SILENCE_S, "no sign of life for 2 s from {culprit}, last seen after step 2"),
        ("stops", SILENCE_S, SILENCE_S, "no sign of life for 2 s from {culprit}, last seen after step 2"),
        ("hangs", STEP_S, STEP_S, "no step for 4 s after step 2: ranks 0, 2 waited for {culprit} at {place}"),
        ("fails", 0, 0, "{culprit} failed after step 2: ValueError: no such file: tokens.bin"),
    ],
)
def test_the_others_end_within_the_time_out_and_name_it(how, least_s, most_s, says, tmp_path):
    codes, told, seconds = run(how, tmp_path)
    assert all(code not in (0, None) for code in codes)
    culprit = rf"rank 1 \({re.escape(socket.gethostname())}, process \d+\)"
    place = r"distributed/test_dead_rank.py:\d+ in go_astray"
    pattern = re.escape(says).replace(r"\{culprit\}", culprit).replace(r"\{place\}", place)
    for rank in (0, 2):
        assert re.search(pattern, told[rank]), told[rank]
    assert least_s <= seconds <= most_s + GRACE_S + 6.0  # and what processes take to end on a busy machine
