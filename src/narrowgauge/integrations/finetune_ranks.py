"""The processes of a fine-tuning run: that all are there, go by the same files, and tell what goes wrong once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from narrowgauge.distributed.liveness import has_raised
from narrowgauge.errors import ConfigError, ProcessError
from narrowgauge.integrations.finetune_config import FinetuneConfig
from narrowgauge.integrations.finetune_run import FinetuneRun
from narrowgauge.train.ranks import Ranks
from narrowgauge.train.sections import ParallelConfig


def processes() -> int:
    """How many this process is one of."""
    return dist.get_world_size() if dist.is_initialized() else 1


def ranks_of(config: FinetuneConfig, wanted: int) -> Ranks:
    """All processes. Raises ConfigError where they are not as many as wanted."""
    found = processes()
    if wanted != found:
        alone = "without torchrun" if wanted == 1 else f"by `torchrun --nproc-per-node {wanted} -m narrowgauge ...`"
        error = ConfigError(f"processes={wanted}: expected as many, found {found}: start this command {alone}")
        error.is_told_elsewhere = dist.is_initialized() and dist.get_rank() != 0
        raise error
    return Ranks.of(ParallelConfig(data=found), config.torch_device())


def folder_on_first(ranks: Ranks, open_folder: Callable[[], FinetuneRun | None], path: Path) -> FinetuneRun:
    """The run's folder: made or locked by the first process, known to the others by its path only."""
    opened: list[FinetuneRun | None] = []
    ranks.from_first(lambda: opened.append(open_folder()))
    return (opened[0] if opened else None) or FinetuneRun(path)


@contextmanager
def told_by_its_own(ranks: Ranks) -> Iterator[None]:
    """Of an error that another process has raised, and tells, the first process is to tell, too, and no third one."""
    try:
        yield
    except ProcessError as error:
        error.is_told_elsewhere |= not ranks.is_first and has_raised(str(error))
        raise


def check_same_files(ranks: Ranks, config: FinetuneConfig) -> None:
    """Raise ProcessError where the processes read different data: they would not take the same number of steps."""
    if ranks.layout is None:
        return
    digests: dict[str, str] = {}
    for path in filter(None, (config.data, config.eval_data)):
        with open(path, "rb") as file:
            digests[path] = hashlib.file_digest(file, "sha256").hexdigest()
    ranks.check_same(digests)
