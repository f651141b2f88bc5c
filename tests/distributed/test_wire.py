"""What is counted of collectives, and the ledger's row of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import narrowgauge as ng
from narrowgauge.distributed import codec, collectives, wire
from narrowgauge.recipes.casts import WIRE


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """This process as the first of four that do not answer."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    wire.SINCE_STEP.clear()
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
def test_counts_nest_and_tell_roles_apart() -> None:
    with wire.counted() as outer:
        collectives.all_gather(torch.ones(256), WIRE, None, "param_comm")
        with wire.counted() as inner:
            collectives.all_reduce(torch.ones(512), WIRE, None, "grad_comm").wait()
    row = 128 + 1
    assert inner.rows == [
        wire.Row("grad_comm", "all_to_all", torch.uint8, 1, 3 * row),
        wire.Row("grad_comm", "all_gather", torch.uint8, 1, 3 * row),
    ]
    assert outer.bytes_of("param_comm") == 3 * 2 * row and outer.bytes_of("grad_comm") == inner.bytes == 6 * row
    assert outer.bytes == 12 * row
    collectives.all_gather(torch.ones(256), WIRE, None, "param_comm")
    assert outer.bytes == 12 * row  # no longer counting


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    ("spec", "dtype", "size"), [(WIRE, torch.uint8, 129), (ng.CastSpec(ng.formats.BF16), torch.bfloat16, 256)]
)
def test_sends_and_wide_dtypes_are_counted_as_what_they_are(spec: ng.CastSpec, dtype: torch.dtype, size: int) -> None:
    with wire.counted() as count:
        collectives.send(torch.ones(128), spec, 1, None, "pipeline_comm")
    assert count.rows == [wire.Row("pipeline_comm", "send", dtype, 1, size)] and codec.wire_bytes(128, spec) == size


@pytest.mark.usefixtures("four_ranks")
def test_the_ledger_tells_what_the_step_has_sent() -> None:
    model = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    row = 3 * 129

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        collectives.all_gather(torch.ones(128), WIRE, None, "grad_comm")
        collectives.all_gather(torch.ones(128), WIRE, None, "param_comm")
        optimizer.step()

    for _ in range(2):
        step()
        found = ng.ledger(model, optimizer)
        assert found.wire == 2 * row and found.rows()[-1] == ("wire", 2 * row, 2 * row / 64)
    assert found.total == sum(found.roles.values()) and "wire" not in found.roles
    assert found.to_dict()["bytes"]["wire"] == 2 * row
    assert f"{2 * row:,}" in str(found).splitlines()[-1]
    collectives.all_gather(torch.ones(128), WIRE, None, "param_comm")  # the next step begins
    assert ng.ledger(model).wire == row


def test_one_process_has_no_row() -> None:
    found = ng.ledger(nn.Linear(8, 8))
    assert found.wire is None and found.rows()[-1][0] == "total"
