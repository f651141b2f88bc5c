"""Training runs under the guard: what it says, where it goes back to, and that a resumed run decides the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import narrowgauge as ng
from guarded_run import LAYER, batch_of, changes, stale
from narrowgauge.cli.main import main
from narrowgauge.observe.journal import Journal
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.train.assemble import Parts
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.events import Event, Finished, GuardActed, Status
from narrowgauge.train.loop import resume, run
from narrowgauge.train.run_folder import RunFolder
from narrowgauge.train.trained import Trained

CHANGES = changes(calm=2)


def poison(bad: range) -> Callable[[Parts], None]:
    """NaN from the embedding in those batches."""

    def install(parts: Parts) -> None:
        parts.model.embedding.register_forward_hook(
            lambda m, _, out: out * float("nan") if m.training and batch_of(parts) in bad else None
        )

    return install


def narrow_v(parts: Parts) -> None:
    """Second moments of a layer in four bits with one scale, from the first step on."""
    assert isinstance(parts.optimizer, LowPrecisionOptimizer)
    parts.optimizer.override(f"{LAYER}.weight", exp_avg_sq=ng.CastSpec(ng.formats.UINT4), keep_nonzero=False)


def guard_rows(folder: Path) -> list[dict[str, Any]]:
    return list(Journal(folder).of_kind("guard"))


def told(folder: Path) -> list[tuple[Any, ...]]:
    return [(row["step"], row["action"], row["layer"], row["role"]) for row in guard_rows(folder)]


def test_a_promotion_is_in_journal_events_and_terminal(with_fault, make_config, tmp_path: Path, capsys) -> None:
    with_fault(stale)
    events: list[Event] = []
    result = run(make_config("a", **CHANGES), events.append)
    rows = guard_rows(result.run_dir)
    assert told(result.run_dir)[:2] == [(8, "wait", LAYER, "input"), (9, "promote", LAYER, "input")]
    assert rows[1] == {
        "kind": "guard", "step": 9, "action": "promote", "layer": LAYER, "role": "input", "measure": "flushed",
        "value": 1.0, "threshold": 0.1, "before": str(ng.CastSpec(ng.formats.E4M3FN, scale=ng.Delayed())),
        "after": str(ng.CastSpec(ng.formats.E4M3FN)), "message": rows[1]["message"],
    }  # fmt: skip
    acted = [event for event in events if isinstance(event, GuardActed)]
    assert [(e.step, e.action, e.message) for e in acted] == [(r["step"], r["action"], r["message"]) for r in rows]
    sampled = [row["step"] for row in Journal(result.run_dir).of_kind("precision")]
    assert sampled[:4] == [4, 8, 9, 10]  # at the guard's period, and where it looks again
    path = tmp_path / "config.yaml"
    path.write_text(make_config("b", **CHANGES).to_yaml())
    capsys.readouterr()
    assert main(["train", "--config", str(path)]) == 0
    assert f"step 9  guard: promote: {LAYER}, input: 100.00% of the non-zero values" in capsys.readouterr().out.replace(
        "\n", " "
    )


@pytest.mark.parametrize(
    ("fault", "recipe"), [(stale, "fp8_delayed"), (narrow_v, "narrow8")], ids=["an operand", "a moment"]
)
def test_wherever_it_is_resumed_it_decides_the_same(
    fault: Callable[[Parts], None], recipe: str, with_fault, make_config, ending
) -> None:
    with_fault(fault)
    whole = run(make_config("whole", **CHANGES | {"recipe": recipe}))
    expected, rows = ending(whole.run_dir), guard_rows(whole.run_dir)
    assert [row["action"] for row in rows][:2] == ["wait", "promote"]
    for at in (2, 8, 10):
        copy = whole.run_dir.with_name(f"from-{recipe}-{at}")
        shutil.copytree(whole.run_dir, copy)
        resume(copy, checkpoint=f"step-{at:06d}")
        assert ending(copy) == expected
        assert guard_rows(copy) == rows


def test_what_is_opened_runs_in_the_casts_that_it_was_trained_in(with_fault, make_config) -> None:
    with_fault(stale)
    folder = run(make_config("a", **CHANGES | {"steps": 10, "eval_every": 10})).run_dir
    trained = Trained.open(folder)
    assert "'blocks.0.mlp.gate_up'" in ng.report(trained.model)[LAYER].reason
    (row,) = Journal(folder).of_kind("evaluation")
    assert trained.evaluate(trained.dataset(), 2).loss == row["loss"]


def test_batches_that_are_not_finite_lead_back_and_are_not_read_again(with_fault, make_config, ending) -> None:
    bad = range(7, 20)
    with_fault(poison(bad))
    guard = {"mode": "act", "every": 4, "leave_out": 3}
    events: list[Event] = []
    result = run(make_config("whole", **CHANGES | {"recipe": "fp8_current", "guard": guard}), events.append)
    assert result.status is Status.FINISHED
    # batches 7 to 9: back to step 6; 10 to 12: back again, and 3 more left out; 16 to 18: back, and 9 more left out
    rows = guard_rows(result.run_dir)
    assert [(row["step"], row["action"], row["measure"], row["value"]) for row in rows] == [
        (6, "promote", "nonfinite", 3.0),
        (6, "rollback", "nonfinite", 3.0),
        (6, "rollback", "nonfinite", 3.0),
        (6, "rollback", "nonfinite", 3.0),
    ]
    assert "in step 9 of the path not taken" not in rows[0]["message"]
    assert "back to the state after step 6, and on with the data that follows" in rows[1]["message"]
    steps = list(Journal(result.run_dir).of_kind("step"))
    assert [row["step"] for row in steps] == list(range(1, 13)) and not any(row["skipped"] for row in steps)
    assert sum(isinstance(event, GuardActed) and event.action == "rollback" for event in events) == 3
    (finished,) = (event for event in events if isinstance(event, Finished))
    assert finished.tokens == (12 + 3 * 3) * 2 * 32  # those of the paths not taken took time, too
    expected = ending(result.run_dir)
    resume(result.run_dir, checkpoint="step-000006")  # as it was written when the run had gone back for the last time
    assert ending(result.run_dir) == expected and guard_rows(result.run_dir) == rows


def test_the_checkpoint_of_before_a_trouble_outlives_those_that_are_written_in_it(with_fault, make_config) -> None:
    with_fault(poison(range(7, 11)))
    guard = {"mode": "act", "every": 4, "leave_out": 3}
    folder = run(make_config("a", **CHANGES | {"recipe": "fp8_current", "guard": guard, "keep_last": 1})).run_dir
    # batches 7 to 9: back to step 6, although a checkpoint of step 8 has been written since, and one is kept
    assert [(row["step"], row["action"]) for row in guard_rows(folder)] == [(6, "promote"), (6, "rollback")]
    assert RunFolder(folder).steps() == [12]


def test_a_spike_leads_back_to_the_model_and_the_optimizer_of_before(with_fault, make_config) -> None:
    """The steps of the spike change both, as those that are not finite do not."""
    seen: dict[int, list[torch.Tensor]] = {}

    def spike(parts: Parts) -> None:
        def look(model: torch.nn.Module, _: Any) -> None:
            if model.training and batch_of(parts) in (7, 9, 10):
                kept = [t for state in parts.optimizer.state.values() for t in state.values()]
                tensors = [*model.parameters(), *(t for t in kept if isinstance(t, torch.Tensor))]
                seen.setdefault(batch_of(parts), [t.detach().clone() for t in tensors])

        parts.model.register_forward_pre_hook(look)
        parts.model.register_forward_hook(
            lambda m, _, out: (out[0], out[1] * 10) if m.training and batch_of(parts) in range(7, 10) else None
        )

    with_fault(spike)
    guard = {"mode": "act", "every": 4, "leave_out": 3}
    folder = run(make_config("a", **CHANGES | {"recipe": "fp8_current", "guard": guard})).run_dir
    assert [(row["step"], row["action"], row["measure"]) for row in guard_rows(folder)] == [
        (6, "promote", "loss"), (6, "rollback", "loss"),
    ]  # fmt: skip
    assert len(seen[7]) == len(seen[9]) and not any(map(torch.equal, seen[7], seen[9]))
    assert len(seen[7]) == len(seen[10]) and all(map(torch.equal, seen[7], seen[10]))


def test_decisions_of_the_path_not_taken_stay_in_the_journal(with_fault, make_config) -> None:
    def both(parts: Parts) -> None:
        stale(parts)
        poison(range(11, 14))(parts)

    with_fault(both)
    folder = run(
        make_config("a", **CHANGES | {"save_every": 7, "steps": 14, "guard": {"mode": "act", "every": 4}})
    ).run_dir
    rows = guard_rows(folder)
    assert [(row["step"], row["action"]) for row in rows][:4] == [
        (7, "wait"), (7, "promote"), (7, "promote"), (7, "rollback"),
    ]  # fmt: skip
    assert rows[1]["message"].endswith("(in step 9 of the path not taken)") and rows[2]["layer"] is None


def test_warn_is_the_run_without_a_guard_bit_for_bit(with_fault, make_config) -> None:
    with_fault(stale)
    losses: dict[str, list[float]] = {}
    for mode in ("off", "warn"):
        folder = run(make_config(mode, **CHANGES | {"guard": {"mode": mode, "every": 4}})).run_dir
        losses[mode] = [row["loss"] for row in Journal(folder).of_kind("step")]
        state = json.loads((RunFolder(folder).checkpoint(12) / "state.json").read_text())
        assert ("guard" in state["extra"]) == (mode == "warn")
        assert [row["action"] for row in guard_rows(folder)] == ([] if mode == "off" else ["wait", "warn"])
        tensors = (RunFolder(folder).checkpoint(12) / "model.safetensors").read_bytes()
        losses[mode + " bytes"] = list(map(float, tensors))
    assert losses["off"] == losses["warn"] and losses["off bytes"] == losses["warn bytes"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": "on"}, "guard.mode='on': expected off, warn, act"),
        ({"every": 0}, "guard.every=0: expected a whole number from 1 to 2147483647"),
        ({"rollbacks": -1}, "guard.rollbacks=-1: expected a whole number from 0"),
        ({"spike_floor": 0.0}, "guard.spike_floor=0.0: expected more than 0"),
        ({"input": {"flushed": 1.5}}, "guard.input.flushed=1.5: expected a share, 0 to 1"),
        ({"weight": {"sqnr_drop_db": -1.0}}, "guard.weight.sqnr_drop_db=-1.0: expected decibels, more than 0"),
        ({"weight": {"saturatd": 0.1}}, "unknown configuration key 'guard.weight.saturatd'"),
    ],
)
def test_values_that_make_no_sense_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ng.NarrowgaugeError, match=message):
        TrainConfig.from_dict({"guard": values}).check()


def test_off_is_the_word() -> None:
    assert TrainConfig.from_yaml("guard:\n  mode: off\n").guard.mode == "off"
    assert TrainConfig.from_yaml(TrainConfig().to_yaml()).guard.mode == "off"
