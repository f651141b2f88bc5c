"""A run that goes on may be told otherwise what watches it and what it writes, and nothing of what it computes."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import narrowgauge as ng
from guarded_run import LAYER, changes, stale
from narrowgauge.cli import processes
from narrowgauge.cli.main import main
from narrowgauge.errors import ConfigError
from narrowgauge.observe.journal import Journal
from narrowgauge.train.assemble import Parts
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.loop import resume, run
from narrowgauge.train.run_folder import RunFolder

CHANGES = changes(calm=1)


@pytest.fixture
def parts(with_fault: Callable[[Callable[[Parts], None]], None]) -> list[Parts]:
    """Of every run, with its fault."""
    seen: list[Parts] = []

    def install(parts: Parts) -> None:
        stale(parts)
        seen.append(parts)

    with_fault(install)
    return seen


@pytest.fixture
def begun(parts: list[Parts], make_config: Callable[..., TrainConfig]) -> Path:
    """A run in which the guard has promoted the layer's input in step 9."""
    folder = run(make_config("a", **CHANGES)).run_dir
    assert [row["action"] for row in Journal(folder).of_kind("guard")][:2] == ["wait", "promote"]
    return folder


def told(folder: Path) -> list[str]:
    return [row["message"] for row in Journal(folder).of_kind("warning") if "removed" not in row["message"]]


def cast_of_input(parts: Parts) -> str:
    return str(parts.model.get_submodule(LAYER).training_casts.input)  # type: ignore[union-attr]


def test_a_guard_that_is_switched_off_leaves_the_run_to_its_recipe(begun: Path, parts: list[Parts]) -> None:
    resume(begun, checkpoint="step-000010", changes={"guard.mode": "off", "save_every": 3})
    assert told(begun) == [
        "guard.mode is off: what it had widened is cast as the recipe says again",
        "as resume was told: guard.mode: act -> off, save_every: 2 -> 3",
    ]
    config = RunFolder(begun).read_config()
    assert (config.guard.mode, config.save_every, config.guard.calm) == ("off", 3, 1)
    assert cast_of_input(parts[-1]).startswith("E4M3FN, delayed")
    assert max(row["step"] for row in Journal(begun).of_kind("guard")) <= 10
    resume(begun)  # and it stays so
    assert RunFolder(begun).read_config() == config


def test_a_guard_that_only_warns_from_now_on_changes_no_cast(begun: Path, parts: list[Parts]) -> None:
    narrower = begun.with_name("b")
    shutil.copytree(begun, narrower)
    resume(begun, checkpoint="step-000010", changes={"guard": {"mode": "act", "every": 1}})
    acts = [(row["action"], row["layer"], row["role"]) for row in Journal(begun).of_kind("guard") if row["step"] > 10]
    assert ("demote", LAYER, "input") in acts  # after one calm sample
    resume(narrower, checkpoint="step-000010", changes={"guard.mode": "warn", "guard.every": 1})
    assert cast_of_input(parts[-1]) == str(ng.CastSpec(ng.formats.E4M3FN))
    rows = [row for row in Journal(narrower).of_kind("guard") if row["step"] > 10]
    assert not {row["action"] for row in rows} & {"promote", "demote", "rollback"}


def test_what_watches_and_what_is_written_changes_no_bit(begun: Path, ending: Callable[[Path], Any]) -> None:
    expected = ending(begun)
    resume(
        begun, checkpoint="step-000006",
        changes={"statistics_every": 1, "histograms_every": 2, "divergence.enabled": False, "eval_every": 3},
    )  # fmt: skip
    found = ending(begun)
    assert found.steps == expected.steps and found.files["model.safetensors"] == expected.files["model.safetensors"]
    assert [step for step, _ in found.evaluations] == [6, 9, 12]
    assert [row["step"] for row in Journal(begun).of_kind("histograms")] == [8, 10, 12]


REFUSED = (
    ("--recipe bf16", "recipe='bf16': expected a key of what watches a run"),
    ("--optimizer.lr=1e-3", "edit config.yaml in its folder, by which it goes on"),
    ("--steps 24", "steps=24: expected a key of what watches a run or of what it writes"),
    ("--guard.mode acting", "guard.mode='acting': expected off, warn, act"),
    ("--guard.modes off", "unknown configuration key 'guard.modes'; did you mean 'guard.mode'?"),
    ("--guard.every often", "guard.every='often': expected int, found str"),
    ("--guard off", "unknown configuration key 'guard'"),
    ("--checkpont last-good", "unknown option '--checkpont'; did you mean '--checkpoint'?"),
    ("--guard.mode [1", "guard.mode=[1: expected a value in YAML"),
    ("once more", "unexpected argument 'once'"),
)


def test_what_may_not_change_is_refused_and_nothing_is_written(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (begun / "config.yaml").read_bytes(), (begun / "journal.jsonl").read_bytes()
    for words, message in REFUSED:
        assert main(["resume", str(begun), *words.split()]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
        assert ((begun / "config.yaml").read_bytes(), (begun / "journal.jsonl").read_bytes()) == before


def test_the_command_line_takes_keys_as_train_does(begun: Path) -> None:
    words = ["--guard.mode=off", "--statistics-every", "2", "--divergence", "{patience: 5}", "--json"]
    assert main(["resume", str(begun), "--checkpoint", "step-000010", *words]) == 0
    config = RunFolder(begun).read_config()
    assert (config.guard.mode, config.statistics_every, config.divergence.patience) == ("off", 2, 5)
    assert config.divergence.window == TrainConfig().divergence.window


def test_the_command_shows_and_waits_as_it_is_told(begun: Path, capsys, monkeypatch) -> None:
    waited: list[float] = []

    @contextlib.contextmanager
    def group(config: TrainConfig) -> Iterator[None]:
        waited.append(config.parallel.timeout_s)
        yield

    monkeypatch.setattr(processes, "process_group", group)
    words = ["--checkpoint", "step-000010", "--log-every", "1", "--parallel.timeout-s", "77"]
    assert main(["resume", str(begun), *words]) == 0
    shown = capsys.readouterr().out
    assert "step 11" in shown and "step 12" in shown and waited == [77]


def test_what_may_not_change_is_told_by_the_first_process(begun: Path, capsys, monkeypatch) -> None:
    for rank in ("0", "1"):
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2")):
            monkeypatch.setenv(name, value)
        assert main(["resume", str(begun), "--steps", "24"]) == 2
        assert ("steps=24: expected a key" in capsys.readouterr().err) == (rank == "0")


def test_a_change_that_is_none_is_not_told(begun: Path) -> None:
    resume(begun, changes={"guard.mode": "act"})
    assert told(begun) == []
    with pytest.raises(ConfigError, match="expected a key of what watches"):
        resume(begun, changes={"optimizer": {"lr": 1.0}})
