"""Which run the processes of a launch go on with when they have been started again."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from narrowgauge.errors import ConfigError
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.restart import Interrupted, Launch, interrupted_run
from narrowgauge.train.run_folder import RunFolder


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return TrainConfig(runs_dir=str(tmp_path / "runs"), name="a", threads=1)


def _begun(config: TrainConfig, launch: Launch, *steps: int) -> RunFolder:
    folder = RunFolder.create(config, launch.name)
    for step in steps:
        folder.checkpoint(step).mkdir()
    folder.unlock()
    return folder


def test_only_an_attempt_of_the_same_launch_goes_on(config: TrainConfig) -> None:
    first = Launch("job")
    folder = _begun(config, first)
    assert interrupted_run(config, None) is None
    assert interrupted_run(config, Launch("other", 1)) is None
    # a machine whose own processes did not fail counts no restart
    assert interrupted_run(config, first) == interrupted_run(config, Launch("job", 1)) == Interrupted(folder.path, None)
    with pytest.raises(ConfigError, match="expected a new run"):
        RunFolder.create(config, "other")
    assert interrupted_run(config, Launch("other", 1)) is None  # the refusal has not taken the folder over


def test_it_goes_on_from_the_last_good_checkpoint(config: TrainConfig) -> None:
    folder = _begun(config, Launch("job"), 3)
    assert interrupted_run(config, Launch("job", 2)) == Interrupted(folder.path, "last-good")


def test_a_run_that_has_ended_is_gone_on_with_after_a_restart_only(config: TrainConfig) -> None:
    folder = _begun(config, Launch("job"), config.steps)
    assert interrupted_run(config, Launch("job")) is None  # another job of the same --rdzv-id
    assert interrupted_run(config, Launch("job", 1)) == Interrupted(folder.path, "last-good")


def test_a_run_of_another_configuration_is_not_meant(config: TrainConfig) -> None:
    _begun(config, Launch("job"))
    assert interrupted_run(dataclasses.replace(config, steps=7), Launch("job", 1)) is None


def test_a_run_that_was_named_by_itself_is_found(config: TrainConfig) -> None:
    nameless = dataclasses.replace(config, name=None, threads=0)
    assert interrupted_run(nameless, Launch("job", 1)) is None  # there is no folder of runs yet
    older = _begun(dataclasses.replace(config, name="b"), Launch("job"))
    newer = _begun(config, Launch("job"))
    _begun(dataclasses.replace(config, name="c"), Launch("other"))
    os.utime(older.config, ns=(1, 1))
    assert interrupted_run(nameless, Launch("job", 1)) == Interrupted(newer.path, None)


def test_what_was_never_begun_is_not_gone_on_with(config: TrainConfig) -> None:
    folder = _begun(config, Launch("job"))
    folder.config.unlink()  # died between lock and configuration
    assert interrupted_run(config, Launch("job", 1)) is None
