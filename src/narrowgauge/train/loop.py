"""`run` and `resume`: a training run from its configuration or its folder. They print nothing: they emit events."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from narrowgauge.distributed.liveness import Limits, Watch
from narrowgauge.train import events
from narrowgauge.train.assemble import assemble
from narrowgauge.train.changes import changed
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.events import OnEvent, Result, ignore
from narrowgauge.train.folder import write_file
from narrowgauge.train.ranks import Ranks
from narrowgauge.train.restart import Launch, interrupted_run
from narrowgauge.train.run_folder import RunFolder
from narrowgauge.train.session import Session
from narrowgauge.train.signals import Interruption
from narrowgauge.train.sinks import with_sinks


def run(config: TrainConfig, on_event: OnEvent = ignore, launch: Launch | None = None) -> Result:
    """Train a model by the configuration, in a new run folder.

    SIGINT or SIGTERM: the step in hand is finished and saved, and the result says INTERRUPTED; a second SIGINT raises
    KeyboardInterrupt at once.

    launch: of the processes, where what started them may start them again: the new ones then go on with the run that
    the old ones began, from its newest whole checkpoint.

    Raises:
        ConfigError, RecipeError: the configuration does not hold together, or the folder is taken.
        ProcessError: the processes of the run were given different configurations.
        DataError: the text cannot be used.
        DivergenceError: the loss exploded, or too many steps in a row were skipped; the checkpoints stay.
        CheckpointError: the last checkpoint could not be written.
    """
    config.check()
    config = config.spelled_out()
    ranks = Ranks.of(config.parallel, config.torch_device())
    ranks.check_same(dataclasses.asdict(config))
    earlier = ranks.from_first(lambda: interrupted_run(config, launch))
    if earlier is not None:
        return resume(earlier.run_dir, on_event, earlier.checkpoint)
    config = ranks.from_first(lambda: _with_all_values(config))
    # made by the first process, known to the others by its path only
    folder = ranks.opened_by_first(
        lambda: RunFolder.create(config, launch.name if launch else ""), RunFolder(config.path)
    )
    try:
        return _train(config, folder, on_event, None, ranks)
    except BaseException:
        folder.discard_unused()  # so that the name is free once the configuration or the text is mended
        raise
    finally:
        folder.unlock()


def resume(
    run_dir: Path | str,
    on_event: OnEvent = ignore,
    checkpoint: str | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Result:
    """Continue a run: bitwise the same run as one that was never stopped, on the same machine.

    The folder's `config.yaml` is the truth; the journal is cut back to the checkpoint first, and newer checkpoints are
    removed. A run that was stopped before its first checkpoint starts again from the beginning.

    Args:
        checkpoint: None for the newest, "last-good" for the newest whole one, or a name such as "step-000100".
        changes: keys of the configuration and their new values, of what watches the run and of what it writes, see
            `train.changes`; they are written in `config.yaml`, and told in the journal.

    Raises:
        ConfigError: a change is of what the run computes, or of no sense.
        CheckpointError: the checkpoint is missing or damaged; the message names the last good one. Else as `run`.
    """
    folder = RunFolder.open(run_dir)
    config, told = changed(folder.read_config(), changes or {})
    ranks = Ranks.of(config.parallel, config.torch_device())
    if changes:
        ranks.check_same(dataclasses.asdict(config))
    ranks.from_first(folder.lock)
    try:
        start = ranks.from_first(lambda: folder.choose(checkpoint))
        if told:
            ranks.from_first(lambda: write_file(folder.config, config.to_yaml()))
        return _train(config, folder, on_event, start, ranks, told)
    finally:
        folder.unlock()


def _with_all_values(config: TrainConfig) -> TrainConfig:
    """The configuration with a name and a number of threads, so that its file repeats the run."""
    name = config.name or f"{config.model.preset}-{config.build_recipe().name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return dataclasses.replace(config, name=name, threads=config.threads or torch.get_num_threads())


def _train(
    config: TrainConfig,
    folder: RunFolder,
    on_event: OnEvent,
    start: int | None,
    ranks: Ranks,
    changes: Sequence[str] = (),
) -> Result:
    on_event = on_event if ranks.is_first else ignore
    sinks = with_sinks(on_event, config, folder.path) if ranks.is_first else nullcontext(on_event)
    with sinks as listener:
        parts = assemble(config, lambda what: listener(events.Preparing(step=0, what=what)), ranks)
        if ranks.is_first and (start is None or not folder.tokenizer.exists()):
            # the model means nothing without it, and the cache that it lies in may be cleared
            write_file(folder.tokenizer, parts.dataset.tokenizer.to_json())
        session = Session(config, folder, listener, parts)
        try:
            session.begin(start)
            if changes:
                session.journal.warn(f"as resume was told: {', '.join(changes)}")
            limits = Limits(step_s=config.parallel.timeout_s)
            with Interruption(session.on_signal) as interruption:
                with Watch(limits, lambda: interruption.requested) as others:
                    return session.train(interruption, others.step)
        finally:
            session.close()
