"""What unit tests of several parts share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny tensors are not worth a second thread, which costs milliseconds an operation on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def seeded() -> Iterator[None]:
    """Torch's random numbers from seed 0, the caller's state left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
