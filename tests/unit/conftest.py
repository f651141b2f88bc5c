"""What unit tests of several parts share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


@pytest.fixture(params=[90, 100])
def gpu_build(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A `triton_builds.Builder` for one architecture, with an empty cache, or nothing would be built twice."""
    pytest.importorskip("triton", reason="Triton comes with torch on Linux for GPUs, and not elsewhere")
    from triton_builds import Builder

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return Builder(request.param)
