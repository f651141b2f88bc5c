"""Figures of a run reach TensorBoard's files, trackio and W&B, under the same tags."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from narrowgauge.errors import ConfigError
from narrowgauge.train import events
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.sinks import figures_of, with_sinks

LAYERS = {
    "a": {"input": {"sqnr_db": 31.0, "flushed": 0.25}, "param": {"lost": 0.5}},
    "b": {"input": {"sqnr_db": 29.0, "flushed": 0.0, "scale": 0.125}},
}


def a_step(**fields: Any) -> events.StepDone:
    return events.StepDone(
        step=50, steps=100, loss=2.5, grad_norm=1.5, lr=0.25, tokens=10, seconds=1.0, tokens_per_s=10.0, skipped=False,
        loss_scale=1.0, **fields,
    )  # fmt: skip


SAMPLED = a_step(
    statistics={"input": {"saturated": 0.0, "flushed": 0.125}}, precision=LAYERS, bytes_by_role={"param": 1024}
)
TAGS = {
    "train/loss": 2.5, "train/grad_norm": 1.5, "train/lr": 0.25, "train/tokens_per_s": 10.0, "train/loss_scale": 1.0,
    "casts/input/saturated": 0.0, "casts/input/flushed": 0.125, "worst/input/sqnr_db": 29.0,
    "worst/input/flushed": 0.25, "worst/input/scale": 0.125, "worst/param/lost": 0.5, "bytes/param": 1024,
}  # fmt: skip


class Recorder(types.ModuleType):
    """trackio's and wandb's interface, recorded: `init` gives a run that logs and finishes."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[dict[str, float], int]] = []
        self.finished = 0

    def init(self, **options: Any) -> Recorder:
        sys.stdout.write("hello from the tracker")
        self.begun.append(options)
        return self

    def log(self, figures: dict[str, float], step: int) -> None:
        self.logged.append((figures, step))

    def finish(self) -> None:
        self.finished += 1


def test_events_have_tags() -> None:
    assert figures_of(SAMPLED) == TAGS
    assert not [tag for tag in figures_of(a_step()) if not tag.startswith("train/")]
    evaluated = events.Evaluated(step=3, loss=1.0, perplexity=2.7, bits_per_byte=0.5, tokens=9, seconds=1.0)
    assert figures_of(evaluated) == {"validation/loss": 1.0, "validation/bits_per_byte": 0.5}
    assert figures_of(events.Warned(step=3, message="")) == {}


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_trackers_get_the_run_its_configuration_and_its_figures(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Recorder(name)
    monkeypatch.setitem(sys.modules, name, tracker)
    config = TrainConfig.from_dict({"name": "mine", name: True, "project": "p"})
    seen: list[events.Event] = []
    with with_sinks(seen.append, config, tmp_path) as listener:
        listener(SAMPLED)
        listener(events.Warned(step=51, message="not for trackers"))
        assert tracker.finished == 0
    assert seen[0] is SAMPLED and len(seen) == 2
    assert tracker.logged == [(TAGS, 50)] and tracker.finished == 1
    (options,) = tracker.begun
    assert (options["project"], options["name"], options["resume"]) == ("p", "mine", "allow")
    assert options["config"]["recipe"] == "narrow8" and options["config"]["optimizer"]["lr"] > 0
    assert capsys.readouterr().out == ""  # standard output is the command's


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_a_tracker_that_is_not_there_or_does_not_start_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = TrainConfig.from_dict({"name": "mine", name: True})
    monkeypatch.setitem(sys.modules, name, None)
    with (
        pytest.raises(ConfigError, match=f"{name}=true: expected the package {name}"),
        with_sinks(print, config, tmp_path),
    ):
        pass
    refusing = Recorder(name)
    monkeypatch.setattr(refusing, "init", lambda **_: 1 / 0)
    monkeypatch.setitem(sys.modules, name, refusing)
    with pytest.raises(ConfigError, match=f"expected {name} to start"), with_sinks(print, config, tmp_path):
        pass


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    config = TrainConfig.from_dict({"name": "mine", "tensorboard": True})
    with with_sinks(lambda event: None, config, tmp_path) as listener:
        listener(SAMPLED)
    files = EventAccumulator(str(tmp_path / "tensorboard"))
    files.Reload()
    assert {tag: files.Scalars(tag)[0].value for tag in files.Tags()["scalars"]} == TAGS
    assert {each.step for tag in TAGS for each in files.Scalars(tag)} == {50}


def test_without_sinks_the_listener_is_the_callers_own(tmp_path: Path) -> None:
    with with_sinks(print, TrainConfig(name="mine"), tmp_path) as listener:
        assert listener is print
