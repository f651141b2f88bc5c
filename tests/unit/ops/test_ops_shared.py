"""Layers that read one tensor cast and save it once, within one forward of their parent."""

from __future__ import annotations

import pytest
import torch
from saved_bytes import saved_bytes

from narrowgauge.numerics.formats import BF16, E4M3FN, E5M2
from narrowgauge.numerics.scaling import Delayed
from narrowgauge.ops import operands
from narrowgauge.ops.linear import DelayedSlots, LinearCasts, linear
from narrowgauge.ops.shared import SharedInputs
from narrowgauge.recipes.spec import CastSpec

FP8 = LinearCasts(CastSpec(E4M3FN), CastSpec(E4M3FN), CastSpec(E5M2), BF16)
LATE = CastSpec(E4M3FN, scale=Delayed(history_length=4))
DELAYED = LinearCasts(LATE, CastSpec(E4M3FN), CastSpec(E5M2), BF16)


@pytest.fixture
def casts_of_inputs(monkeypatch) -> list[int]:
    """Grows by one whenever an input is really cast."""
    made: list[int] = []
    real = operands.cast_by

    def spy(x, spec, *arguments, **options):
        if x.shape == (32, 48):
            made.append(x.data_ptr())
        return real(x, spec, *arguments, **options)

    monkeypatch.setattr(operands, "cast_by", spy)
    return made


def three(shared: SharedInputs | None, casts: LinearCasts = FP8, delayed: tuple = ({}, {}, {})):
    torch.manual_seed(0)
    x = torch.randn(32, 48, requires_grad=True)
    weights = [torch.randn(16, 48, requires_grad=True) for _ in range(3)]

    def forward():
        options = {"out_dtype": torch.bfloat16, "shared": shared, "record": True}
        return [linear(x, w, None, casts, delayed=d, **options) for w, d in zip(weights, delayed, strict=True)]

    return forward, x, weights


def test_three_layers_cast_and_save_their_input_once_with_the_same_bits(casts_of_inputs):
    def results(shared):
        forward, x, weights = three(shared)
        outputs = forward()
        torch.stack(outputs).float().sum().backward()
        return [*outputs, x.grad, *(w.grad for w in weights)]

    together = results(SharedInputs())
    assert len(casts_of_inputs) == 1
    apart = results(None)
    assert len(casts_of_inputs) == 4
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))

    def count(shared):
        forward, _, weights = three(shared)
        return saved_bytes(forward, weights, [w.shape for w in weights])

    assert count(None) - count(SharedInputs()) == 2 * (32 * 48 + 4)


def test_an_input_changed_in_place_is_cast_again(casts_of_inputs):
    shared: SharedInputs = SharedInputs()
    x, weight = torch.randn(32, 48), torch.randn(16, 48)
    first = linear(x, weight, None, FP8, out_dtype=torch.float32, shared=shared)
    x.mul_(2)
    second = linear(x, weight, None, FP8, out_dtype=torch.float32, shared=shared)
    assert len(casts_of_inputs) == 2
    assert torch.equal(second, 2 * first)


def test_another_tensor_is_another_input_even_at_the_same_address(casts_of_inputs):
    shared: SharedInputs = SharedInputs()
    x, weight = torch.randn(32, 48), torch.randn(16, 48)
    linear(x, weight, None, FP8, out_dtype=torch.float32, shared=shared)
    linear(x.view(32, 48), weight, None, FP8, out_dtype=torch.float32, shared=shared)
    assert len(casts_of_inputs) == 2


def test_a_store_holds_its_tensors_so_that_no_id_is_reused():
    shared: SharedInputs[int] = SharedInputs()
    for i in range(100):
        x = torch.zeros(1)
        assert shared.get(x, "key") is None
        shared.put(x, "key", i)
    assert shared.get(x, "key") == 99
    shared.clear()
    assert shared.get(x, "key") is None


def test_inference_tensors_are_not_stored():
    shared: SharedInputs[int] = SharedInputs()
    with torch.inference_mode():
        x = torch.zeros(1)
        shared.put(x, "key", 1)
        assert shared.get(x, "key") is None


def test_different_specs_do_not_share(casts_of_inputs):
    shared: SharedInputs = SharedInputs()
    x, weight = torch.randn(32, 48), torch.randn(16, 48)
    linear(x, weight, None, FP8, out_dtype=torch.float32, shared=shared)
    other = LinearCasts(CastSpec(E5M2), FP8.weight, FP8.grad_output, BF16)
    linear(x, weight, None, other, out_dtype=torch.float32, shared=shared)
    assert len(casts_of_inputs) == 2


def slots(scale: float) -> dict[str, DelayedSlots]:
    return {"input": DelayedSlots(torch.tensor(scale), torch.zeros(4))}


def test_delayed_scales_share_where_they_are_equal_and_every_layer_records(casts_of_inputs):
    delayed = (slots(8.0), slots(8.0), slots(16.0))
    forward, x, _ = three(SharedInputs(), DELAYED, delayed)
    outputs = forward()
    assert len(casts_of_inputs) == 2
    assert all(state["input"].history[0] == x.abs().max() for state in delayed)
    # a roll after the cast must not change what a later sibling compares with
    alone = three(None, DELAYED, (slots(8.0), slots(8.0), slots(16.0)))[0]()
    assert all(torch.equal(a, b) for a, b in zip(outputs, alone, strict=True))


def test_every_layer_counts_a_shared_cast():
    counted = []

    class Count:
        has_bins = False

        def add(self, role, tally):
            counted.append((role, tally.read().sums["values"]))

    shared: SharedInputs = SharedInputs()
    x, weight = torch.randn(32, 48), torch.randn(16, 48)
    for _ in range(2):
        linear(x, weight, None, FP8, out_dtype=torch.float32, shared=shared, counter=Count())
    assert counted.count(("input", 32 * 48)) == 2
