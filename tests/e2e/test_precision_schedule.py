"""A run that switches its recipe: said in journal and events, and the same run wherever it is resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from narrowgauge.cli.main import main
from narrowgauge.errors import RecipeError
from narrowgauge.layers.report import ConversionReport, report
from narrowgauge.observe import journal
from narrowgauge.train.events import Event, RecipeChanged, RunStarted
from narrowgauge.train.loop import resume, run
from narrowgauge.train.run_folder import RunFolder
from narrowgauge.train.trained import Trained

CHANGES = {
    "recipe": "fp8_delayed",
    "switches": [{"after_step": 3, "recipe": "bf16"}, {"after_step": 5, "recipe": "fp8_current"}],
    "steps": 7,
    "save_every": 1,
    "eval_every": 1,
    "keep_last": 10,
    "statistics_every": 1,  # so that the switch falls into a sampled step
}
MLP = ("blocks.0.mlp.gate_up", "blocks.0.mlp.down")


def quantized(rows: ConversionReport) -> bool:
    statuses = {rows[name].status for name in MLP}
    assert len(statuses) == 1
    return statuses == {"converted"}


@pytest.fixture
def whole(make_config) -> tuple[RunFolder, list[Event]]:
    events: list[Event] = []
    return RunFolder(run(make_config("whole", **CHANGES), events.append).run_dir), events


def test_the_switch_is_in_journal_and_events_and_the_layers_follow(whole) -> None:
    folder, events = whole
    rows = journal.read(folder.journal).of_kind("recipe")
    assert rows == [
        {"kind": "recipe", "step": 3, "before": "fp8_delayed", "after": "bf16"},
        {"kind": "recipe", "step": 5, "before": "bf16", "after": "fp8_current"},
    ]
    changed = [event for event in events if isinstance(event, RecipeChanged)]
    assert [(event.step, event.before, event.after) for event in changed] == [tuple(row.values())[1:] for row in rows]
    started = next(event for event in events if isinstance(event, RunStarted))
    assert [quantized(event.report) for event in (started, *changed)] == [True, False, True]
    sampled = [row["step"] for row in journal.read(folder.journal).of_kind("step") if row["statistics"]]
    assert sampled == [1, 2, 3, 6, 7]  # bf16 casts nothing that could be counted


@pytest.mark.parametrize("at", [2, 3, 4, 5])
def test_resumed_before_at_and_after_the_switch_it_is_the_same_run(at: int, whole, ending) -> None:
    folder, _ = whole
    expected, rows = ending(folder.path), journal.read(folder.journal).of_kind("recipe")
    events: list[Event] = []
    resume(folder.path, events.append, checkpoint=f"step-{at:06d}")
    assert ending(folder.path) == expected
    contents = journal.read(folder.journal)
    assert contents.of_kind("recipe") == rows
    assert all("removed" in row["message"] for row in contents.of_kind("warning"))
    started = next(event for event in events if isinstance(event, RunStarted))
    assert quantized(started.report) == (at not in (3, 4))


def test_what_is_opened_runs_as_it_did_at_its_step(whole) -> None:
    folder, _ = whole
    losses = {row["step"]: row["loss"] for row in journal.read(folder.journal).of_kind("evaluation")}
    for step in (2, 3, 7):
        trained = Trained.open(folder.path, f"step-{step:06d}")
        assert quantized(report(trained.model)) == (step != 3)
        assert trained.evaluate(trained.dataset(), 2).loss == losses[step]


def test_the_command_line_takes_switches_and_says_when_they_come(make_config, tmp_path: Path, capsys) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(make_config("cli", recipe="fp8_current", steps=3, eval_every=0, save_every=2).to_yaml())
    words = ["train", "--config", str(path), "--switches", "[{after_step: 2, recipe: bf16}]"]
    assert main(words) == 0
    output = capsys.readouterr().out
    assert "recipe bf16 after step 2" in output
    assert "step 2  recipe fp8_current -> bf16: layers " in output
    folder = RunFolder(tmp_path / "runs" / "cli")
    shutil.rmtree(folder.checkpoint(3))
    assert main(["resume", str(folder.path)]) == 0
    assert "->" not in capsys.readouterr().out  # it was before the checkpoint
    assert main(["eval", str(folder.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"] == "bf16"  # what it runs in, not what it began with


def test_a_recipe_that_stores_otherwise_is_refused_before_anything_is_written(make_config, tmp_path: Path) -> None:
    config = make_config("a", switches=[{"after_step": 3, "recipe": "fp16_pure"}])
    with pytest.raises(RecipeError, match="'fp16_pure' after step 3 of 'narrow8': param=.*use other.replace"):
        run(config)
    assert not (tmp_path / "runs").exists()
