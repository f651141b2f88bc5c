"""What a run looks like while it goes: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from narrowgauge.cli.progress import Reporter, closing_rows, duration, trouble
from narrowgauge.layers.report import ConversionReport, Row
from narrowgauge.train import events
from narrowgauge.train.config import SwitchConfig, TrainConfig

RUN = Path("runs/one")


def a_step(step: int, **fields) -> events.StepDone:
    given = {
        "loss": 5.4321, "grad_norm": 1.25, "lr": 1e-3, "tokens": 4096, "seconds": 2.0, "tokens_per_s": 2048.0,
        "skipped": False, "loss_scale": 1.0,
    }  # fmt: skip
    return events.StepDone(step=step, steps=30, **(given | fields))


def the_start(step: int = 0, resumed_from: Path | None = None) -> events.RunStarted:
    report = ConversionReport(
        (Row("a", "Linear", "converted", "emulated", "why"), Row("b", "Linear", "kept", "x", "y"))
    )
    return events.RunStarted(
        step=step, run_dir=RUN, config=TrainConfig(), steps=30, parameters=1_234_567, tokens_per_step=4096,
        train_tokens=9_999_999, report=report, device="cpu", resumed_from=resumed_from,
    )  # fmt: skip


def the_end(status: events.Status = events.Status.FINISHED, skipped_steps: int = 0) -> events.Finished:
    evaluation = events.Evaluated(step=30, loss=4.5, perplexity=90.0, bits_per_byte=2.125, tokens=100, seconds=1.0)
    return events.Finished(
        step=30, status=status, run_dir=RUN, seconds=185.0, tokens=122_880, tokens_per_s=664.2,
        skipped_steps=skipped_steps, last_loss=4.25, evaluation=evaluation,
    )  # fmt: skip


def rendered(*emitted: events.Event, terminal: bool = False, log_every: int = 10, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace")
    console = Console(file=file, force_terminal=terminal, width=100, highlight=False)
    with Reporter(console, log_every) as reporter:
        for event in emitted:
            reporter(event)
    file.flush()
    return raw.getvalue().decode(encoding)


def test_a_change_of_recipe_is_said_before_and_when_it_comes():
    start = the_start()
    config = dataclasses.replace(start.config, recipe="fp8_delayed", switches=[SwitchConfig(9, "bf16")])
    changed = events.RecipeChanged(step=9, before="fp8_delayed", after="bf16", report=start.report)
    lines = rendered(dataclasses.replace(start, config=config), a_step(9), changed).splitlines()
    assert "         recipe bf16 after step 9" in lines
    assert lines[-1] == "step 9  recipe fp8_delayed -> bf16: layers 1 converted, 1 kept"
    assert not any("after step" in line for line in rendered(start).splitlines())


def test_lines_come_at_the_first_every_tenth_and_the_last_step():
    shown = rendered(the_start(), *(a_step(step) for step in range(1, 31)))
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("step ")] == [
        "1/30", "10/30", "20/30", "30/30",
    ]  # fmt: skip


def test_a_line_has_loss_speed_and_time_left():
    shown = rendered(a_step(10))
    for fact in ("loss 5.4321", "norm 1.250", "lr 1.00e-03", "2,048 tokens/s", "40 s left"):
        assert fact in shown
    assert "loss scale" not in shown  # 1: there is none


def test_speed_and_time_left_forget_the_first_step_and_pass_over_a_slow_one():
    slow = {"seconds": 40.0, "tokens_per_s": 102.4}  # of the same 4,096 tokens
    steps = [a_step(1, **slow), *(a_step(step) for step in range(2, 10)), a_step(10, **slow)]
    first, *_, last = (line for line in rendered(*steps).splitlines() if line.startswith("step "))
    assert "102 tokens/s" in first and "19 min 20 s left" in first
    # a tenth of the way from 2 s to 40 s
    assert f"{4096 / 5.8:,.0f} tokens/s" in last and "1 min 56 s left" in last


def test_loss_scale_and_trouble_are_shown_where_there_are_any():
    statistics = {"input": {"saturated": 0.001, "flushed": 0.0}, "grad_output": {"saturated": 0.0, "flushed": 0.25}}
    shown = rendered(a_step(10, loss_scale=65536.0, statistics=statistics))
    assert "loss scale 65536" in shown
    assert "grad_output flushed 25.0%" in shown


def test_trouble_is_the_worst_role_and_nothing_where_all_is_well():
    assert trouble({"input": {"saturated": 0.001}}) == ""
    assert trouble({}) == ""
    assert trouble({"input": {"saturated": 0.1}, "weight": {"flushed": 0.3}}) == "weight flushed 30.0%"


def test_the_start_says_where_what_and_how_many_layers():
    shown = rendered(the_start(step=20, resumed_from=RUN / "checkpoints/step-000020"))
    for fact in ("runs/one", "1,234,567 parameters", "9,999,999 tokens", "1 converted, 1 kept", "step-000020"):
        assert fact in shown


def test_a_run_that_is_resumed_at_its_end_says_that_nothing_is_left():
    assert "nothing is left to train" in rendered(the_start(step=30, resumed_from=RUN / "checkpoints/step-000030"))
    assert "nothing is left" not in rendered(the_start(step=20, resumed_from=RUN / "checkpoints/step-000020"))


def test_skips_warnings_and_signals_are_told_at_once():
    shown = rendered(
        events.Skipped(step=7, consecutive=2, max_skips=20, parameter="blocks.0.mlp.down.weight", loss_scale=512.0),
        events.Warned(step=8, message="no checkpoint at step 8: No space left on device [disk]"),
        events.Interrupting(step=8, signal="SIGINT"),
    )
    assert "blocks.0.mlp.down.weight is not finite" in shown
    assert "[disk]" in shown  # brackets are text, not markup
    assert "SIGINT" in shown


def test_a_terminal_has_a_live_line_that_is_gone_at_the_end():
    shown = rendered(the_start(), a_step(1), a_step(2), terminal=True)
    assert "\x1b[" in shown
    assert "step 2/30" in shown
    assert "\n" + "step 1/30" not in shown  # no plain lines beside it


def test_a_terminal_that_is_not_utf8_still_shows_the_run():
    shown = rendered(
        the_start(), a_step(1), events.Sampled(step=30, prompt="é", text="λ → ∞"), terminal=True, encoding="ascii"
    )
    assert "\\u03bb" in shown


def test_the_closing_table_has_losses_and_speed(capsys):
    rows = dict(closing_rows(the_end(skipped_steps=3)))
    assert rows["validation loss"].startswith("4.5000")
    assert rows["validation bits per byte"] == "2.1250"
    assert rows["tokens/s"] == "664"
    assert rows["skipped steps"] == "3"
    assert "3 min 05 s" in rows["tokens"]


@pytest.mark.parametrize(("status", "advice"), [(events.Status.FINISHED, "generate"), ("interrupted", "resume")])
def test_the_end_says_what_to_do_next(status, advice, capsys):
    assert f"narrowgauge {advice} runs/one" in rendered(the_end(events.Status(status)))


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (59.4, "59 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")]
)
def test_durations_read_as_a_person_writes_them(seconds, words):
    assert duration(seconds) == words
