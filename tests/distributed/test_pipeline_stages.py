"""How a model is parted into stages: even in cost, under its own names, without a rank that holds it whole."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from models import batch, tiny_config, tiny_gpt
from pipelines import batches, gradients, prepared, run, split
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.distributed import layout, pipeline_of, split_pipeline
from narrowgauge.distributed.pipeline_schedule import SCHEDULES, own_errors
from narrowgauge.distributed.stages import gpt_costs, partition
from narrowgauge.models.gpt import GPT


def _best(costs: list[float], stages: int) -> float:
    """By trying all."""
    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    return min(max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cut, len(costs)))) for cut in cuts)


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
def test_no_other_partition_has_a_smaller_largest_stage(stages: int) -> None:
    for seed in range(20):
        costs = torch.rand(8, generator=torch.Generator().manual_seed(seed)).tolist()
        runs = partition(costs, stages)
        assert [i for run in runs for i in run] == list(range(8)) and all(len(run) for run in runs)
        assert max(sum(costs[i] for i in run) for run in runs) == pytest.approx(_best(costs, stages))


def test_equal_blocks_are_spread_evenly_and_a_large_head_takes_some_off_its_stage() -> None:
    assert [len(run) for run in partition([1.0] * 10, 4)] == [2, 2, 3, 3]
    small, large = (gpt_costs(GPT(tiny_config(layers=8, vocab_size=v), device="meta")) for v in (64, 4000))
    # a block of width 64: 4 * 64^2 of attention, 3 * 64 * 192 of SwiGLU, 64 * 32 of scores and sums
    assert small[3] == 4 * 64**2 + 3 * 64 * 192 + 64 * 32 and small[7] - small[3] == 64 * 64
    assert small[0] - small[3] == 64
    assert [len(run) for run in partition(small, 2)] == [4, 4]
    assert [len(run) for run in partition(large, 2)] == [6, 2]


def test_experts_cost_what_a_token_visits() -> None:
    (dense, *_), (mixed, *_) = (gpt_costs(GPT(tiny_config(experts=n), device="meta")) for n in (0, 4))
    assert mixed - dense == 3 * 64 * 192 + 4 * 64  # two experts in place of one, and the router


def test_fewer_blocks_than_stages_are_refused() -> None:
    with pytest.raises(ng.ConversionError, match="3 pipeline stages, found 2 blocks"):
        partition([1.0, 1.0], 3)


@pytest.mark.parametrize(
    ("schedule", "per_rank", "expected"),
    [("1f1b", 1, [[0], [1]]), ("interleaved", 3, [[0, 2, 4], [1, 3, 5]]), ("zbv", 2, [[0, 3], [1, 2]])],
)
def test_which_rank_has_which_stages(schedule: str, per_rank: int, expected: list[list[int]]) -> None:
    found = SCHEDULES[schedule]
    assert [found.stages_of(rank, 2, per_rank) for rank in range(2)] == expected
    assert all(found.rank_of(stage, 2) == rank for rank in range(2) for stage in expected[rank])


def _names(schedule: str, tied: bool) -> tuple[list[str], list[str], int]:
    model = split(schedule, layers=5, tied_embeddings=tied).model
    return [name for name, _ in model.named_parameters()], sorted(model.state_dict()), model.parameter_count()  # type: ignore[operator]


@pytest.mark.multiproc
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_names_are_those_of_the_whole_model(schedule: str) -> None:
    whole = tiny_gpt(layers=5)
    found = run(2, _names, schedule, False)
    assert sorted(name for names, _, _ in found for name in names) == sorted(n for n, _ in whole.named_parameters())
    assert sorted(key for _, keys, _ in found for key in keys) == sorted(whole.state_dict())
    assert sum(count for _, _, count in found) == whole.parameter_count()


def _drawn(schedule: str, tied: bool) -> dict[str, Tensor]:
    whole = GPT(tiny_config(layers=4, tied_embeddings=tied, positions="learned"), device="meta")
    model = split_pipeline(whole, layout(pipeline=2), schedule).model
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    model.reset_parameters(torch.Generator().manual_seed(7))  # type: ignore[operator]
    return dict(model.state_dict())


@pytest.mark.multiproc
@pytest.mark.parametrize(("schedule", "tied"), [("1f1b", False), ("1f1b", True), ("zbv", True)])
def test_a_model_on_the_meta_device_gets_the_weights_of_the_whole(schedule: str, tied: bool) -> None:
    config = tiny_config(layers=4, tied_embeddings=tied, positions="learned")
    expected = GPT(config, device="cpu", generator=torch.Generator().manual_seed(7)).state_dict()
    found = run(2, _drawn, schedule, tied)
    assert found[0].keys() | found[1].keys() == expected.keys()
    for part in found:
        assert len(part) < len(expected)
        assert all(torch.equal(value, expected[name]) for name, value in part.items())


def _selected(schedule: str) -> dict[str, bool]:
    pipeline = split(schedule)
    prepared(pipeline.model, ng.recipe("fp8_current").replace(first_last=(2, 3)))
    return {name: m.quantized for name, m in pipeline.model.named_modules() if isinstance(m, nn.Linear)}  # type: ignore[misc]


@pytest.mark.multiproc
def test_first_and_last_layers_are_those_of_the_whole_model() -> None:
    whole = tiny_gpt(layers=4)
    prepared(whole, ng.recipe("fp8_current").replace(first_last=(2, 3)))
    expected = {name: m.quantized for name, m in whole.named_modules() if isinstance(m, nn.Linear)}
    for found in (run(2, _selected, "1f1b"), run(2, _selected, "interleaved")):
        assert found[0] | found[1] == expected and sum(expected.values()) == 4 * 4 - 5


def _parts() -> nn.Sequential:
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(48, 48), nn.GELU()) for _ in range(3)]
    return nn.Sequential(nn.Embedding(64, 48), *blocks, nn.LayerNorm(48), nn.Linear(48, 64))


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _sequential(schedule: str) -> tuple[float, float, dict[str, Tensor]]:
    pipeline = split_pipeline(_parts(), layout(pipeline=2), schedule, loss=_loss)
    prepared(pipeline.model, "fp32")
    return float(pipeline.step(batches())), float(pipeline.loss(*batch(9))), gradients(pipeline.model)


@pytest.mark.multiproc
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble"])
def test_a_sequential_is_split_between_its_parts(schedule: str) -> None:
    model = _parts()
    losses = [_loss(model(ids), targets) for ids, targets in batches()]
    (sum(losses) / 4).backward()  # type: ignore[union-attr]
    expected = gradients(model)
    found = run(2, _sequential, schedule)
    ids, targets = batch(9)
    for loss, evaluated, _ in found:
        assert loss == pytest.approx(sum(float(each.detach()) for each in losses) / 4, rel=1e-6)
        assert evaluated == pytest.approx(float(_loss(model(ids), targets).detach()), rel=1e-6)
    whole = found[0][2] | found[1][2]
    assert whole.keys() == expected.keys()
    assert all(torch.allclose(whole[name], expected[name], rtol=1e-4, atol=1e-7) for name in expected)


def _refused() -> list[str]:
    place, messages = layout(pipeline=2), []

    def attempt(function: Any, *args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except ng.NarrowgaugeError as error:
            messages.append(f"{type(error).__name__}: {error}")

    attempt(split_pipeline, tiny_gpt(layers=1), place)
    attempt(split_pipeline, tiny_gpt(layers=3), place, "interleaved")
    attempt(split_pipeline, tiny_gpt(), place, "1f1")
    attempt(split_pipeline, tiny_gpt(), place, "dualpipev")
    attempt(split_pipeline, tiny_gpt(), place, "1f1b", stages_per_rank=2)
    attempt(split_pipeline, tiny_gpt(), place, costs=[1.0])
    attempt(split_pipeline, nn.Linear(4, 4), place)
    attempt(split_pipeline, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), place)
    shared = nn.Linear(4, 4)
    attempt(split_pipeline, nn.Sequential(shared, nn.GELU(), shared), place, loss=_loss)
    pipeline = split("1f1b")
    attempt(split_pipeline, pipeline.model, place)
    attempt(pipeline.step, batches(1))
    attempt(pipeline.step, [])
    attempt(pipeline.step, [*batches(1), *batches(1, sequences=3)])
    attempt(pipeline.model, *batch(0))
    attempt(pipeline.model.generate, batch(0)[0], 3)
    attempt(split("interleaved").step, batches(5))
    with torch.autograd.set_detect_anomaly(True):
        prepared(pipeline.model, "narrow8")
        attempt(pipeline.step, batches(2))
    return messages


@pytest.mark.multiproc
def test_what_cannot_be_split_or_run_is_refused_with_a_remedy() -> None:
    expected = [
        ("ConversionError", "2 pipeline stages, found 1 blocks: use fewer"),
        ("ConversionError", "4 pipeline stages, found 3 blocks: use fewer"),
        ("ConfigError", "pipeline schedule '1f1' is not offered: expected gpipe, 1f1b, interleaved, zero_bubble, zbv"),
        ("ConfigError", "pipeline schedule 'dualpipev' is not offered: expected gpipe"),
        ("ConfigError", "has 1 stage a rank, found stages_per_rank=2: leave it out"),
        ("ConfigError", "expected 2 costs"),
        ("ConversionError", "found Linear: give its parts"),
        ("ConversionError", "expected loss="),
        ("ConversionError", "parts '0' and '2' share a parameter: put them into one part"),
        ("ConversionError", "split into stages already"),
        ("ConfigError", "there are pipeline stages, 2, found 1: raise accumulation to 2"),
        ("ConfigError", "at least one micro-batch"),
        ("ConversionError", "micro-batches of one shape"),
        ("NarrowgaugeError", "call pipeline.step"),
        ("NarrowgaugeError", "cannot generate"),
        ("ConfigError", "found 5 micro-batches a step for 2 ranks: use a multiple of 2"),
        ("ConversionError", "check_nan=False"),
    ]
    for messages in run(2, _refused):
        assert len(messages) == len(expected)
        for message, (kind, words) in zip(messages, expected, strict=True):
            assert message.startswith(kind) and words in message, message


def _copied() -> tuple[bool, bool, float]:
    import copy

    pipeline = split("1f1b")
    prepared(pipeline.model, "narrow8")
    pipeline.step(batches())
    copied = copy.deepcopy(pipeline.model)
    return pipeline_of(pipeline.model) is pipeline, pipeline_of(copied) is None, float(pipeline.step(batches()))


@pytest.mark.multiproc
def test_a_copy_of_a_stage_belongs_to_no_pipeline() -> None:
    assert all(found[:2] == (True, True) for found in run(2, _copied))


def _failing(error: Exception) -> None:
    try:
        raise error
    except Exception as cause:
        raise RuntimeError("torch: failed to run forward") from cause


def test_errors_within_a_stage_keep_their_kind() -> None:
    with pytest.raises(ng.DataError, match="too long"), own_errors():
        _failing(ng.DataError("too long"))
    with pytest.raises(RuntimeError, match="failed to run forward"), own_errors():
        _failing(ValueError("of a part"))
