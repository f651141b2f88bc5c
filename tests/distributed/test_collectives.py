"""Collectives of quantized values: closed formulas on two to four ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import narrowgauge as ng
from narrowgauge.distributed import codec, collectives, wire
from narrowgauge.distributed.buckets import plan
from narrowgauge.distributed.feedback import ErrorFeedback
from narrowgauge.distributed.reduction import Reduction, wide_values
from narrowgauge.errors import NarrowgaugeError, RecipeError
from narrowgauge.numerics.formats import BF16, E2M1FN, E4M3FN, E5M2, FP16, FP32, INT8
from narrowgauge.recipes.casts import WIRE

ROLE = "grad_comm"
BITS_4 = ng.CastSpec(E2M1FN, ng.Block(1, 32))
SPECS = (
    WIRE,
    ng.CastSpec(E5M2, ng.Block(1, 128)),
    ng.CastSpec(INT8, ng.Block(1, 64), ng.E8M0_UP),
    BITS_4,
    ng.CastSpec(BF16),
    ng.CastSpec(FP32),
)
KEY = torch.tensor(7)
TIMEOUT_S = 300.0


def _values(rank: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def _means(numel: int) -> list[tuple[Tensor, int]]:
    """Of every spec: the mean over ranks, and the bytes that this one sent."""
    found = []
    for spec in SPECS:
        with wire.counted() as count:
            mean = collectives.all_reduce(_values(dist.get_rank(), numel), spec, None, ROLE).wait()
        assert {row.dtype for row in count.rows} <= {codec.dtype_of(spec)}
        found.append((mean, count.bytes))
    return found


def _rounded(x: Tensor, spec: ng.CastSpec) -> Tensor:
    """What arrives of values that are whole blocks."""
    return ng.quantize(x, spec).dequantize() if spec.in_blocks else x.to(spec.format.dtype).float()


@pytest.mark.multiproc
@pytest.mark.parametrize("numel", [0, 1, 1000, 4096])
def test_a_reduction_is_two_roundings_away_from_the_mean(numel: int) -> None:
    ranks = run(3, _means, numel, timeout_s=TIMEOUT_S)
    for spec, (mean, sent), *others in zip(SPECS, *ranks, strict=True):
        assert all(torch.equal(mean, other) for other, _ in others)
        a, b, c = (_rounded(_values(rank, numel), spec) for rank in range(3))
        assert torch.equal(mean, _rounded((a + b + c) / 3, spec)), spec
        block = codec.block_of(spec)
        part = -(-numel // (3 * block)) * block
        scales = 0 if not spec.in_blocks else part // block * (1 if spec.has_pow2_scale else 4)
        # two phases, in each a part to each of two other ranks
        assert sent == 2 * 2 * (int(part * spec.format.bits / 8) + scales), spec


def _with_bad(bad: float, in_sum: bool) -> list[Tensor]:
    found = []
    for spec in (WIRE, ng.CastSpec(INT8, ng.Block(1, 128)), BITS_4, ng.CastSpec(BF16)):
        x = _values(dist.get_rank(), 1000)
        if in_sum or dist.get_rank() == 1:
            x[700] = bad
        found.append(collectives.all_reduce(x, spec, None, ROLE, average=False).wait())
    return found


# cases 80, 83: every rank must come to the same decision
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("bad", "in_sum"), [(float("nan"), False), (float("inf"), False), (-float("inf"), False), (3e38, True)]
)
def test_what_is_not_finite_on_one_rank_or_in_the_sum_is_seen_by_all(bad: float, in_sum: bool) -> None:
    for found in zip(*run(2, _with_bad, bad, in_sum, timeout_s=TIMEOUT_S), strict=True):
        for total in found:
            assert not total[700].isfinite()
            assert total[:640].isfinite().all() and total[768:].isfinite().all()
        assert torch.equal(found[0].nan_to_num(), found[1].nan_to_num())


def _extremes() -> list[Tensor]:
    """case 83: amax 1e-3 and 1e3; zeros on one rank. case 82: near the largest value of E4M3FN."""
    first = dist.get_rank() == 0
    values = (torch.full((128,), 1e-3 if first else 1e3), torch.full((128,), 1.0 if first else 0.0),
              torch.full((128,), 40000.0))  # fmt: skip
    return [collectives.all_reduce(x, WIRE, None, ROLE).wait() for x in values]


@pytest.mark.multiproc
def test_scales_of_their_own_bear_ranks_of_different_magnitude() -> None:
    for found in run(2, _extremes, timeout_s=TIMEOUT_S):
        for mean, expected in zip(found, (500.0005, 0.5, 40000.0), strict=True):
            assert (mean - expected).abs().max() <= 0.0625 * expected


def _of_a_part_of_the_ranks() -> Tensor | str:
    pair = dist.new_group([0, 2])
    rank = dist.get_rank()
    if rank == 1:
        with pytest.raises(NarrowgaugeError) as told:
            collectives.all_reduce(_values(1, 10), WIRE, pair, ROLE)
        return str(told.value)
    if rank == 0:
        collectives.send(_values(0, 300).view(3, 100), WIRE, 1, pair, ROLE)
    else:
        received = collectives.recv(torch.Size((3, 100)), WIRE, 0, pair)
        assert torch.equal(
            received, codec.decode(codec.encode(_values(0, 300).view(1, -1), WIRE), 300, WIRE).view(3, 100)
        )
    place = dist.get_rank(pair)
    rows = collectives.all_to_all(_values(rank, 300).view(2, 150), BITS_4, pair, ROLE).wait()
    for source, row in zip((0, 2), rows, strict=True):
        sent = codec.encode(_values(source, 300).view(2, 150), BITS_4)
        assert torch.equal(row, codec.decode(sent, 150, BITS_4)[place])
    out = torch.empty(2, 150, dtype=torch.bfloat16)
    gathered = collectives.all_gather(_values(rank, 150), BITS_4, pair, ROLE, out=out).wait()
    assert gathered is out
    for source, row in zip((0, 2), out, strict=True):
        assert torch.equal(
            row, codec.decode(codec.encode(_values(source, 150).view(1, -1), BITS_4), 150, BITS_4)[0].bfloat16()
        )
    return collectives.reduce_scatter(_values(rank, 300), WIRE, pair, ROLE).wait()


@pytest.mark.multiproc
def test_groups_of_some_ranks_and_every_collective() -> None:
    first, told, last = run(3, _of_a_part_of_the_ranks, timeout_s=TIMEOUT_S)
    assert "process 1 is not in the group" in told
    sent = [codec.decode(codec.encode(_values(rank, 300).view(2, 150), WIRE), 150, WIRE) for rank in (0, 2)]
    assert torch.equal(torch.stack([first, last]), (sent[0] + sent[1]) / 2)


def _misused() -> list[str]:
    x, wide = torch.ones(200), torch.zeros(200, 2)
    told = []
    for out in (torch.zeros(199), torch.zeros(201), wide[:, 0], torch.zeros(200, dtype=torch.float16)):
        with pytest.raises(NarrowgaugeError) as caught:
            collectives.all_reduce(x, WIRE, None, ROLE, out=out)
        told.append(str(caught.value))
    with pytest.raises(NarrowgaugeError) as caught:
        collectives.all_gather(x, WIRE, None, ROLE, out=torch.zeros(200))
    assert not wide.any()
    told.append(str(caught.value))
    for spec in (ng.CastSpec(E4M3FN), ng.CastSpec(E4M3FN, ng.Block(2, 128)), ng.CastSpec(FP16)):
        with pytest.raises(RecipeError, match=r"grad_comm=.*expected blocks along rows"):
            collectives.all_reduce(x, spec, None, ROLE)
    return told


@pytest.mark.multiproc
def test_what_cannot_travel_or_be_taken_is_refused_before_anything_is_sent() -> None:
    for short, long, strided, half, gathered in run(2, _misused, timeout_s=TIMEOUT_S):
        assert "tensor of 200 values, found torch.float32 [199]" in short and "[201]" in long
        assert "[200], not contiguous" in strided and "torch.float16 [200]" in half
        assert "tensor of 400 values" in gathered


def _stochastic() -> Tensor:
    x = torch.rand(4096, generator=torch.Generator().manual_seed(0)) + 0.5  # the same on all ranks, and so is the key
    spec = ng.CastSpec(E2M1FN, ng.Block(1, 32), rounding=ng.STOCHASTIC)
    return collectives.reduce_scatter(x, spec, None, ROLE, key=KEY).wait() - x.view(4, -1)[dist.get_rank()]


@pytest.mark.multiproc
def test_ranks_round_by_bits_of_their_own_under_one_key() -> None:
    errors = torch.cat(run(4, _stochastic, timeout_s=TIMEOUT_S))
    x = torch.rand(4096, generator=torch.Generator().manual_seed(0)) + 0.5
    spec = ng.CastSpec(E2M1FN, ng.Block(1, 32), rounding=ng.STOCHASTIC)
    alone = codec.decode(codec.encode(x.view(1, -1), spec, KEY), 4096, spec)[0] - x
    # independent errors of four ranks leave a half, equal ones all
    assert 0.45 < errors.square().mean().sqrt() / alone.square().mean().sqrt() < 0.55
    assert errors.mean().abs() < 5 * errors.std() / 64


def _stochastic_bucket() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.rand(4096, generator=torch.Generator().manual_seed(0)) + 0.5  # the same on all ranks, as their generators
    (bucket,) = plan([4096], [ng.CastSpec(E2M1FN, ng.Block(1, 32), rounding=ng.STOCHASTIC)], 4, 1 << 20)
    reduction = Reduction(bucket, None, torch.device("cpu"))
    reduction.put(0, x)
    sent = reduction._sent.clone()
    reduction.launch()
    reduction.gather()
    (rows,) = reduction.finish()
    return sent, wide_values(rows, bucket.spec, x.shape, torch.float32) - x, torch.get_rng_state()


@pytest.mark.multiproc
def test_buckets_of_gradients_are_rounded_by_bits_of_their_own_and_draw_alike() -> None:
    sent, errors, states = zip(*run(4, _stochastic_bucket, timeout_s=TIMEOUT_S), strict=True)
    assert all(torch.equal(errors[0], e) and torch.equal(states[0], s) for e, s in zip(errors, states, strict=True))
    # bytes of two codes each; equal bits would leave none that differ
    assert all(0.05 < (a != b).float().mean() < 0.8 for a, b in itertools.combinations(sent, 2))
    assert errors[0].mean().abs() < 5 * errors[0].std() / 4096**0.5


def _with_feedback(steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over steps of the mean of the same values: with feedback, without, and exact."""
    x = _values(dist.get_rank(), 1000)
    feedback, sums = ErrorFeedback(), torch.zeros(2, 1000)
    for step in range(steps):
        if step == steps // 2:  # a checkpoint is taken and loaded
            state = {name: value.clone() for name, value in feedback.state_dict().items()}
            feedback = ErrorFeedback()
            feedback.load_state_dict(state)
        sums[0] += collectives.all_reduce(x, BITS_4, None, ROLE, feedback=feedback).wait()
        sums[1] += collectives.all_reduce(x, BITS_4, None, ROLE).wait()
    with pytest.raises(NarrowgaugeError, match="expected the 1000 values of the steps before, found 10"):
        collectives.all_reduce(x[:10], BITS_4, None, ROLE, feedback=feedback)
    return sums[0], sums[1], x


@pytest.mark.multiproc
def test_error_feedback_loses_nothing_over_steps() -> None:
    steps = 20
    results = run(2, _with_feedback, steps, timeout_s=TIMEOUT_S)
    exact = (results[0][2] + results[1][2]) / 2
    for fed, plain, _ in results:
        assert torch.equal(fed, results[0][0])
        # what is missing of the sum are the residuals of the last step: half a step of 2/6 of amax each, of two casts
        assert (fed - steps * exact).abs().max() <= 2 * (2 / 6 / 2) * 4.5
        assert (plain - steps * exact).abs().max() > 3 * (fed - steps * exact).abs().max()


def _several() -> list[Tensor]:
    pending = [
        collectives.all_reduce(_values(dist.get_rank() + 10 * i, 500 + i), WIRE, None, ROLE, out=torch.empty(500 + i))
        for i in range(3)
    ]
    for each in pending:
        each.advance()
    return [each.wait() for each in reversed(pending)] + [pending[0].wait()]


@pytest.mark.multiproc
def test_several_are_under_way_and_each_phase_begins_when_asked() -> None:
    found = run(2, _several, timeout_s=TIMEOUT_S)
    alone = [_mean_of(torch.stack([_values(rank + 10 * i, 500 + i) for rank in range(2)])) for i in range(3)]
    for results in found:
        assert all(torch.equal(a, b) for a, b in zip(results, [*reversed(alone), alone[0]], strict=True))


def _mean_of(values: Tensor) -> Tensor:
    """What `all_reduce` by WIRE gives of rows of ranks."""
    ranks, numel = values.shape
    part = collectives.padded(numel, WIRE, ranks) // ranks
    sent = torch.stack([codec.encode_flat(row, ranks, part, WIRE) for row in values])
    parts = [codec.reduce_and_encode(sent[:, rank], part, WIRE, ranks) for rank in range(ranks)]
    return codec.decode_flat(torch.stack(parts), numel, part, WIRE)


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    """This process as the first of eight that do not answer."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("eight_ranks")
def test_fake_tensors_pass_through_every_collective() -> None:
    """They raise where a value is asked for, as a wait for the device would."""
    feedback = ErrorFeedback()
    spec = ng.CastSpec(E4M3FN, ng.Block(1, 128), ng.E8M0_UP, rounding=ng.STOCHASTIC)
    with FakeTensorMode(), wire.counted() as count:
        x, key = torch.empty(4096, dtype=torch.bfloat16), torch.empty((), dtype=torch.int64)
        mean = collectives.all_reduce(x, spec, None, ROLE, key=key, feedback=feedback).wait()
        assert mean.shape == (4096,) and mean.dtype is torch.float32
        assert collectives.reduce_scatter(x, spec, None, ROLE, key=key).wait().shape == (512,)
        assert collectives.all_gather(x, spec, None, ROLE, key=key).wait().shape == (8, 4096)
        assert collectives.all_to_all(x.view(8, -1), spec, None, ROLE, key=key).wait().shape == (8, 512)
    row = 512 + 4
    assert [r.bytes for r in count.rows] == [7 * row * 3, 7 * row + 7 * 8 * row]
