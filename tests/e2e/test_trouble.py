"""Full disks, bad batches, divergence and signals during a run: each ends as decided, with the files intact."""

from __future__ import annotations

import errno
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import narrowgauge as ng
from narrowgauge.errors import CheckpointError, ConfigError, DataError, DivergenceError
from narrowgauge.observe import journal
from narrowgauge.train import checkpoint as checkpoints
from narrowgauge.train import loop
from narrowgauge.train.assemble import Parts, assemble
from narrowgauge.train.events import CheckpointSaved, Evaluated, Event, Finished, Skipped, Status, StepDone, Warned
from narrowgauge.train.loop import resume, run
from narrowgauge.train.run_folder import RunFolder


class Listener:
    """Keeps all events."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[[set[int]], None]:
    """Let the embedding give NaN at chosen training forwards (counted from 1)."""

    def install(forwards: set[int]) -> None:
        def poisoned(*args: Any) -> Parts:
            parts = assemble(*args)
            count = 0

            def hook(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
                nonlocal count
                if not module.training:
                    return None
                count += 1
                return output * math.nan if count in forwards else None

            parts.model.embedding.register_forward_hook(hook)
            return parts

        monkeypatch.setattr(loop, "assemble", poisoned)

    return install


@pytest.mark.parametrize("recipe", ng.recipe_names())
def test_a_bad_batch_costs_its_step_and_nothing_else(recipe: str, make_config, poison) -> None:
    poison({3, 4})
    listener = Listener()
    result = run(make_config("a", recipe=recipe, steps=6, save_every=0, eval_every=0), listener)
    assert result.status is Status.FINISHED
    rows = journal.read(result.run_dir / "journal.jsonl").of_kind("step")
    assert [row["skipped"] for row in rows] == [False, False, True, True, False, False]
    assert [row.get("bad_parameter", "") for row in rows][2:4] == ["embedding.weight"] * 2
    assert all(math.isfinite(row["loss"]) for row in rows if not row["skipped"])
    assert [event.consecutive for event in listener.of(Skipped)] == [1, 2]
    assert listener.of(Finished)[0].skipped_steps == 2


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp16"])
def test_skips_in_a_row_stop_the_run_with_the_parameters_name(recipe: str, make_config, poison) -> None:
    poison(set(range(3, 100)))
    listener = Listener()
    with pytest.raises(DivergenceError, match=r"4 steps in a row.*step 6.*'embedding\.weight'"):
        run(make_config("a", recipe=recipe, steps=20, save_every=2, max_skips=4), listener)
    assert len(listener.of(Skipped)) == 4
    folder = RunFolder(listener.of(CheckpointSaved)[0].path.parent.parent)
    assert len(journal.read(folder.journal).of_kind("step")) == 6


def test_skips_before_and_after_a_resume_count_together(make_config, poison) -> None:
    poison(set(range(3, 100)))
    config = make_config("a", steps=20, save_every=4, max_skips=5)
    with pytest.raises(DivergenceError):
        run(config)
    poison(set(range(1, 100)))
    listener = Listener()
    with pytest.raises(DivergenceError, match="5 steps in a row"):
        resume(Path(config.runs_dir) / "a", listener)
    assert [event.consecutive for event in listener.of(Skipped)] == [3, 4, 5]  # steps 3 and 4 are in the checkpoint


def test_an_exploding_loss_stops_the_run_and_keeps_the_checkpoints(make_config) -> None:
    config = make_config(
        "a",
        steps=200,
        save_every=5,
        eval_every=0,
        optimizer={"lr": 30.0},
        divergence={"patience": 4, "window": 8},
        clip=0.0,
    )
    with pytest.raises(DivergenceError, match=r"exploded.*optimizer\.lr"):
        run(config)
    folder = RunFolder(Path(config.runs_dir) / "a")
    rows = journal.read(folder.journal).of_kind("step")
    assert 4 <= len(rows) < 200 and rows[-1]["loss"] > rows[0]["loss"]


def test_a_full_disk_during_a_save_warns_and_the_run_goes_on(make_config, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener()
    real = checkpoints.save_file

    def full_at_first(*args: Any, **kwargs: Any) -> None:
        if len(listener.of(StepDone)) < 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*args, **kwargs)

    monkeypatch.setattr(checkpoints, "save_file", full_at_first)
    result = run(make_config("a", save_every=2), listener)
    assert result.status is Status.FINISHED
    warnings = listener.of(Warned)
    assert [event.step for event in warnings] == [2, 4]
    assert "No space left on device" in warnings[0].message
    assert RunFolder(result.run_dir).steps() == [6, 8]
    assert sorted(p.name for p in (result.run_dir / "checkpoints").iterdir()) == ["step-000006", "step-000008"]


def test_a_last_save_that_fails_ends_in_an_error_with_the_old_checkpoint_intact(
    make_config, ending, largest_file
) -> None:
    whole = run(make_config("whole"))
    limits: list[Any] = []

    def listen(event: Event) -> None:
        if isinstance(event, CheckpointSaved):
            limits.append(largest_file(40_000))  # the journal still fits, the weights do not
            limits[-1].__enter__()

    config = make_config("a")
    try:
        with pytest.raises(CheckpointError, match="without its last checkpoint.*File too large"):
            run(config, listen)
    finally:
        for limit in limits:
            limit.__exit__(None, None, None)
    folder = RunFolder(Path(config.runs_dir) / "a")
    assert [p.name for p in folder.checkpoints.iterdir()] == ["step-000004"]
    resume(folder.path)
    assert ending(folder.path) == ending(whole.run_dir)


def test_a_journal_on_a_full_disk_warns_once_and_loses_no_row(make_config, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    listener = Listener()

    def refuse(descriptor: int, data: bytes) -> int:
        if 2 <= len(listener.of(StepDone)) < 5 and data.startswith(b'{"kind"'):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", refuse)
    result = run(make_config("a", save_every=0, eval_every=0), listener)
    assert [row["step"] for row in journal.read(result.run_dir / "journal.jsonl").of_kind("step")] == list(range(1, 9))
    assert [event.step for event in listener.of(Warned)] == [3]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(make_config, ending, number: int) -> None:
    whole = run(make_config("whole"))
    handler = signal.getsignal(number)

    def listen(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 4:  # validation is due here, and comes after the resume
            os.kill(os.getpid(), number)

    result = run(make_config("a"), listen)
    assert result.status is Status.INTERRUPTED and result.step == 4
    assert RunFolder(result.run_dir).steps() == [4]
    assert signal.getsignal(number) is handler
    assert resume(result.run_dir).status is Status.FINISHED
    assert ending(result.run_dir) == ending(whole.run_dir)


def test_a_second_sigint_aborts_at_once(make_config) -> None:
    def listen(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # repeated by a process manager: not an abort
            os.kill(os.getpid(), signal.SIGINT)

    config = make_config("a")
    with pytest.raises(KeyboardInterrupt):
        run(config, listen)
    assert RunFolder(Path(config.runs_dir) / "a").steps() == []


def test_a_signal_during_validation_saves_at_that_step(make_config, ending) -> None:
    whole = run(make_config("whole"))

    def listen(event: Event) -> None:
        if isinstance(event, Evaluated) and event.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    result = run(make_config("a", save_every=0), listen)
    assert result.step == 4 and RunFolder(result.run_dir).steps() == [4]
    resume(result.run_dir)
    assert ending(result.run_dir) == ending(whole.run_dir)


def test_a_run_that_never_began_leaves_its_name_free(make_config, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a few words\n")
    config = make_config("a", data={"corpus": str(text), "tokenizer": "bytes"})
    with pytest.raises(DataError, match="sequence"):
        run(config)
    assert not (Path(config.runs_dir) / "a").exists()
    text.write_text("a few words more\n" * 100)
    assert run(config).status is Status.FINISHED


def test_tensorboard_that_is_not_installed_is_named(make_config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'narrowgauge\[report\]'"):
        run(make_config("a", tensorboard=True))
