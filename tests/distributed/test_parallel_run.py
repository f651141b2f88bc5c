"""`train --parallel.*`: one run of several processes, against the same run of one."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run
from runs import ranks_of

from narrowgauge import distributed
from narrowgauge.errors import ConfigError, NarrowgaugeError
from narrowgauge.observe import journal
from narrowgauge.train import loop
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.events import Event, Status, StepDone
from narrowgauge.train.ranks import Ranks
from narrowgauge.train.sections import ParallelConfig
from narrowgauge.train.spread import spread

pytestmark = pytest.mark.multiproc

LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"data": 2},
    "partition": {"data": 2, "partition": True},
    "shard": {"shard": 2},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "data x tensor": {"data": 2, "tensor": 2},
    "tensor x pipeline": {"tensor": 2, "pipeline": 2},
    "data x shard": {"data": 2, "shard": 2},
    "data x pipeline": {"data": 2, "pipeline": 2},
    "shard x tensor": {"shard": 2, "tensor": 2},
}


def _train(values: dict[str, Any]) -> tuple[str, float, list[float]]:
    """Status, last loss and the losses of the events that this rank saw."""
    seen: list[Event] = []
    result = loop.run(TrainConfig.from_dict(values), seen.append)
    return result.status, result.last_loss, [event.loss for event in seen if isinstance(event, StepDone)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_in_float32_is_that_of_one_process(layout: str, make_values: Any) -> None:
    parallel = LAYOUTS[layout]
    one = loop.run(TrainConfig.from_dict(make_values("one", {}, recipe="fp32")))
    found = run(ranks_of(parallel), _train, make_values("several", parallel, recipe="fp32"), timeout_s=300)
    assert {status for status, _, _ in found} == {Status.FINISHED}
    assert len({last for _, last, _ in found}) == 1  # all ranks know the same loss
    assert [len(losses) for _, _, losses in found] == [4] + [0] * (len(found) - 1)
    contents = [journal.read(one.run_dir.parent / name / "journal.jsonl") for name in ("one", "several")]
    for kind, keys in (("step", ("loss", "grad_norm", "lr", "tokens")), ("evaluation", ("loss", "tokens"))):
        rows = [[[row[key] for key in keys] for row in each.of_kind(kind)] for each in contents]
        for expected, got in zip(*rows, strict=True):
            assert got == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("layout", ["data", "partition", "shard", "tensor", "pipeline"])
@pytest.mark.parametrize("recipe", ["narrow8", pytest.param("fp8_lm_o2", marks=pytest.mark.slow)])
def test_a_run_in_8_bits_stays_near_that_of_one_process(layout: str, recipe: str, make_values: Any) -> None:
    parallel = LAYOUTS[layout]
    # a table of positions, which all tensor-parallel ranks have, with as many values as have 8-bit gradients
    shape = {"layers": 2, "width": 64, "heads": 2, "ffn_width": 96, "context": 64, "positions": "learned"}
    one = loop.run(TrainConfig.from_dict(make_values("one", {}, recipe=recipe, model=shape)))
    values = make_values("several", parallel, recipe=recipe, model=shape)
    found = run(ranks_of(parallel), _train, values, timeout_s=300)
    rows = [journal.read(one.run_dir.parent / name / "journal.jsonl").of_kind("step") for name in ("one", "several")]
    # the forward pass of the first step is that of one process, but for what travels within it
    assert rows[1][0]["loss"] == pytest.approx(rows[0][0]["loss"], rel=2e-3)
    assert rows[1][0]["grad_norm"] == pytest.approx(rows[0][0]["grad_norm"], rel=0.05)
    assert found[0][1] == pytest.approx(one.last_loss, rel=0.02)


def _from_first(fails: bool) -> tuple[str, str]:
    def answer() -> str:
        if fails:
            raise ConfigError(f"of rank {dist.get_rank()}")
        return f"of rank {dist.get_rank()}"

    ranks = Ranks.of(ParallelConfig(data=2), torch.device("cpu"))
    try:
        return "", ranks.from_first(answer)
    except NarrowgaugeError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("fails", [False, True])
def test_what_the_first_rank_finds_or_raises_all_have(fails: bool) -> None:
    assert set(run(2, _from_first, fails)) == {("ConfigError" if fails else "", "of rank 0")}


def _refused(values: dict[str, Any]) -> str:
    try:
        loop.run(TrainConfig.from_dict(values))
    except NarrowgaugeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_folder_that_is_taken_is_refused_on_all_ranks(make_values: Any) -> None:
    values = make_values("taken", {"data": 2}, steps=1, eval_batches=1, sample_tokens=0)
    run(2, _train, values, timeout_s=300)
    (message,) = set(run(2, _refused, values))
    assert message.startswith("ConfigError: name='taken': expected a new run")


def _refused_where_values_differ(values: dict[str, Any]) -> str:
    if dist.get_rank() == 1:
        values |= {"recipe": "fp32", "optimizer": {"lr": 0.5}}
    return _refused(values)


def test_processes_that_were_given_different_values_say_which(make_values: Any) -> None:
    (message,) = set(run(2, _refused_where_values_differ, make_values("differing", {"data": 2})))
    assert message.startswith("ProcessError: the processes of this run disagree")
    assert message.splitlines()[1:] == [
        "  optimizer.lr: 0.001 on rank 0; 0.5 on rank 1", "  recipe: narrow8 on rank 0; fp32 on rank 1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "function", "options"),
    [
        (ParallelConfig(data=2, partition=True), "data_parallel", {"partition": True}),
        (ParallelConfig(data=2), "data_parallel", {"partition": False}),
        (ParallelConfig(shard=2, reshard=False), "shard", {"reshard_after_forward": False}),
        (ParallelConfig(shard=2), "shard", {"reshard_after_forward": True}),
        (ParallelConfig(tensor=2, sequence=False), "parallelize_tensor", {"sequence": False}),
        (ParallelConfig(tensor=2), "parallelize_tensor", {"sequence": True}),
        (ParallelConfig(pipeline=2, schedule="zero_bubble"), "split_pipeline", {"schedule": "zero_bubble"}),
    ],
)
def test_options_reach_what_spreads_the_model(config: ParallelConfig, function: str, options: dict[str, Any]) -> None:
    names = ("data_parallel", "shard", "parallelize_tensor", "split_pipeline")
    with mock.patch.multiple(distributed, **{name: mock.DEFAULT for name in names}) as mocks:
        spread(mock.sentinel.model, config, Ranks(mock.sentinel.layout))
    mocks[function].assert_called_once_with(mock.sentinel.model, mock.sentinel.layout, **options)
    assert not any(mocks[name].called for name in names if name != function)


@pytest.mark.parametrize(
    ("parallel", "changes", "expected"),
    [
        ({"data": 3}, {}, "expected 3 processes"),
        ({"data": 0}, {}, "parallel.data=0: expected at least 1"),
        ({"data": 2}, {"compile": True}, "compile=true with parallel data 2"),
        ({"pipeline": 2}, {"accumulation": 1}, "at least as many micro-batches a step"),
        ({"shard": 2, "partition": True}, {}, "expected parallel.data alone"),
    ],
)
def test_what_does_not_go_together_is_refused(parallel: Any, changes: Any, expected: str, make_values: Any) -> None:
    assert expected in _refused(make_values("refused", parallel, **changes))
