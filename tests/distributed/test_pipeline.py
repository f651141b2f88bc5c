"""Pipelines of two and four stages against one process: the same loss, the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import tiny_gpt
from pipelines import SCHEDULES, batches, gradients, one_process_step, prepared, run, split
from torch import Tensor

import narrowgauge as ng
from narrowgauge.distributed import split_pipeline, wire
from narrowgauge.recipes.casts import WIRE

pytestmark = pytest.mark.multiproc


def _step(schedule: str, recipe: Any, count: int = 4, **changes: Any) -> tuple[float, dict[str, Tensor], list[Any]]:
    pipeline = split(schedule, **changes)
    prepared(pipeline.model, recipe)
    with wire.counted() as counted:
        loss = pipeline.step(batches(count))
    return float(loss), gradients(pipeline.model), counted.rows


def _whole(found: list[Any]) -> dict[str, Tensor]:
    """The gradients of all ranks; each name is on one of them, but for a tied table."""
    return {name: grad for _, grads, _ in found for name, grad in grads.items()}


def _one_process(recipe: Any, count: int = 4, **changes: Any) -> tuple[float, dict[str, Tensor]]:
    model = tiny_gpt(**{"layers": 4, **changes})
    prepared(model, recipe)
    loss = one_process_step(model, batches(count))
    return float(loss), gradients(model)


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_float32_gradients_are_those_of_one_process(schedule: str) -> None:
    found = run(2, _step, schedule, "fp32")
    loss, expected = _one_process("fp32")
    assert [each[0] for each in found] == [pytest.approx(loss, rel=1e-6)] * 2
    whole = _whole(found)
    assert whole.keys() == expected.keys()
    assert max(_distance(whole[name], expected[name]) for name in expected) < 1e-5
    assert not found[0][1].keys() & found[1][1].keys()


def test_four_stages_and_micro_batches_that_fill_no_round() -> None:
    found = run(4, _step, "1f1b", "fp32", 6)
    loss, expected = _one_process("fp32", 6)
    assert [each[0] for each in found] == [pytest.approx(loss, rel=1e-6)] * 4
    assert max(_distance(grad, expected[name]) for name, grad in _whole(found).items()) < 1e-5


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble", "zbv"])
def test_a_single_micro_batch(schedule: str) -> None:
    found = run(2, _step, schedule, "fp32", 1)
    _, expected = _one_process("fp32", 1)
    assert max(_distance(grad, expected[name]) for name, grad in _whole(found).items()) < 1e-5


class _ThereAndBack(torch.autograd.Function):
    """What a boundary does: activations and gradients are rounded to what travels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _rounded(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _rounded(grad)


def _rounded(x: Tensor) -> Tensor:
    return ng.quantize(x.detach().reshape(1, -1), WIRE).dequantize().to(x.dtype).view(x.shape)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("recipe", ["narrow8", "fp8_lm_o2"])
def test_a_boundary_rounds_once_each_way_and_nothing_else_differs(schedule: str, recipe: str) -> None:
    found = run(2, _step, schedule, recipe)
    model = tiny_gpt(layers=4)
    prepared(model, recipe)
    # both stages have two blocks
    model.blocks[1].register_forward_hook(lambda block, args, out: (_ThereAndBack.apply(out[0]), out[1]))
    loss, whole = one_process_step(model, batches()), _whole(found)
    assert [each[0] for each in found] == [pytest.approx(float(loss), rel=1e-6)] * 2
    for name, expected in gradients(model).items():
        assert torch.equal(whole[name], expected), name


def test_first_gradients_in_8_bits_are_hardly_farther_from_the_exact_ones() -> None:
    found, (loss, expected), (_, exact) = (
        run(2, _step, "1f1b", "narrow8"),
        _one_process("narrow8"),
        _one_process("fp32"),
    )
    assert found[0][0] == pytest.approx(loss, rel=2.0**-8)
    apart = {
        name: (_distance(grad, exact[name]), _distance(expected[name], exact[name]))
        for name, grad in _whole(found).items()
    }
    # E4M3 rounds by 2.6 % (root mean square, of a uniform mantissa); a block casts activations and their gradients four
    # times each, so that a boundary's one each way adds at most a fourth to the variance of those near it
    noise = 0.026
    for name, (pipelined, one_process) in apart.items():
        assert pipelined < (1.25 * one_process**2 + 2 * noise**2) ** 0.5 + noise, name
    means = [sum(column) / len(apart) for column in zip(*apart.values(), strict=True)]
    assert 0.9 < means[0] / means[1] < 1.25 and 0.02 < means[1] < 0.2


def _bytes(rows: list[Any], dtype: torch.dtype) -> tuple[int, int]:
    (row,) = [row for row in rows if row.role == "pipeline_comm"]
    assert row.dtype is dtype and row.collective == "send"
    return row.calls, row.bytes


def _prepared_again() -> list[set[torch.dtype]]:
    """What travels between stages by one recipe, and then by another."""
    pipeline, found = split("1f1b"), []
    optimizer: Any = torch.optim.AdamW(pipeline.model.parameters())
    for recipe in ("narrow8", "bf16"):
        _, optimizer = ng.prepare(pipeline.model, optimizer, recipe)
        with wire.counted() as count:
            pipeline.step(batches())
        found.append({row.dtype for row in count.rows if row.role == "pipeline_comm"})
        optimizer.zero_grad()
    return found


def test_preparing_again_changes_what_travels() -> None:
    assert run(2, _prepared_again) == [[{torch.uint8}, {torch.bfloat16}]] * 2


def test_the_wire_carries_bytes_and_their_scales() -> None:
    values = 2 * 16 * 64  # a micro-batch
    narrow = run(2, _step, "1f1b", "narrow8")
    one_sample, micro_batch = (n + n // 128 for n in (values // 2, values))
    # the first rank also sends a sample of zeros, from which the others learn its shape
    assert _bytes(narrow[0][2], torch.uint8) == (5, 4 * micro_batch + one_sample)
    assert _bytes(narrow[1][2], torch.uint8) == (4, 4 * micro_batch)
    wide = run(2, _step, "1f1b", "bf16")
    assert _bytes(wide[1][2], torch.bfloat16) == (4, 4 * 2 * values)
    assert 0.5 < _bytes(narrow[1][2], torch.uint8)[1] / _bytes(wide[1][2], torch.bfloat16)[1] < 0.51
    exact = run(2, _step, "1f1b", "fp32")
    assert _bytes(exact[1][2], torch.float32) == (4, 4 * 4 * values)


def _checkpointed(schedule: str, is_checkpointed: bool) -> dict[str, Tensor]:
    pipeline = split(schedule)
    pipeline.model.activation_checkpointing = is_checkpointed  # type: ignore[assignment]
    prepared(pipeline.model, "narrow8")
    pipeline.step(batches())
    return gradients(pipeline.model)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_activation_checkpointing_changes_no_bit(schedule: str) -> None:
    for plain, checkpointed in zip(
        run(2, _checkpointed, schedule, False), run(2, _checkpointed, schedule, True), strict=True
    ):
        assert plain.keys() == checkpointed.keys()
        assert all(torch.equal(grad, checkpointed[name]) for name, grad in plain.items())


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_load_balancing_counts_on_every_stage(schedule: str) -> None:
    changes = {"experts": 4, "load_balancing": 0.5}
    found, (loss, expected) = run(2, _experts, schedule, changes), _one_process("fp32", **changes)
    assert [each[0] for each in found] == [pytest.approx(loss, rel=1e-6)] * 2
    assert max(_distance(grad, expected[name]) for name, grad in _whole(found).items()) < 1e-5
    without, _ = _one_process("fp32", **{**changes, "load_balancing": 0.0})
    assert loss - without > 0.4  # an even load costs 1


def _experts(schedule: str, changes: dict[str, Any]) -> Any:
    return _step(schedule, "fp32", **changes)


def _histories(schedule: str | None) -> dict[str, Tensor]:
    recipe = ng.recipe("fp8_delayed").replace(pipeline_comm=ng.CastSpec(ng.formats.FP32))
    model = tiny_gpt(layers=4)
    pipeline = None if schedule is None else split(schedule)
    optimizer = prepared(model if pipeline is None else pipeline.model, recipe)
    for _ in range(2):
        if pipeline is None:
            one_process_step(model, batches())
        else:
            pipeline.step(batches())
        optimizer.step()
        optimizer.zero_grad()
    return {name: b for name, b in (model if pipeline is None else pipeline.model).named_buffers() if "amax" in name}


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_histories_of_delayed_scaling_are_those_of_one_process(schedule: str) -> None:
    expected, found = _histories(None), run(2, _histories, schedule)
    whole = found[0] | found[1]
    assert whole.keys() == expected.keys() and len(expected) > 16
    for name, history in expected.items():
        assert torch.allclose(whole[name].float(), history.float(), rtol=1e-5, atol=0), name


def _scaled_and_evaluated() -> Any:
    pipeline = split("1f1b")
    prepared(pipeline.model, "fp32")
    once = float(pipeline.step(batches()))
    plain = gradients(pipeline.model)
    pipeline.model.zero_grad()
    again = float(pipeline.step(batches(), scale=lambda loss: loss * 1024))
    ratio = {name: float((grad / 1024 - plain[name]).abs().max()) for name, grad in gradients(pipeline.model).items()}
    pipeline.model.eval()
    losses = [float(pipeline.loss(*batch)) for batch in (*batches(2), *batches(1, sequences=3))]
    fewer = pipeline.model.train() and float(pipeline.step(batches(2, sequences=3)))  # another number, another shape
    return once, again, max(ratio.values()), losses, fewer


def test_a_scaled_loss_other_shapes_and_validation() -> None:
    model = tiny_gpt(layers=4).requires_grad_(False)
    expected = [float(model(*batch)[1]) for batch in (*batches(2), *batches(1, sequences=3))]
    fewer = sum(float(model(*batch)[1]) for batch in batches(2, sequences=3)) / 2
    for once, again, difference, losses, found in run(2, _scaled_and_evaluated):
        assert once == again and difference == 0.0
        assert losses == pytest.approx(expected, rel=1e-6) and found == pytest.approx(fewer, rel=1e-6)


def _poisoned(where: str) -> tuple[float, list[bool]]:
    pipeline = split("1f1b")
    prepared(pipeline.model, "narrow8")
    scale = None
    if where == "loss":
        scale = lambda loss: loss * torch.tensor(float("inf"))  # noqa: E731
    elif pipeline.places.rank == 0:
        pipeline.model.blocks[1].mlp_norm.weight.data[3] = float("nan")  # type: ignore[union-attr, index]
    loss = pipeline.step(batches(), scale=scale)
    return float(loss), [bool(grad.isfinite().all()) for grad in gradients(pipeline.model).values()]


@pytest.mark.parametrize("where", ["activation", "loss"])
def test_what_is_not_finite_arrives_so(where: str) -> None:
    for loss, finite in run(2, _poisoned, where):
        assert not any(finite)
        assert (loss == loss) == (where == "loss")


def test_a_split_model_is_refused_again() -> None:
    with pytest.raises(ng.ConversionError, match="split_pipeline first"):
        model = tiny_gpt()
        prepared(model, "bf16")
        split_pipeline(model, None)  # type: ignore[arg-type]
