"""A run's folder: `config.yaml`, `tokenizer.json`, `journal.jsonl`, `checkpoints/step-000100/`.

One process at a time writes into it: the one that holds its lock.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import nn

from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.train.checkpoint import save
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.folder import remove_unfinished, verify, write_file
from narrowgauge.train.save_handle import SaveHandle

LOCK = ".lock"  # holds the name of the launch that made the folder, where it has one
LAST_GOOD = "last-good"  # asks for the newest checkpoint that is whole
_STEP = re.compile(r"step-(\d{6,})")


@dataclass
class RunFolder:
    """Paths of one run, and its checkpoints. `lock` before writing."""

    path: Path
    _lock: int | None = None

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @classmethod
    def create(cls, config: TrainConfig, launch: str = "") -> RunFolder:
        """Make the folder of a new run and write its configuration, locked.

        launch: a name for all attempts to do this run, see `train.restart`.

        Raises ConfigError where the folder is taken or cannot be written.
        """
        folder = cls(config.path)
        try:
            with _writable(folder.path):
                folder.path.mkdir(parents=True, exist_ok=True)
            folder.lock()
            if folder.config.exists():
                raise ConfigError(
                    f"name={config.name!r}: expected a new run, found one in {folder.path}: "
                    f"choose another name, or continue it with `narrowgauge resume {shlex.quote(str(folder.path))}`"
                )
            with _writable(folder.path):
                (folder.path / LOCK).write_text(launch, encoding="utf-8")
                folder.checkpoints.mkdir(exist_ok=True)
                write_file(folder.config, config.to_yaml())
        except BaseException:
            folder.unlock()
            raise
        return folder

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """An existing run. Raises ConfigError where `path` is none."""
        folder = cls(Path(path))
        if not folder.config.is_file():
            raise ConfigError(f"{path}: expected a run folder, found no config.yaml in it: give the folder of a run")
        return folder

    def lock(self) -> None:
        """Become the only process that writes. Raises ConfigError where another one is at it, or nobody may."""
        with _writable(self.path):
            self._lock = os.open(self.path / LOCK, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however it ends
        except BlockingIOError:
            self.unlock()
            raise ConfigError(
                f"{self.path}: expected a run that nobody writes, found another process training: wait, or stop it"
            ) from None
        remove_unfinished(self.checkpoints)  # only a writer may: what is unfinished may be another's work in hand

    def discard_unused(self) -> None:
        """Undo `create`, where the run never began: it has no journal yet."""
        if self._lock is None or self.journal.exists():
            return
        for file in (self.config, self.tokenizer, self.path / LOCK):
            file.unlink(missing_ok=True)
        for folder in (self.checkpoints, self.path):
            with suppress(OSError):  # not empty: something else lies there
                folder.rmdir()

    def unlock(self) -> None:
        """Let others write; a second call does nothing."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def read_config(self) -> TrainConfig:
        """The run's configuration, checked. Raises ConfigError."""
        return read_checked(self.config, TrainConfig.from_yaml)

    def steps(self) -> list[int]:
        """Steps of all checkpoints that are there, whole or not, in rising order."""
        if not self.checkpoints.is_dir():
            return []
        matches = (_STEP.fullmatch(entry.name) for entry in self.checkpoints.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of a step is, or goes."""
        return self.checkpoints / f"step-{step:06d}"

    def choose(self, wanted: str | None) -> int | None:
        """The step to continue from; None where there is no checkpoint yet.

        wanted: None for the newest; "last-good" for the newest whole one; else a name such as step-000100. Raises
        CheckpointError where that one is missing, truncated or corrupt, naming the newest good one.
        """
        steps = self.steps()
        if wanted == LAST_GOOD:
            return self._last_good(steps, "no checkpoint is whole")
        if wanted is None:
            if not steps:
                return None
            step = steps[-1]
        else:
            match = _STEP.fullmatch(wanted)
            step = int(match[1]) if match else -1
            if step not in steps:
                names = ", ".join(self.checkpoint(s).name for s in steps) or "none"
                raise CheckpointError(
                    f"{self.path}: expected a checkpoint '{wanted}', found {names}: choose one of those"
                )
        self.require_whole(step)
        return step

    def verify(self, step: int) -> None:
        """Raise CheckpointError where the checkpoint of a step is damaged."""
        verify(self.checkpoint(step))

    def require_whole(self, step: int) -> None:
        """Raise CheckpointError where the checkpoint of a step is damaged, naming the newest good one."""
        try:
            self.verify(step)
        except CheckpointError as error:
            good = self._last_good([s for s in self.steps() if s != step], str(error))
            raise CheckpointError(
                f"{error}. The last good checkpoint is {self.checkpoint(good).name}: continue from it with "
                f"`narrowgauge resume {shlex.quote(str(self.path))} --checkpoint {self.checkpoint(good).name}`"
            ) from None

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, *, asynchronous: bool = False, **extra: Any
    ) -> Path | SaveHandle:
        """Write the checkpoint of `step`: all processes of the run call it. Raises CheckpointError.

        asynchronous: from copies, by a thread; returns at once.
        """
        return save(self.checkpoint(step), model, optimizer, asynchronous=asynchronous, step=step, **extra)

    def remove_before(self, step: int, keep_last: int, trouble_since: int = 0) -> None:
        """Remove all but the last `keep_last` checkpoints up to that of `step`; only the holder of the lock does.

        trouble_since: the first step of a trouble that may lead back: the newest one of before it stays; 0: there is
        none.
        """
        earlier = [s for s in self.steps() if s < step] if self._lock is not None else []
        stays = max((s for s in earlier if s < trouble_since), default=None)
        for old in earlier[: max(len(earlier) - (keep_last - 1), 0)]:
            if old != stays:
                shutil.rmtree(self.checkpoint(old), ignore_errors=True)

    def remove_after(self, step: int) -> list[Path]:
        """Remove checkpoints newer than `step`, which belong to the path not taken; returns where they were.

        Only for the process that holds the lock.
        """
        newer = [self.checkpoint(s) for s in self.steps() if s > step]
        for path in newer:
            shutil.rmtree(path, ignore_errors=True)
        return newer

    def _last_good(self, steps: list[int], problem: str) -> int:
        for step in reversed(steps):
            try:
                self.verify(step)
            except CheckpointError:
                continue
            return step
        raise CheckpointError(f"{problem}. No other checkpoint of {self.path} is whole: start the run anew")


class Checkable(Protocol):
    """A configuration that tells whether its values fit together."""

    def check(self) -> None:
        """Raise ConfigError where they do not."""


C = TypeVar("C", bound=Checkable)


def read_checked(path: Path, parse: Callable[[str], C]) -> C:
    """A run's configuration, read from its file and checked. Raises ConfigError."""
    try:
        config = parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected a readable file, found: {error}: restore it") from None
    config.check()
    return config


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path}: expected a run folder that can be written, found: {error.strerror}: "
            "choose another runs_dir or name, or make room"
        ) from error
