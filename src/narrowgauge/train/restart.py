"""Runs whose processes torchrun starts again after one of them died: the new ones go on with the run of the old.

A run's folder tells, in its lock file, which launch made it; all attempts of one launch have the same name for it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.train.config import TrainConfig
from narrowgauge.train.run_folder import LAST_GOOD, LOCK, RunFolder


@dataclass(frozen=True)
class Launch:
    """One launch of a run's processes.

    name: the same for all attempts of it. restarts: attempts before this one, as this machine's torchrun has counted
    them: that of a machine whose processes did not fail stays 0, so it does not tell whether there were any.
    """

    name: str
    restarts: int = 0


@dataclass(frozen=True)
class Interrupted:
    """A run to go on with, from a checkpoint as `resume` takes it; None: it was stopped before its first one."""

    run_dir: Path
    checkpoint: str | None


def interrupted_run(config: TrainConfig, launch: Launch | None) -> Interrupted | None:
    """What an earlier attempt of this launch began and did not end; None where there is no such run.

    Only a folder that this launch made by the same configuration counts: where another run has the name, the first
    attempt and all others refuse alike. A run that has ended counts where processes are known to have been started
    again, and then there is nothing left to do.
    """
    if launch is None:
        return None
    runs = Path(config.runs_dir)
    folders = [config.path] if config.name is not None else sorted(runs.iterdir()) if runs.is_dir() else []
    made = [RunFolder(path) for path in folders if _made_by(path, launch)]
    found = [folder for folder in made if folder.config.is_file() and _is_same(folder.read_config(), config)]
    if not launch.restarts:
        found = [folder for folder in found if folder.steps()[-1:] != [config.steps]]
    if not found:
        return None
    newest = max(found, key=lambda folder: folder.config.stat().st_mtime_ns)
    return Interrupted(newest.path, LAST_GOOD if newest.steps() else None)


def _made_by(path: Path, launch: Launch) -> bool:
    lock = path / LOCK
    return lock.is_file() and lock.read_text(encoding="utf-8") == launch.name


def _is_same(found: TrainConfig, config: TrainConfig) -> bool:
    """True where a folder's configuration is `config` with the values that a run fills in."""
    filled = dataclasses.replace(config, name=config.name or found.name, threads=config.threads or found.threads)
    return found == filled
