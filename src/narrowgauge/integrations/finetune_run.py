"""The folder of a fine-tuning run: `config.yaml`, `journal.jsonl`, `checkpoints/checkpoint-100/`, `model/` at its end.

The checkpoints are the trainer's own; `model/` is a Hugging Face directory.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.integrations.finetune_config import FinetuneConfig, PPOConfig, from_yaml, task_of
from narrowgauge.train.folder import MANIFEST, os_errors, verify, write_file
from narrowgauge.train.run_folder import LAST_GOOD, RunFolder, read_checked

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_FILES = (("config.json",), ("model.safetensors", "model.safetensors.index.json"), ("tokenizer_config.json",))
# what transformers' Trainer needs to go on bit for bit; each by the names that it may have
_TRAINERS_FILES = (("scheduler.pt",), ("training_args.bin",))
LAST_WRITTEN = "trainer_state.json"  # of a checkpoint's files: without it, writing was cut short


class FinetuneRun(RunFolder):
    """Paths of one run, and its checkpoints. `lock` before writing."""

    @property
    def model(self) -> Path:
        return self.path / "model"

    @classmethod
    def begin(cls, config: FinetuneConfig) -> FinetuneRun:
        """Make the folder of a new run and write its configuration, locked.

        Raises ConfigError where the folder is taken or cannot be written.
        """
        folder = cls(config.path)
        try:
            with os_errors():
                folder.path.mkdir(parents=True, exist_ok=True)
                folder.lock()
                if folder.config.exists():
                    quoted = shlex.quote(str(folder.path))
                    raise ConfigError(
                        f"output={config.output}: expected a new run, found one there: choose another folder, or "
                        f"continue it with `narrowgauge resume {quoted}`"
                    )
                folder.checkpoints.mkdir(exist_ok=True)
                write_file(folder.config, config.to_yaml())
        except OSError as error:
            folder.unlock()
            raise ConfigError(
                f"{folder.path}: expected a folder that can be written, found: {error.strerror}: choose another output"
            ) from error
        except BaseException:
            folder.unlock()
            raise
        return folder

    @classmethod
    def is_at(cls, path: Path | str) -> bool:
        """True where `path` is the folder of a fine-tuning run, and not of another one or no run at all."""
        config = Path(path) / "config.yaml"
        try:
            return config.is_file() and task_of(config.read_text(encoding="utf-8")) is not None
        except (OSError, UnicodeDecodeError):
            return False

    def settings(self) -> FinetuneConfig:
        """The run's configuration, checked. Raises ConfigError."""
        return read_checked(self.config, lambda text: from_yaml(text, str(self.config)))

    def steps(self) -> list[int]:
        """Steps of all checkpoints that were written to their end, in rising order."""
        if not self.checkpoints.is_dir():
            return []
        found = ((_CHECKPOINT.fullmatch(entry.name), entry) for entry in self.checkpoints.iterdir())
        return sorted(int(match[1]) for match, entry in found if match and (entry / LAST_WRITTEN).is_file())

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.checkpoints / f"checkpoint-{step}"

    def verify(self, step: int) -> None:
        """Raise CheckpointError where a file of a checkpoint is missing, or one of ours truncated or changed."""
        path, folder = self.checkpoint(step), self.checkpoint(step) / "narrowgauge"
        config = self.settings()
        is_trainers = not isinstance(config, PPOConfig)
        for needed in (*_FILES, *((*_TRAINERS_FILES, *_random_states(config.processes)) if is_trainers else ())):
            if not any((path / name).is_file() for name in needed):
                raise CheckpointError(f"{path}: {needed[0]} is missing")
        for manifest in sorted(folder.rglob(MANIFEST)) or [folder / MANIFEST]:
            verify(manifest.parent)

    def weights(self, wanted: str | None = None) -> Path:
        """The Hugging Face directory of a checkpoint, by default the newest. Raises CheckpointError."""
        steps = self.steps()
        names = [self.checkpoint(step).name for step in steps]
        if not names:
            raise CheckpointError(f"{self.path}: expected a checkpoint, found none yet: wait for it, or resume the run")
        if wanted == LAST_GOOD:
            return self.checkpoint(self._last_good(steps, "no checkpoint is whole"))
        if wanted is None:
            return self.checkpoint(steps[-1])
        if wanted not in names:
            raise CheckpointError(f"{self.path}: expected a checkpoint '{wanted}', found {', '.join(names)}")
        return self.checkpoints / str(wanted)


def _random_states(processes: int) -> tuple[tuple[str], ...]:
    """The files with the states of random generators, of each process; all are needed."""
    if processes <= 1:
        return (("rng_state.pth",),)
    return tuple((f"rng_state_{rank}.pth",) for rank in range(processes))


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint, by its name."""
    return int(checkpoint.name.rpartition("-")[2])
