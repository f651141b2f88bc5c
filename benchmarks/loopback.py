"""Bytes on the loopback interface, as the kernel counts them: headers of packets and acknowledgements included."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common  # noqa: F401  # before torch: it says how threads wait
import torch
import torch.distributed as dist

from narrowgauge.distributed import wire

_ALONE = "NARROWGAUGE_OWN_LOOPBACK"


def sent_bytes() -> int:
    """What this network namespace's loopback interface has sent since it began, of all processes."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise RuntimeError("/proc/self/net/dev lists no interface 'lo'")


def is_alone() -> bool:
    """True where no process but this benchmark's can use the interface."""
    return _ALONE in os.environ


def run_alone() -> None:
    """Begin this program anew in a network namespace of its own, so that nobody else's bytes are counted.

    Where that is not possible (it needs Linux, root, and `ip` of iproute2) it goes on as it is, and says so.
    """
    if is_alone():
        return
    begin = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    programs = [shutil.which(program) for program in ("unshare", "ip")]
    if None in programs or subprocess.run([*begin, "true"], capture_output=True, check=False).returncode:
        print("the loopback interface is shared with other programs, whose bytes are counted, too", file=sys.stderr)
        return
    os.environ[_ALONE] = "1"
    os.execvp(begin[0], [*begin, sys.executable, *sys.argv])


def on_ranks(ranks: int, body: Callable[..., Any], *arguments: Any) -> Any:
    """What `body(*arguments)` gives on the first of `ranks` gloo processes of one thread, which all call it."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        places = [(rank, ranks, str(Path(folder) / "store"), results, body, arguments) for rank in range(ranks)]
        processes = [context.Process(target=_call, args=place) for place in places]
        for process in processes:
            process.start()
        found = results.get()
        for process in processes:
            process.join()
    return found


def _call(
    rank: int, ranks: int, store: str, results: Any, body: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    found = body(*arguments)
    if rank == 0:
        results.put(found)
    dist.destroy_process_group()


def of_a_step(step: Callable[[], object], steps: int) -> tuple[float, wire.Count]:
    """Bytes that loopback sends in a step, the mean of `steps` after a first one, and this rank's count of them all.

    Every rank of the default group calls it.
    """
    step()
    dist.barrier()
    before = sent_bytes()
    with wire.counted() as counted:
        for _ in range(steps):
            step()
    dist.barrier()
    return (sent_bytes() - before) / steps, counted


def figures_of(sent: float, counted: wire.Count, steps: int) -> dict[str, Any]:
    """What `of_a_step` found, as results record it: the bytes of a step, and a rank's own by role and collective."""
    rows = {f"{row.role} {row.collective} {row.dtype}": row.bytes / steps for row in counted.rows}
    return {"loopback_bytes": sent, "counted_bytes_of_a_rank": rows}
