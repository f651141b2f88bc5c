"""Samples of several ranks: merged into one, the same on all, and no bit of the run changes."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import run
from runs import ranks_of

from narrowgauge.observe import journal
from narrowgauge.train import loop
from narrowgauge.train.config import TrainConfig

pytestmark = pytest.mark.multiproc

LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"data": 2},
    "shard": {"shard": 2},
    "tensor x pipeline": {"tensor": 2, "pipeline": 2},
}


def _train(values: dict[str, Any]) -> None:
    loop.run(TrainConfig.from_dict(values))


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name == "data" else pytest.mark.slow) for name in LAYOUTS]
)
def test_sampled_steps_of_several_ranks_change_nothing_and_are_written_once(layout: str, make_values: Any) -> None:
    parallel = LAYOUTS[layout]
    found = []
    for every in (0, 2):
        values = make_values(f"every-{every}", parallel, recipe="narrow8", statistics_every=every, histograms_every=4)
        run(ranks_of(parallel), _train, values, timeout_s=300)
        path = TrainConfig.from_dict(values).path
        found.append(journal.read(path / "journal.jsonl"))
    losses = [[(row["loss"], row["grad_norm"]) for row in each.of_kind("step")] for each in found]
    assert losses[0] == losses[1]
    assert not found[0].of_kind("precision")
    rows = found[1].of_kind("precision")
    assert [row["step"] for row in rows] == [2, 4] and len(found[1].of_kind("histograms")) == 1
    if layout == "data":  # the values of both replicas are counted, as in all shares
        (counted,) = found[1].of_kind("histograms")
        grads = [roles["grad"] for roles in counted["layers"].values() if "grad" in roles]
        assert sum(sum(each["counts"]) + each["zeros"] for each in grads) == 2 * found[1].header["parameters"]
    layers = rows[-1]["layers"]
    cast = [name for name, roles in layers.items() if {"input", "weight", "grad_output", "grad"} <= roles.keys()]
    assert len(cast) >= 4 and all("exp_avg_sq" in layers[name] for name in cast)
    sent = {name: roles["collective"] for name, roles in layers.items() if "collective" in roles}
    assert sent, layers.keys()
    assert all(10 < measures["sqnr_db"] for measures in sent.values() if "sqnr_db" in measures)
