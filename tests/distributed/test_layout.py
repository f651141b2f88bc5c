"""The mesh, its groups, and the maximum over a group."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run

from narrowgauge.distributed.layout import GroupReducer, layout
from narrowgauge.errors import ConfigError

pytestmark = pytest.mark.multiproc


def _places() -> tuple[int, ...]:
    found = layout(pipeline=2, shard=2)
    groups = [dist.get_process_group_ranks(group) for group in (found.group("shard"), found.batch, found.stage)]
    return found.rank("pipeline"), found.batch_rank, found.batch_ranks, *groups, str(found)  # type: ignore[return-value]


def test_the_mesh_is_laid_out_with_shards_near_one_another() -> None:
    assert run(4, _places) == [
        (0, 0, 2, [0, 1], [0, 1], [0, 1], "pipeline 2 x shard 2"),
        (0, 1, 2, [0, 1], [0, 1], [0, 1], "pipeline 2 x shard 2"),
        (1, 0, 2, [2, 3], [2, 3], [2, 3], "pipeline 2 x shard 2"),
        (1, 1, 2, [2, 3], [2, 3], [2, 3], "pipeline 2 x shard 2"),
    ]


def _wrong_size() -> str:
    try:
        layout(data=3)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_product_that_is_not_the_number_of_processes_is_refused() -> None:
    (message,) = set(run(2, _wrong_size))
    assert "expected 3 processes" in message and "found 2" in message


def _largest() -> list[float]:
    rank = dist.get_rank()
    values = torch.tensor([1.0 + rank, math.nan if rank else 0.0, math.inf if rank else math.nan, -0.0])
    return GroupReducer(None).max_(values).tolist()


def test_the_maximum_shows_a_nan_of_any_rank() -> None:
    for found in run(2, _largest):
        assert found[0] == 2.0 and math.isnan(found[1]) and math.isnan(found[2]) and found[3] == 0.0


def _fails() -> None:
    if dist.get_rank():
        raise ValueError("of rank 1")


def test_a_rank_that_fails_is_named_and_the_next_call_works() -> None:
    with pytest.raises(RankError, match="rank 1: (.|\n)*of rank 1"):
        run(2, _fails, timeout_s=5)
    assert len(run(2, _largest)) == 2
