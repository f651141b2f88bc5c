"""Collectives of quantized values: closed formulas on two to four ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run

import narrowgauge as ng
from narrowgauge.distributed import collectives, wire
from narrowgauge.recipes.casts import WIRE

pytestmark = pytest.mark.multiproc


def _values(rank: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def _reduce(numel: int) -> tuple[torch.Tensor, int]:
    with wire.counted() as count:
        mean = collectives.all_reduce(_values(dist.get_rank(), numel), WIRE, None, "grad_comm").wait()
    return mean, count.bytes


@pytest.mark.parametrize("numel", [1, 1000, 4096])
def test_a_reduction_is_two_roundings_away_from_the_mean(numel: int) -> None:
    found = run(3, _reduce, numel)
    means = [mean for mean, _ in found]
    assert torch.equal(means[0], means[1]) and torch.equal(means[0], means[2])
    quantized = [ng.quantize(_values(rank, numel), WIRE).dequantize() for rank in range(3)]
    expected = ng.quantize((torch.zeros(numel) + quantized[0] + quantized[1] + quantized[2]) / 3, WIRE).dequantize()
    assert torch.equal(means[0], expected)
    padded = -(-numel // 384) * 384
    assert found[0][1] == 2 * (padded + padded // 128) * 2 // 3
