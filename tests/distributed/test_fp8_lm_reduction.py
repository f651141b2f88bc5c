"""FP8-LM's own reduction: a ring of codes against the same sums in one process, and its mu."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run
from torch import Tensor

from narrowgauge.distributed import wire
from narrowgauge.distributed.fp8_lm import GROWTH, Fp8LmReduction, Scaling
from narrowgauge.errors import CheckpointError
from narrowgauge.numerics import measure

ROLE = "grad_comm"
TIMEOUT_S = 300.0


def _values(rank: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * 10.0**-rank


def _reduced(numel: int) -> tuple[dict[str, Tensor], int]:
    found = {}
    with wire.counted() as count:
        for kind in Scaling:
            reduction = Fp8LmReduction(kind, 3)
            found[kind.name] = reduction.all_reduce(_values(dist.get_rank(), numel), None, ROLE)
    return found, count.bytes_of(ROLE)


@pytest.mark.multiproc
def test_a_ring_of_ranks_adds_codes_as_one_process_does() -> None:
    numel = 1000
    results = run(3, _reduced, numel, timeout_s=TIMEOUT_S)
    part = 334
    assert results[0][1] == 3 * 2 * 2 * part  # three reductions, two phases, two parts in each
    values = torch.stack([_values(rank, numel) for rank in range(3)])
    for kind in Scaling:
        means = [found[kind.name] for found, _ in results]
        assert torch.equal(means[0], means[1]) and torch.equal(means[0], means[2])
        # part r begins at rank r
        for r in range(3):
            one = Fp8LmReduction(kind, 3)
            expected = one.mean_of(values.roll(-r, 0))[r * part : (r + 1) * part]
            assert torch.equal(means[0][r * part : (r + 1) * part], expected)


def test_a_sum_by_hand() -> None:
    """amax 2: s = 224. 2 -> 448, 1 -> 224, 0.03 -> 6.72 -> 6.5; 448 + 224 saturates, 6.5 + 6.5 = 13."""
    values = torch.tensor([[2.0, 0.03], [1.0, 0.03]])
    post = Fp8LmReduction(Scaling.POST, 2)
    assert post.mean_of(values).tolist() == pytest.approx([448 / 448, 13 / 448])
    pre = Fp8LmReduction(Scaling.PRE, 2)  # 2 -> 224, 1 -> 112, 0.03 -> 3.36 -> 3.25; 336 is a tie of 320 and 352
    assert pre.mean_of(values).tolist() == pytest.approx([320 / 224, 6.5 / 224])


def test_mu_halves_where_sums_saturate_and_else_grows() -> None:
    auto = Fp8LmReduction(Scaling.AUTO, 4)
    ones = torch.ones(4, 1000)
    means = [auto.mean_of(ones)[0].item() for _ in range(3)]
    # four times the largest value: mu 1 and 1/2 saturate, and 1/4 does not, though its sum is the largest code
    assert means == [0.25, 0.5, 1.0]
    assert auto.mu.item() == 0.125
    for _ in range(2):
        assert auto.mean_of(ones)[0].item() == pytest.approx(1.0, rel=0.0625)
    assert auto.mu.item() == pytest.approx(0.125 * GROWTH**2) and math.isclose(GROWTH**1000, 2.0)
    few = torch.full((4, 200000), 1e-3)
    few[:, 0] = 1.0
    auto = Fp8LmReduction(Scaling.AUTO, 4)
    auto.mean_of(few)  # one of 200,000 at the maximum: 0.0005 %
    assert auto.mu.item() == pytest.approx(GROWTH)


def _not_finite(bad: float) -> tuple[Tensor, float]:
    auto = Fp8LmReduction(Scaling.AUTO, 2)
    x = _values(0, 100)
    if dist.get_rank() == 1:
        x[3] = bad
    return auto.all_reduce(x, None, ROLE), auto.mu.item()


# case 83
@pytest.mark.multiproc
@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_what_is_not_finite_is_seen_by_all_and_leaves_mu(bad: float) -> None:
    for mean, mu in run(2, _not_finite, bad, timeout_s=TIMEOUT_S):
        assert mean.isnan().all() and mu == 1.0


def _saved(folder: str) -> tuple[float, float]:
    auto = Fp8LmReduction(Scaling.AUTO, 2)
    auto.all_reduce(torch.ones(100), None, ROLE)
    dcp.save({"reduction": auto}, checkpoint_id=folder)
    other = Fp8LmReduction(Scaling.AUTO, 2)
    dcp.load({"reduction": other}, checkpoint_id=folder)
    return auto.mu.item(), other.mu.item()


@pytest.mark.multiproc
def test_mu_goes_through_a_checkpoint(tmp_path: Path) -> None:
    assert run(2, _saved, str(tmp_path), timeout_s=TIMEOUT_S) == [(0.5, 0.5)] * 2


def test_a_checkpoint_without_mu_is_refused() -> None:
    with pytest.raises(CheckpointError, match="expected one 'mu', found nothing"):
        Fp8LmReduction(Scaling.AUTO, 2).load_state_dict({})


def test_dividing_before_the_sum_flushes_what_dividing_after_it_keeps() -> None:
    """448 * 2^-13 is a normal value, a 64th of it less than half of the smallest one, 2^-9."""
    values = torch.full((64, 1000), 2.0**-13)
    values[0, 0] = 1.0
    means = {kind: Fp8LmReduction(kind, 64).mean_of(values, in_ring=False) for kind in (Scaling.PRE, Scaling.POST)}
    assert not means[Scaling.PRE][1:].any() and means[Scaling.PRE][0] > 0
    assert (means[Scaling.POST][1:] - 2.0**-13).abs().max() <= 2.0**-13 / 16


# a prototype's figures in plain PyTorch, dB; other draws move them by 2, above all their largest value
SNR_DB = {
    (False, Scaling.PRE): 31.3, (False, Scaling.POST): 3.4, (False, Scaling.AUTO): 29.9,
    (True, Scaling.PRE): 11.2, (True, Scaling.POST): 3.4, (True, Scaling.AUTO): 10.8,
}  # fmt: skip


@pytest.mark.parametrize(("in_ring", "kind"), SNR_DB, ids=str)
def test_signal_to_noise_of_64_ranks_is_that_of_a_prototype(in_ring: bool, kind: Scaling) -> None:
    """Magnitudes over three decades, 30 % of the energy the same on all ranks."""
    draw = torch.Generator().manual_seed(0)
    magnitude, shared = torch.randn(2, 1 << 14, generator=draw)
    values = magnitude.exp() * (math.sqrt(0.3) * shared + math.sqrt(0.7) * torch.randn(64, 1 << 14, generator=draw))
    reduction = Fp8LmReduction(kind, 64)
    for _ in range(40 if kind is Scaling.AUTO else 0):
        reduction.mean_of(values, in_ring)
    found = measure.sqnr_db(values.double().mean(0), reduction.mean_of(values, in_ring))
    assert abs(found - SNR_DB[in_ring, kind]) <= 2
