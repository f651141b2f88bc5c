"""The processes of a fine-tuning run: that all are there, go by the same files, and tell what goes wrong once."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from narrowgauge.distributed.liveness import has_raised
from narrowgauge.distributed.meeting_point import meeting_point
from narrowgauge.errors import ConfigError, NarrowgaugeError, ProcessError
from narrowgauge.integrations.finetune_config import FinetuneConfig
from narrowgauge.train.ranks import Ranks
from narrowgauge.train.sections import ParallelConfig

_WAIT_S, _POLL_S = 3.0, 0.05  # for the first process's error; processes fail together, if at all


def processes() -> int:
    """How many this process is one of."""
    return dist.get_world_size() if dist.is_initialized() else 1


def ranks_of(config: FinetuneConfig, wanted: int) -> Ranks:
    """All processes. Raises ConfigError where they are not as many as wanted."""
    found = processes()
    if wanted != found:
        alone = "without torchrun" if wanted == 1 else f"by `torchrun --nproc-per-node {wanted} -m narrowgauge ...`"
        error = ConfigError(
            f"processes={wanted}: expected as many, found {found}: start it {alone}; new runs take another number"
        )
        error.is_told_elsewhere = dist.is_initialized() and dist.get_rank() != 0
        raise error
    return Ranks.of(ParallelConfig(data=found), config.torch_device())


@contextmanager
def told_by_first(ranks: Ranks) -> Iterator[None]:
    """An error that the first process has, too, it tells; what one process meets alone, this tells, and the first one.

    Inside of it is the watch for other processes, whose verdict on one that has failed comes as a ProcessError.
    """
    try:
        yield
    except ProcessError as error:
        error.is_told_elsewhere |= not ranks.is_first and has_raised(str(error))
        raise
    except NarrowgaugeError as error:
        if ranks.layout is not None and not error.is_told_elsewhere:
            _compare(ranks, error)
        raise


def _compare(ranks: Ranks, error: NarrowgaugeError) -> None:
    """Note whether the first process has the same error: it says so to the store."""
    text, end_s = f"{type(error).__name__}: {error}", time.monotonic() + _WAIT_S
    try:
        store = meeting_point("errors", _WAIT_S)
        if ranks.is_first:
            store.set("first", text)
            return
        while not error.is_told_elsewhere and time.monotonic() < end_s:
            error.is_told_elsewhere = store.check(["first"]) and store.get("first").decode() == text
            time.sleep(_POLL_S)
    except RuntimeError:  # the process that holds the store is gone
        return


def check_same_files(ranks: Ranks, config: FinetuneConfig) -> None:
    """Raise ProcessError where the processes read different data: they would not take the same number of steps."""
    if ranks.layout is None:
        return
    digests: dict[str, str] = {}
    for path in filter(None, (config.data, config.eval_data)):
        with open(path, "rb") as file:
            digests[path] = hashlib.file_digest(file, "sha256").hexdigest()
    ranks.check_same(digests)
