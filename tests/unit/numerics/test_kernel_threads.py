"""Kernels in threads: the same bits for any number, errors, callers at once, forks."""

from __future__ import annotations

import multiprocessing
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from narrowgauge.numerics import kernels
from narrowgauge.numerics.formats import E4M3FN, E5M2
from narrowgauge.numerics.granularity import Block
from narrowgauge.numerics.kernels import cpu, cpu_hadamard, cpu_threads, cpu_tiles, cpu_wire, wire
from narrowgauge.numerics.kernels.cpu_threads import GRAIN, MIN_CHUNK, in_threads
from narrowgauge.numerics.scaling import E8M0_UP

KEY, SCALE = torch.tensor(7), torch.tensor(1.5)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


# ranges


@pytest.mark.parametrize("items, grain", [(4, 1), (1, 1), (0, 1), (1 << 20, GRAIN), (200, GRAIN), (257, GRAIN)])
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_ranges_cover_all_items_in_order(items: int, grain: int, threads: int) -> None:
    torch.set_num_threads(threads)
    ranges = in_threads(lambda first, last: (first, last), items, 4 * MIN_CHUNK, grain)
    size = -(-items // threads // grain) * grain or grain
    assert len(ranges) == max(-(-items // size), 1)
    assert [first for first, _ in ranges] == [0, *(last for _, last in ranges[:-1])]
    assert ranges[-1][1] == items
    assert all(first % grain == 0 for first, _ in ranges)
    assert items == 0 or all(first < last for first, last in ranges)


def test_little_work_stays_in_the_callers_thread() -> None:
    assert in_threads(lambda first, last: threading.current_thread(), 8, 2 * MIN_CHUNK - 1) == [
        threading.current_thread()
    ]


def test_ranges_run_at_once() -> None:
    both = threading.Barrier(2, timeout=60)
    in_threads(lambda first, last: both.wait(), 2, 2 * MIN_CHUNK)  # one after the other would time out


# bits


def _tiles(x: Tensor) -> Any:
    return cpu_tiles.quantize_blocks(x, E4M3FN, Block(1, 128), E8M0_UP, True, torch.bfloat16, True, KEY, 3)


def _wire(x: Tensor) -> list[Tensor]:
    form, n = wire.WireFormat(E4M3FN, 128, E8M0_UP), x.numel() // 3 + 1
    rows, residual = wire.encode(x, 3, n, form, key=KEY), torch.full((n,), 0.01)
    out = torch.zeros(form.row_bytes(n), dtype=torch.uint8)
    cpu_wire.reduce_and_encode(rows, n, form, 3.0, KEY, 4, residual, out)
    return [rows, wire.decode(rows, x.numel(), n, form), wire.reduce(rows, n, form, 3), residual, out]


KERNELS: dict[str, Callable[[Tensor], Any]] = {
    "amax": lambda x: [cpu.amax(x)],
    "cast": lambda x: cpu.quantize(x, SCALE, E5M2, True, torch.bfloat16),
    "stochastic cast": lambda x: cpu.quantize(x, SCALE, E4M3FN, True, torch.float32, KEY, 2),
    "counts": lambda x: cpu.count(x, 100 * SCALE, E4M3FN),
    "stochastic counts": lambda x: cpu.count(x, 100 * SCALE, E4M3FN, KEY, 2),
    "bfloat16": lambda x: [cpu.round_to_bfloat16(x, SCALE, KEY, 2)],
    "decode": lambda x: [cpu.dequantize(x.to(E4M3FN.dtype), SCALE, E4M3FN, torch.empty_like(x))],
    "tiles": _tiles,
    "decode tiles": lambda x: [
        cpu_tiles.dequantize_blocks(_tiles(x)[0], _tiles(x)[2], E4M3FN, Block(1, 128), None, torch.float32)
    ],
    "hadamard": lambda x: [cpu_hadamard.transform(x, (1, -1) * 8)],
    "wire": _wire,
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_bits_do_not_depend_on_the_number_of_threads(kernel: str) -> None:
    x = torch.randn(6 * MIN_CHUNK // 200 + 9, 200, generator=torch.Generator().manual_seed(0))
    x[-1, -1], found = 100, []  # the largest is in the last range, which is ragged
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        parts = [part.reshape(-1).view(torch.uint8) for part in KERNELS[kernel](x) if part is not None]
        found.append(torch.cat(parts))
    assert torch.equal(found[1], found[0]) and torch.equal(found[2], found[0])


# errors


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_is_raised_when_all_ranges_have_ended(failing: int) -> None:
    ended = []

    def work(first: int, last: int) -> None:
        both.wait()
        if first == failing:
            raise ZeroDivisionError(f"range {first}")
        time.sleep(0.05)
        ended.append(first)

    both = threading.Barrier(2, timeout=60)
    with pytest.raises(ZeroDivisionError, match=f"range {failing}"):
        in_threads(work, 2, 2 * MIN_CHUNK)
    assert ended == [1 - failing]
    assert in_threads(lambda first, last: first, 2, 2 * MIN_CHUNK) == [0, 1]  # the helper lives


def test_nothing_of_a_call_is_kept() -> None:
    def call() -> weakref.ref[np.ndarray]:
        x = np.ones(8)
        in_threads(lambda first, last: x[first:last].sum(), 8, 2 * MIN_CHUNK)
        return weakref.ref(x)

    # a helper that comes too late for its range finds it empty, though it may hold it for longer
    assert call()() is None


# callers


def test_a_caller_does_all_while_the_helpers_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "_helpers", cpu_threads._Helpers())  # one, where tests before had several
    entered, leave = threading.Barrier(3, timeout=60), threading.Event()

    def block(first: int, last: int) -> None:
        entered.wait()
        leave.wait(60)

    other = threading.Thread(target=in_threads, args=(block, 2, 2 * MIN_CHUNK))
    other.start()
    entered.wait()  # the other caller, and the only helper
    found = in_threads(lambda first, last: threading.current_thread(), 2, 2 * MIN_CHUNK)
    leave.set()
    other.join()
    assert found == [threading.current_thread()] * 2


def test_threads_may_cast_at_once() -> None:
    # case 116: autograd's workers and users' threads call the kernels together
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    expected, results = cpu.quantize(x, SCALE, E4M3FN, True, None)[0], []
    workers = [
        threading.Thread(target=lambda: results.extend(cpu.quantize(x, SCALE, E4M3FN, True, None)[0] for _ in range(5)))
        for _ in range(8)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 40
    assert all(torch.equal(codes.view(torch.uint8), expected.view(torch.uint8)) for codes in results)


# forks


def _cast_in_child(x: Tensor, queue: Any) -> None:
    caller = threading.current_thread()
    both = threading.Barrier(2, timeout=20)
    threads = in_threads(lambda first, last: (both.wait(), threading.current_thread())[1], 2, 2 * MIN_CHUNK)
    queue.put((kernels.amax(x).item(), threads[0] is caller, threads[1] is caller))


@pytest.mark.multiproc
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_helpers_of_its_own() -> None:
    x = torch.arange(1 << 20, dtype=torch.float32)
    assert kernels.amax(x) == 2**20 - 1  # by a helper that the child does not have
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_cast_in_child, args=(x, queue), daemon=True)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert queue.get() == (2**20 - 1, True, False)
