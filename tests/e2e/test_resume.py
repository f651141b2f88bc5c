"""A run that was killed, stopped or damaged and then resumed is bitwise the run that never was."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.observe import journal
from narrowgauge.train import folder as folders
from narrowgauge.train.events import Event, RunStarted, Status, Warned, ignore
from narrowgauge.train.loop import resume, run
from narrowgauge.train.run_folder import RunFolder


@pytest.mark.multiproc
def test_killed_at_any_step_and_resumed_is_the_same_run(make_config, start, ending) -> None:  # case 69
    """With residuals, 8-bit gradients and moments; a kill knows no recipe: the others are resumed further down."""
    changes = {"recipe": "narrow8", "steps": 40, "save_every": 7, "eval_every": 10, "accumulation": 2}
    whole = run(make_config("whole", **changes))
    killed = start(make_config("killed", **changes))
    at = random.randrange(1, 20)
    killed.wait_for_step(at)
    killed.popen.kill()
    assert killed.popen.wait() == -signal.SIGKILL
    assert len(journal.read(killed.folder.journal).of_kind("step")) < 40
    result = resume(killed.folder.path)
    assert result.status is Status.FINISHED and result.step == 40
    found, expected = ending(killed.folder.path), ending(whole.run_dir)
    assert found.steps == expected.steps, f"killed at step {at}"
    assert found.evaluations == expected.evaluations
    assert found.files == expected.files


@pytest.mark.slow
def test_several_threads_and_real_widths_repeat_too(make_config, ending) -> None:
    changes = {
        "model": {"layers": 2, "width": 256, "heads": 4, "context": 128},
        "recipe": "fp8_delayed",
        "threads": 2,
        "batch_size": 8,
        "steps": 6,
        "save_every": 3,
    }
    folders = [RunFolder(run(make_config(name, **changes)).run_dir) for name in ("a", "b")]
    expected = ending(folders[0].path)
    assert ending(folders[1].path) == expected
    resume(folders[1].path, checkpoint="step-000003")
    assert ending(folders[1].path) == expected


@pytest.mark.multiproc
def test_sigterm_finishes_the_step_saves_and_exits_with_130(make_config, start, ending) -> None:
    changes = {"steps": 40, "save_every": 0, "eval_every": 5}
    whole = run(make_config("whole", **changes))
    stopped = start(make_config("stopped", **changes))
    stopped.wait_for_step(3)
    stopped.popen.send_signal(signal.SIGTERM)
    output, errors = stopped.popen.communicate(timeout=120)
    assert stopped.popen.returncode == 130, (output, errors)
    last = journal.read(stopped.folder.journal).of_kind("step")[-1]["step"]
    assert stopped.folder.steps() == [last] and last < 40
    assert "narrowgauge resume" in output
    command = [sys.executable, "-m", "narrowgauge", "resume", str(stopped.folder.path)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    found, expected = ending(stopped.folder.path), ending(whole.run_dir)
    assert found == expected


def test_a_run_with_the_same_seed_repeats_itself_and_another_seed_does_not(make_config, ending) -> None:
    a, b, c = (ending(run(make_config(name, seed=seed)).run_dir) for name, seed in (("a", 3), ("b", 3), ("c", 4)))
    assert a == b and a.steps != c.steps


def test_the_journal_is_cut_back_to_the_checkpoint_first(make_config, ending) -> None:
    folder = RunFolder(run(make_config("a")).run_dir)
    expected = ending(folder.path)
    shutil.rmtree(folder.checkpoint(8))  # as if killed after step 8, before its checkpoint
    with folder.journal.open("ab") as file:
        file.write(b'{"kind": "step", "step": 9')
    started: list[RunStarted] = []
    resume(folder.path, lambda event: started.append(event) if isinstance(event, RunStarted) else None)
    assert started[0].step == 4 and started[0].resumed_from == folder.checkpoint(4)
    assert ending(folder.path) == expected
    contents = journal.read(folder.journal)
    assert [row["step"] for row in contents.of_kind("step")] == list(range(1, 9))
    assert [row["step"] for row in contents.of_kind("resumed")] == [4]


RESUMED = [
    "nvfp4", "bf16_pure", "narrow8_sr", "fp8_lm_o3", *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("fp8_delayed", "fp16", "bf16", "fp16_pure", "fp8_current", "tf32", "fp8_lm_o2")
    ),
]  # fmt: skip


@pytest.mark.parametrize("recipe", RESUMED)
def test_random_streams_histories_and_narrow_states_go_on(recipe: str, make_config, ending) -> None:  # case 69
    changes = {"recipe": recipe, "steps": 8, "save_every": 3, "eval_every": 4, "accumulation": 2}
    folder = RunFolder(run(make_config("a", **changes)).run_dir)
    expected = ending(folder.path)
    resume(folder.path, checkpoint="step-000003")
    assert ending(folder.path) == expected


@pytest.mark.parametrize("option", [{"release_gradients": True}, {"offload": "cpu"}], ids=str)
@pytest.mark.parametrize("recipe", ["narrow8", "narrow8_sr"])
def test_the_optimizers_options_give_the_same_run_resumed_or_not(
    recipe: str, option: dict[str, Any], make_config, ending
) -> None:
    # released gradients are clipped by the norm of the step before: 0 clips neither
    changes = {"recipe": recipe, "clip": 0.0}
    plain = ending(run(make_config("plain", **changes)).run_dir)
    folder = RunFolder(run(make_config("a", **changes, optimizer={"lr": 1e-3, **option})).run_dir)
    found = ending(folder.path)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert found.files[name] == plain.files[name]
    assert [row[:2] for row in found.steps] == [row[:2] for row in plain.steps]
    assert [row[2] for row in found.steps] == pytest.approx([row[2] for row in plain.steps], rel=1e-5)
    resume(folder.path, checkpoint="step-000004")
    assert ending(folder.path) == found


def test_released_gradients_are_clipped_by_the_norm_before_also_after_a_resume(make_config, ending) -> None:
    changes = {"clip": 0.05, "optimizer": {"lr": 1e-3, "release_gradients": True}}
    folder = RunFolder(run(make_config("a", **changes)).run_dir)
    expected = ending(folder.path)
    assert all(row[2] > 0.05 for row in expected.steps)  # every step but the first is clipped
    resume(folder.path, checkpoint="step-000004")
    assert ending(folder.path) == expected


def test_a_run_killed_before_its_first_checkpoint_starts_again(make_config, ending) -> None:
    folder = RunFolder(run(make_config("a")).run_dir)
    expected = ending(folder.path)
    shutil.rmtree(folder.checkpoints)
    assert resume(folder.path).status is Status.FINISHED
    assert ending(folder.path) == expected


def test_a_finished_run_has_nothing_left_to_do(make_config, ending) -> None:
    folder = RunFolder(run(make_config("a")).run_dir)
    expected = ending(folder.path)
    assert resume(folder.path).status is Status.FINISHED
    assert ending(folder.path) == expected


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_a_damaged_checkpoint_names_the_last_good_one_which_works(damage: str, make_config, ending) -> None:
    folder = RunFolder(run(make_config("a", steps=12)).run_dir)
    expected = ending(folder.path)
    weights = folder.checkpoint(12) / "model.safetensors"
    data = weights.read_bytes()
    if damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(data[:1000] if damage == "truncated" else data[:-9] + b"\x55" + data[-8:])
    with pytest.raises(
        CheckpointError, match=r"step-000012.*last good checkpoint is step-000008.*--checkpoint step-000008"
    ):
        resume(folder.path)
    warnings: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, Warned):
            warnings.append(event.message)

    resume(folder.path, listen, checkpoint="last-good")
    assert any("step-000012 was removed" in message for message in warnings)
    assert ending(folder.path) == expected


def test_the_sums_of_a_checkpoint_are_taken_once(make_config, sums_taken) -> None:
    folder = RunFolder(run(make_config("a")).run_dir)
    shutil.rmtree(folder.checkpoint(8))
    resume(folder.path)
    files = sorted(file for file in folder.checkpoint(4).iterdir() if file.name != folders.MANIFEST)
    assert sorted(sums_taken) == files


def test_a_named_checkpoint_is_used_and_an_unknown_one_lists_what_is_there(make_config, ending) -> None:
    folder = RunFolder(run(make_config("a", steps=12)).run_dir)
    expected = ending(folder.path)
    with pytest.raises(CheckpointError, match="step-000004, step-000008, step-000012"):
        resume(folder.path, checkpoint="step-000005")
    resume(folder.path, checkpoint="step-000004")
    assert ending(folder.path) == expected


def test_only_the_last_checkpoints_are_kept(make_config) -> None:
    folder = RunFolder(run(make_config("a", steps=10, save_every=2, keep_last=2)).run_dir)
    assert folder.steps() == [8, 10]


def test_other_text_than_before_is_refused(make_config, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("once upon a time\n" * 100)
    data = {"corpus": str(text), "tokenizer": "bytes"}
    folder = RunFolder(run(make_config("a", data=data)).run_dir)
    shutil.rmtree(folder.checkpoint(8))
    text.write_text("another story\n" * 100)
    with pytest.raises(CheckpointError, match="same text"):
        resume(folder.path)


def test_a_taken_name_and_a_folder_that_is_no_run_are_refused(make_config, tmp_path: Path) -> None:
    config = make_config("a", steps=1, eval_every=0)
    run(config)
    with pytest.raises(ConfigError, match="narrowgauge resume"):
        run(config)
    with pytest.raises(ConfigError, match=r"no config\.yaml"):
        resume(tmp_path)


def test_two_writers_of_one_run_are_refused(make_config) -> None:
    def listen(event: Event) -> None:
        if isinstance(event, RunStarted):
            with pytest.raises(ConfigError, match="another process"):
                resume(event.run_dir)

    run(make_config("a", steps=1), listen)


def test_the_configuration_in_the_folder_repeats_the_run(make_config, ending) -> None:
    folder = RunFolder(run(make_config("a", threads=0)).run_dir)
    config: Any = folder.read_config()
    assert config.threads > 0 and config.name == "a"
    config.name = "b"
    assert ending(run(config, ignore).run_dir) == ending(folder.path)


def _edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_recipe_that_was_changed_is_said_and_one_that_lacks_its_state_refused(make_config) -> None:
    folder = RunFolder(run(make_config("a", recipe="fp8_delayed")).run_dir)
    events: list[Event] = []
    _edit(folder.config, "recipe: fp8_delayed", "recipe: bf16")
    resume(folder.path, events.append, checkpoint="step-000004")
    assert any(isinstance(e, Warned) and "not the one that this run began with" in e.message for e in events)
    assert any("another run" in row["message"] for row in journal.read(folder.journal).of_kind("warning"))
    _edit(folder.config, "recipe: bf16", "recipe: fp16")
    with pytest.raises(CheckpointError, match="expected a loss scale"):
        resume(folder.path, checkpoint="step-000004")


def test_a_lost_tokenizer_is_written_anew(make_config) -> None:
    folder = RunFolder(run(make_config("a")).run_dir)
    before = folder.tokenizer.read_bytes()
    folder.tokenizer.unlink()
    resume(folder.path)
    assert folder.tokenizer.read_bytes() == before


@pytest.mark.parametrize(("old", "new"), [('"loss"', '"lost"'), ('"step": 4', '"step": "4"'), ('"step": ', '"stp": ')])
def test_a_journal_whose_rows_were_edited_is_refused(old: str, new: str, make_config) -> None:
    folder = RunFolder(run(make_config("a")).run_dir)
    _edit(folder.journal, old, new)
    with pytest.raises(CheckpointError, match="restore the file"):
        resume(folder.path)


def test_a_configuration_that_is_no_text_is_refused(make_config) -> None:
    folder = RunFolder(run(make_config("a")).run_dir)
    folder.config.write_bytes(b"name: \xff")
    with pytest.raises(ConfigError, match="expected a readable file"):
        resume(folder.path)
