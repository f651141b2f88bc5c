"""Functions on several ranks: a pool of processes, started once, and a fresh gloo group for every call."""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

MAX_RANKS = 4
AFTERMATH_S = 3.0
PATIENCE_S = 300.0  # a first call may compile kernels, on ranks that share two cores
_pool: list[tuple[Any, Connection]] = []
_turn: Any = None  # of the pool's ranks: who may compile


class RankError(AssertionError):
    """What went wrong on which rank."""


def run(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = PATIENCE_S) -> list[Any]:
    """`function(*args)` on `world_size` ranks of a gloo group on loopback; the results in the order of ranks.

    function: of the top level of a test module; args and result are pickled (tensors too). A rank that raises, dies or
    does not end within `timeout_s` fails the call with its number and traceback, and the pool is started anew.
    """
    _start(world_size)
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        for rank in range(world_size):
            # by value: torch would share memory, and with it file descriptors, for a call that may be killed
            call = (sys.path, function.__module__, function.__qualname__, args, rank, world_size, store, timeout_s)
            _pool[rank][1].send_bytes(pickle.dumps(call))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        end = time.monotonic() + timeout_s
        waiting: dict[Any, int] = {_pool[rank][1]: rank for rank in range(world_size)}
        while waiting:
            ready = wait(list(waiting), timeout=max(end - time.monotonic(), 0.0))
            if not ready:
                failures |= dict.fromkeys(waiting.values(), f"did not end within {timeout_s} s")
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    ok, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    ok, value = False, f"died, exit code {_pool[rank][0].exitcode}"
                if ok:
                    results[rank] = value
                    continue
                failures[rank] = value
                end = min(end, time.monotonic() + AFTERMATH_S)  # the others fail for want of it
    if failures:
        stop()
        raise RankError("\n".join(f"rank {rank}: {what}" for rank, what in sorted(failures.items())))
    return [results[rank] for rank in range(world_size)]


def stop() -> None:
    """End all processes of the pool."""
    while _pool:
        process, connection = _pool.pop()
        connection.close()
        process.kill()
        process.join()


atexit.register(stop)


def _start(world_size: int) -> None:
    if world_size > MAX_RANKS:
        raise ValueError(f"expected at most {MAX_RANKS} ranks, found {world_size}")
    global _turn
    context = multiprocessing.get_context("spawn")
    if not _pool:
        _turn = context.Lock()  # a new one: a rank of the last pool may have been killed while it held the old one
    while len(_pool) < world_size:
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, _turn), daemon=True)
        process.start()
        theirs.close()
        _pool.append((process, ours))


def _work(connection: Connection, turn: Any) -> None:
    import warnings

    import torch
    import torch.distributed as dist
    from compilation import compile_in_turn

    compile_in_turn(turn)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    while True:
        try:
            call = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        sys.path[:], module, name, args, rank, world_size, store, timeout_s = call
        try:
            function: Any = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            torch.manual_seed(0)
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
            try:
                value = function(*args)
                dist.barrier()
            finally:
                dist.destroy_process_group()
            answer = pickle.dumps((True, value))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)
