"""What one process meets, all of a run end with: the first tells it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run

from narrowgauge.errors import ConfigError, DataError, NarrowgaugeError, ProcessError
from narrowgauge.train.ranks import ONE, Ranks
from narrowgauge.train.sections import ParallelConfig

pytestmark = pytest.mark.multiproc
Told = tuple[str, str, bool]


def _ranks() -> Ranks:
    return Ranks.of(ParallelConfig(data=dist.get_world_size()), torch.device("cpu"))


def _work(failing: tuple[int, ...], how: str) -> int | Told:
    """10 x the rank, or the error of it: its kind, its words, and whether another process tells it."""
    ranks, rank = _ranks(), dist.get_rank()

    def work() -> int:
        if rank in failing:
            raise DataError(f"line {rank + 1}")
        return 10 * rank

    try:
        return getattr(ranks, how)(work)
    except NarrowgaugeError as error:
        return type(error).__name__, str(error), error.is_told_elsewhere


def test_together_gives_each_process_its_own_and_all_of_them_any_error() -> None:
    assert run(2, _work, (), "together") == [0, 10]
    assert run(2, _work, (0, 1), "together") == [("DataError", "line 1", False), ("DataError", "line 1", True)]
    assert run(2, _work, (0,), "together") == [("DataError", "line 1", False), ("DataError", "line 1", True)]
    one, other = run(2, _work, (1,), "together")
    assert one == ("DataError", "rank 1: line 2", False) and other == ("DataError", "line 2", True)


def test_what_the_first_raises_it_tells() -> None:
    assert run(2, _work, (1,), "from_first") == [0, 0]
    assert run(2, _work, (0,), "from_first") == [("DataError", "line 1", False), ("DataError", "line 1", True)]


def _differing() -> bool:
    try:
        _ranks().check_same({"seed": dist.get_rank()})
    except ProcessError as error:
        return error.is_told_elsewhere
    raise AssertionError("expected a ProcessError, found none")


def test_the_first_tells_what_differs() -> None:
    assert run(2, _differing) == [False, True]


def test_one_process_keeps_its_own_error() -> None:
    error = ConfigError("a")

    def fail() -> None:
        raise error

    with pytest.raises(ConfigError) as caught:
        ONE.together(fail)
    assert caught.value is error and ONE.together(lambda: 3) == 3
