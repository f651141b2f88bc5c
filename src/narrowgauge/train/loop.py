"""`run` and `resume`: a training run from its configuration or its folder. They print nothing: they emit events."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import torch

from narrowgauge.train import events
from narrowgauge.train.assemble import assemble
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.events import OnEvent, Result, ignore
from narrowgauge.train.folder import write_file
from narrowgauge.train.run_folder import RunFolder
from narrowgauge.train.session import Session
from narrowgauge.train.signals import Interruption
from narrowgauge.train.tensorboard import with_tensorboard


def run(config: TrainConfig, on_event: OnEvent = ignore) -> Result:
    """Train a model by the configuration, in a new run folder.

    SIGINT or SIGTERM: the step in hand is finished and saved, and the result says INTERRUPTED; a second SIGINT raises
    KeyboardInterrupt at once.

    Raises:
        ConfigError, RecipeError: the configuration does not hold together, or the folder is taken.
        DataError: the text cannot be used.
        DivergenceError: the loss exploded, or too many steps in a row were skipped; the checkpoints stay.
        CheckpointError: the last checkpoint could not be written.
    """
    config.check()
    config = _with_all_values(config)
    folder = RunFolder.create(config)
    try:
        return _train(config, folder, on_event, None)
    except BaseException:
        folder.discard_unused()  # so that the name is free once the configuration or the text is mended
        raise
    finally:
        folder.unlock()


def resume(run_dir: Path | str, on_event: OnEvent = ignore, checkpoint: str | None = None) -> Result:
    """Continue a run: bitwise the same run as one that was never stopped, on the same machine.

    The folder's `config.yaml` is the truth; the journal is cut back to the checkpoint first, and newer checkpoints are
    removed. A run that was stopped before its first checkpoint starts again from the beginning.

    Args:
        checkpoint: None for the newest, "last-good" for the newest whole one, or a name such as "step-000100".

    Raises:
        CheckpointError: the checkpoint is missing or damaged; the message names the last good one. Else as `run`.
    """
    folder = RunFolder.open(run_dir)
    folder.lock()
    try:
        return _train(folder.read_config(), folder, on_event, folder.choose(checkpoint))
    finally:
        folder.unlock()


def _with_all_values(config: TrainConfig) -> TrainConfig:
    """The configuration with a name and a number of threads, so that its file repeats the run."""
    name = config.name or f"{config.model.preset}-{config.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    return dataclasses.replace(config, name=name, threads=config.threads or torch.get_num_threads())


def _train(config: TrainConfig, folder: RunFolder, on_event: OnEvent, start: int | None) -> Result:
    with with_tensorboard(on_event, folder.path / "tensorboard" if config.tensorboard else None) as listener:
        parts = assemble(config, lambda what: listener(events.Preparing(step=0, what=what)))
        if start is None or not folder.tokenizer.exists():
            # the model means nothing without it, and the cache that it lies in may be cleared
            write_file(folder.tokenizer, parts.dataset.tokenizer.to_json())
        session = Session(config, folder, listener, parts)
        try:
            session.begin(start)
            with Interruption(session.on_signal) as interruption:
                return session.train(interruption)
        finally:
            session.close()
