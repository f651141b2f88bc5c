"""Processes that were started again find each other in a store with traces of those that died."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from narrowgauge.distributed.rendezvous import fresh_store
from narrowgauge.errors import ProcessError

RANKS = 3


def _attempt(store: dist.Store, late: int, timeout_s: float = 20.0) -> list[dist.Store]:
    """The stores of all ranks, of which one comes late."""

    def start(rank: int) -> dist.Store:
        time.sleep(0.2 * (rank == late))
        return fresh_store(store, rank, RANKS, timeout_s)

    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(start, range(RANKS)))


@pytest.mark.parametrize("late", range(RANKS))
def test_each_attempt_has_a_part_of_the_store_of_its_own(late: int) -> None:
    store = dist.HashStore()
    for attempt in range(3):
        found = _attempt(store, late)
        assert not found[0].check(["address"])  # of an earlier attempt
        found[late].set("address", f"of attempt {attempt}")
        assert [each.get("address") for each in found] == [f"of attempt {attempt}".encode()] * RANKS


def test_a_rank_that_is_alone_says_so() -> None:
    store = dist.HashStore()
    _attempt(store, 0)  # the traces of others are not taken for them
    with pytest.raises(ProcessError, match=r"rank 1 found no other 2 ranks within 0\.3 s"):
        fresh_store(store, 1, RANKS, 0.3)
    with pytest.raises(ProcessError, match="rank 0 found"):
        fresh_store(store, 0, RANKS, 0.3)
