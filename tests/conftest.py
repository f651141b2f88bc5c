"""What tests of several parts share."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

ACCELERATE = "ACCELERATE_"
TEXT = "In winter the narrow gauge line up the valley ran twice a day, and {} wagons carried {} tons of slate.\n"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that this machine cannot run; the closing line counts them as deselected."""
    present = {
        "gpu": torch.cuda.is_available(),
        "compiler": any(shutil.which(name) for name in ("g++", "c++", "clang++")),
    }
    missing = [marker for marker, found in present.items() if not found]
    left_out = [item for item in items if any(item.get_closest_marker(marker) for marker in missing)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """accelerate leaves what it was asked for in the environment, where later tests and processes would read it."""
    before = {name: value for name, value in os.environ.items() if name.startswith(ACCELERATE)}
    yield
    for name in [name for name in os.environ if name.startswith(ACCELERATE)]:
        if name not in before:
            del os.environ[name]
    os.environ.update(before)


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


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small texts."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(12):
        lines = [TEXT.format(number * line, line * line) for line in range(12)]
        (folder / f"{number:02d}.txt").write_text("".join(lines))
    return folder
