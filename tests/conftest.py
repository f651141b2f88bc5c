"""What tests of several parts share."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest


@pytest.fixture
def largest_file() -> Callable[[int], AbstractContextManager[None]]:
    """`with largest_file(limit_bytes):` lets the operating system refuse longer files, as a full disk would."""

    @contextmanager
    def limited(limit_bytes: int) -> Iterator[None]:
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, old[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)

    return limited
