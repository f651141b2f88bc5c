"""Fine-tuning runs: data in JSON Lines, a Hugging Face model, a recipe, and the trainers of `integrations.trl`.

`run` and `resume` print nothing: they emit the events of `finetune_events` and `train.events`.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

import narrowgauge
from narrowgauge.data.conversations import Records, check_records
from narrowgauge.distributed.liveness import Limits
from narrowgauge.distributed.liveness import Watch as Others
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.integrations.callback_journal import CallbackJournal
from narrowgauge.integrations.finetune_config import FinetuneConfig, PPOConfig
from narrowgauge.integrations.finetune_events import Ended, Noted
from narrowgauge.integrations.finetune_export import export_directory
from narrowgauge.integrations.finetune_models import (
    Loaded,
    check_chat_template,
    check_end_token,
    length_for,
    load,
)
from narrowgauge.integrations.finetune_ranks import (
    check_same_files,
    processes,
    ranks_of,
    told_by_first,
)
from narrowgauge.integrations.finetune_rewards import reward_function
from narrowgauge.integrations.finetune_run import FinetuneRun, step_of
from narrowgauge.integrations.finetune_trainers import make_trainer
from narrowgauge.integrations.finetune_watch import NothingLeft, Watch
from narrowgauge.observe.journal import cut
from narrowgauge.observe.journal_rows import Row
from narrowgauge.observe.journal_writer import JournalWriter
from narrowgauge.train.events import OnEvent, Preparing, Status, ignore
from narrowgauge.train.ranks import Ranks

try:
    import transformers
    import trl
    from datasets import Dataset
except ImportError as error:
    raise ConfigError(f"{error.name} is not installed: pip install 'narrowgauge[hf]'") from error


@dataclass(frozen=True)
class Outcome:
    """How a run ended: at which step, in which folder, and where the trained model lies, if it came to that."""

    status: Status
    step: int
    run_dir: Path
    model: Path | None


@dataclass(frozen=True)
class Inputs:
    """What a run reads: checked files, as tables of datasets."""

    train: Dataset
    evaluation: Dataset | None
    records: Records


def run(config: FinetuneConfig, on_event: OnEvent = ignore) -> Outcome:
    """Fine-tune as `config` says, in a new folder. On SIGINT the step in hand is finished and saved.

    In a process group all processes call it alike. The first makes and writes the folder, and its events alone are
    told; each reads examples of its own, `batch_size` at a time.

    Raises ConfigError, RecipeError, DataError; DivergenceError where the loss stays infinite or NaN; ProcessError where
    the processes were given different configurations or data, or another one is gone. What the processes have in common
    is raised on all of them.
    """
    ranks = ranks_of(config, config.processes or processes())
    config = dataclasses.replace(config, processes=processes())
    config.check()
    ranks.check_same(dataclasses.asdict(config))
    config = ranks.from_first(lambda: _with_all_values(config))
    # made by the first process, known to the others by its path only
    folder = ranks.opened_by_first(lambda: FinetuneRun.begin(config), FinetuneRun(config.path))
    try:
        return _train(config, folder, on_event, None, ranks)
    except BaseException:
        folder.discard_unused()
        raise
    finally:
        folder.unlock()


def resume(path: Path | str, on_event: OnEvent = ignore, checkpoint: str | None = None) -> Outcome:
    """Go on where a run's newest checkpoint stands, or another one, by its name, on as many processes as it began with.

    Raises as `run` does.
    """
    folder = FinetuneRun.open(path)
    config = dataclasses.replace(folder.settings(), output=str(path))
    ranks = ranks_of(config, config.processes or 1)  # configurations of earlier versions are of one process
    ranks.from_first(folder.lock)
    try:
        start = ranks.from_first(lambda: _checked_start(folder, checkpoint))
        return _train(config, folder, on_event, start, ranks)
    finally:
        folder.unlock()


def _checked_start(folder: FinetuneRun, checkpoint: str | None) -> Path | None:
    """The checkpoint to go on from, whole; None where there is none yet."""
    if not (folder.steps() or checkpoint):
        return None
    start = folder.weights(checkpoint)
    folder.require_whole(step_of(start))
    return start


def _train(config: FinetuneConfig, folder: FinetuneRun, on_event: OnEvent, start: Path | None, ranks: Ranks) -> Outcome:
    watch = Watch(config, folder.path, on_event if ranks.is_first else ignore, ranks)
    limits = Limits(step_s=config.timeout_s)
    with warnings.catch_warnings(), told_by_first(ranks), Others(limits, lambda: watch.is_ending) as others:
        watch.on_progress = others.step
        # what transformers and TRL deprecate in each other is theirs to mend
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl)\.")
        warnings.filterwarnings("ignore", category=FutureWarning, message=r".*gradient_checkpointing` is deprecated")
        return _train_quietly(config, folder, watch, start)


def _train_quietly(config: FinetuneConfig, folder: FinetuneRun, watch: Watch, start: Path | None) -> Outcome:
    if config.threads:
        torch.set_num_threads(config.threads)
    ranks = watch.ranks

    def say(message: str) -> None:
        watch.on_event(Noted(step=0, message=message))

    watch.on_event(Preparing(step=0, what=f"reading {config.data}"))
    inputs = ranks.together(lambda: read_inputs(config, say))
    check_same_files(ranks, config)
    rewards = ranks.together(lambda: [reward_function(path) for path in getattr(config, "reward", ())])
    watch.on_event(Preparing(step=0, what=f"loading {config.model}"))
    loaded = ranks.together(lambda: _load(config, inputs, say))
    watch.on_progress(0)
    if isinstance(config, PPOConfig):
        from narrowgauge.integrations.finetune_ppo import PPORun

        work: Any = PPORun(config, loaded, list(inputs.records.rows()), rewards, say)
    else:
        work = make_trainer(config, loaded, inputs.train, inputs.evaluation, folder.checkpoints, rewards, watch)
        _say_what_is_left(inputs, work, say)
    watch.on_progress(0)
    with ExitStack() as stack:
        nothing: tuple[JournalWriter | None, list[Row]] = None, []
        watch.journal, earlier = ranks.opened_by_first(
            lambda: stack.enter_context(_journal(config, folder, start)), nothing
        )
        if start is not None:
            watch.continue_from(start, earlier)
        return _fit(config, folder, work, watch)


def _load(config: FinetuneConfig, inputs: Inputs, say: Callable[[str], None]) -> Loaded:
    """The model and its tokenizer, which fit the data."""
    transformers.set_seed(config.seed)  # before the model: a reward model's head is new
    loaded = load(
        config.model,
        gguf_file=config.gguf_file,
        chat_template=config.chat_template,
        is_reward=config.task == "reward",
        say=say,
    )
    _check_together(config, inputs, loaded)
    return loaded


def _fit(config: FinetuneConfig, folder: FinetuneRun, work: Any, watch: Watch) -> Outcome:
    began_s = time.monotonic()
    if isinstance(config, PPOConfig):
        from narrowgauge.integrations.finetune_ppo import run_ppo

        step, steps, ledgers = run_ppo(work, folder, watch), config.steps, work.trainer.ledgers()
    else:
        step, steps = _by_trainer(config, work, watch)
        ledgers = {"model": dataclasses.replace(work.ledger, wire=watch.wire)}
    is_done, model = step >= steps, None
    if is_done:
        is_reward = config.task == "reward"
        model = watch.ranks.from_first(
            lambda: export_directory(folder.weights(), folder.model, "bf16", is_reward=is_reward, replace=True)
        )
        watch.on_progress(step)
    status = Status.FINISHED if is_done else Status.INTERRUPTED
    watch.on_event(
        Ended(
            step=step,
            status=status,
            run_dir=folder.path,
            steps=steps,
            seconds=time.monotonic() - began_s,
            figures=watch.figures,
            held_out=watch.held_out,
            ledgers=ledgers,
            model=model,
        )
    )
    return Outcome(status, step, folder.path, model)


def _by_trainer(config: FinetuneConfig, trainer: Any, watch: Watch) -> tuple[int, int]:
    """Train, and evaluate at the end; (last step, steps that were asked for)."""
    start = watch.resumed_from
    if watch.journal is not None:
        trainer.recipe_callback.journal = CallbackJournal(watch.journal, owns_steps=False)
    trainer.verified = start
    with watch.interruption:
        try:
            trainer.train(resume_from_checkpoint=str(start) if start else None)
        except NothingLeft:
            trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
            trainer.is_in_train = False
        step, steps = trainer.state.global_step, trainer.state.max_steps
        was_evaluated = watch.evaluated_at == step or (bool(config.eval_every) and step % config.eval_every == 0)
        if step >= steps and trainer.eval_dataset is not None and not was_evaluated:
            trainer.evaluate()
    return step, steps


def read_inputs(config: FinetuneConfig, say: Callable[[str], None]) -> Inputs:
    """Check and read the files of a configuration. Raises DataError."""
    records = check_records(config.data, config.formats)
    if records.ignored:
        say(f"{config.data}: not used: {', '.join(records.ignored)}")
    if config.eval_data is None:
        return Inputs(table(records), None, records)
    held_out = check_records(config.eval_data, config.formats)
    if (held_out.format, held_out.conversational) != (records.format, records.conversational):
        raise DataError(f"{config.eval_data}: expected lines in the format of {config.data}, found another one")
    return Inputs(table(records), table(held_out), records)


def table(records: Records) -> Dataset:
    """The records as a table. Raises DataError where a column has no one type."""
    try:
        return Dataset.from_list(list(records.rows()))
    except (TypeError, ValueError) as error:  # pyarrow's errors are ValueErrors, too
        raise DataError(f"{records.path}: expected columns of one type each, found: {error}") from error


def _check_together(config: FinetuneConfig, inputs: Inputs, loaded: Loaded) -> None:
    if inputs.records.conversational:
        check_chat_template(loaded.tokenizer, config.model)
    if not inputs.records.conversational or config.task in ("grpo", "ppo"):
        check_end_token(loaded.tokenizer, config.model)
    length_for(loaded.model, config.max_length)


def _say_what_is_left(inputs: Inputs, trainer: Any, say: Callable[[str], None]) -> None:
    """A prompt that fills max_length leaves nothing to learn: the trainer drops such examples."""
    if getattr(trainer.args, "packing", False):
        return
    dropped = len(inputs.train) - len(trainer.train_dataset)
    if dropped:
        say(f"{dropped} of {len(inputs.train)} examples are left out: nothing to learn within max_length")


@contextmanager
def _journal(
    config: FinetuneConfig, folder: FinetuneRun, start: Path | None
) -> Iterator[tuple[JournalWriter, list[Row]]]:
    """The journal to write to, and the rows that it has already."""
    earlier: list[Row] = []
    if start is None:
        versions = {name.__name__: name.__version__ for name in (narrowgauge, torch, transformers, trl)}
        rows = JournalWriter.create(
            folder.journal, {"task": config.task, "recipe": config.build_recipe().name, "versions": versions}
        )
    else:
        step = step_of(start)
        earlier = cut(folder.journal, step, ("step",)).rows
        rows = JournalWriter(folder.journal)
        rows.write("resumed", step=step, checkpoint=start.name)
    try:
        yield rows, earlier
        rows.sync()
    finally:
        rows.close()


def _with_all_values(config: FinetuneConfig) -> FinetuneConfig:
    """The configuration with the folder's name and the recipe of a file written out."""
    config = config.spelled_out()
    return config if config.output is not None else dataclasses.replace(config, output=_default_output(config))


def _default_output(config: FinetuneConfig) -> str:
    name = Path(config.model).name or "model"
    return str(Path("runs") / f"{config.task}-{name}-{config.build_recipe().name}-{datetime.now():%Y%m%d-%H%M%S}")
