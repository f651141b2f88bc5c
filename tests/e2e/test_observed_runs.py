"""Runs that are looked at, seldom or in every step, are the runs that nobody looks at, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import narrowgauge as ng
from narrowgauge.train.loop import resume, run

WHEN = ("tokens_per_s", "statistics")  # what a row has of time, and of having been looked at


def end_of(run_dir: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """The rows of the steps, and the files of the last checkpoint."""
    rows = [
        {key: value for key, value in row.items() if key not in WHEN}
        for row in ng.observe.Journal(run_dir).of_kind("step")
    ]
    return rows, {
        path.name: path.read_bytes() for path in (run_dir / "checkpoints" / "step-000008").glob("*.safetensors")
    }


@pytest.mark.parametrize("recipe", ["narrow8", "fp8_delayed", "fp8_lm_o2", "bf16", "bf16_pure"])
def test_rows_and_weights_are_those_of_a_run_that_nobody_looks_at(make_config: Any, recipe: str) -> None:
    changes = {"recipe": recipe, "eval_every": 0, "save_every": 0, "sample_tokens": 0, "accumulation": 2}
    ends = {}
    for every in (0, 1, 7):
        config = make_config(f"{recipe}-{every}", **changes, statistics_every=every, histograms_every=every)
        ends[every] = end_of(run(config).run_dir)
        sampled = [row["step"] for row in ng.observe.Journal(config.path).of_kind("precision")]
        assert sampled == {0: [], 1: [1, 2, 3, 4, 5, 6, 7, 8], 7: [7]}[every]
    assert len(ends[0][0]) == 8 and len(ends[0][1]) >= 2
    assert ends[0] == ends[1] == ends[7]


def test_a_run_that_is_resumed_writes_what_one_in_one_go_writes(make_config: Any) -> None:
    config = make_config("whole", statistics_every=2, histograms_every=4, eval_every=0)
    run(config)
    kinds = ("precision", "histograms")
    before = list(ng.observe.Journal(config.path).of_kind(*kinds))
    resume(config.path, checkpoint="step-000004")
    assert list(ng.observe.Journal(config.path).of_kind(*kinds)) == before
    assert [row["step"] for row in before] == [2, 4, 4, 6, 8, 8]
