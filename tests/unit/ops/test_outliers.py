"""One channel of the input suddenly ten times as large: what each scaling makes of it, and what smoothing does."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.numerics import kernels, scaling
from narrowgauge.numerics.formats import E4M3FN, E5M2, FP32
from narrowgauge.numerics.granularity import Block
from narrowgauge.numerics.scaling import CURRENT, CURRENT_POW2, Delayed
from narrowgauge.ops.linear import DelayedSlots, LinearCasts, linear
from narrowgauge.recipes.spec import CastSpec, Emulation

TOKENS = FEATURES = 512
OUTLIER, TIMES = 77, 10.0
DELAYED = CastSpec(E4M3FN, scale=Delayed())
CASTS = LinearCasts(CastSpec(E4M3FN), CastSpec(E4M3FN), CastSpec(E5M2), FP32, emulation=Emulation.EXACT)


class Data(NamedTuple):
    """Normal input of the steps before, the input with the outlier channel, and a weight."""

    before: Tensor
    x: Tensor
    weight: Tensor


@pytest.fixture
def data() -> Data:
    generator = torch.Generator().manual_seed(0)
    before, x, weight = (torch.randn(TOKENS, FEATURES, generator=generator) for _ in range(3))
    x[:, OUTLIER] *= TIMES
    return Data(before, x, weight * FEATURES**-0.5)


def relative_error(found: Tensor, exact: Tensor, dim: int | None = None) -> Tensor:
    """Relative Frobenius error, over all or along a dimension."""
    difference = found.double() - exact.double()
    return difference.norm(dim=dim) / exact.double().norm(dim=dim)


def clipping_error(limit: float) -> float:
    """The relative error of the input that comes of cutting the outlier channel, normal of sd TIMES, off at +-limit.

    With a = c / t: E max(0, |t z| - c)^2 = 2 t^2 ((1 + a^2) (1 - Phi(a)) - a phi(a)), against the energy of all.
    """
    a = limit / TIMES
    tail, density = math.erfc(a / math.sqrt(2)) / 2, math.exp(-a * a / 2) / math.sqrt(2 * math.pi)
    lost = 2 * TIMES**2 * ((1 + a * a) * tail - a * density)
    return math.sqrt(lost / (FEATURES - 1 + TIMES**2))


def stale_slots(x: Tensor) -> dict[str, DelayedSlots]:
    """The state after steps whose amax was that of `x`."""
    amax = scaling.tensor_amax(x)
    return {"input": DelayedSlots(scaling.quant_scale_of(amax, E4M3FN, CURRENT), torch.zeros(16))}


def test_a_stale_scale_clips_the_channel_and_others_follow_it(data: Data) -> None:
    stale = scaling.quant_scale_of(scaling.tensor_amax(data.before), E4M3FN, CURRENT)
    delayed = kernels.quantize(data.x, stale, E4M3FN, count=True)
    assert delayed.codes is not None and delayed.saturated is not None
    values = kernels.dequantize(delayed.codes, scaling.dequant_scale_of(stale), E4M3FN)
    limit = scaling.tensor_amax(data.before).item()
    assert relative_error(values, data.x).item() == pytest.approx(clipping_error(limit), rel=0.1)
    # P(|10 z| > limit) of the channel's values, and hardly any other
    share = math.erfc(limit / TIMES / math.sqrt(2))
    assert delayed.saturated.item() == pytest.approx(TOKENS * share, rel=0.15)
    errors = {}
    for name, block, rule in (
        ("current", ng.PER_TENSOR, CURRENT),
        ("block", Block(1, 128), CURRENT_POW2),
        ("row", ng.PER_ROW, CURRENT),
    ):
        q = kernels.quantize_blocks(data.x, E4M3FN, block, rule)
        assert q.codes is not None
        found = kernels.dequantize_blocks(q.codes, q.dequant_scale, E4M3FN, block)
        errors[name] = relative_error(found, data.x).item()
    # the rounding of E4M3: see docs/numerics.md
    assert all(0.024 <= error <= 0.028 for error in errors.values()), errors


def test_the_gemm_error_under_a_stale_scale_is_more_than_five_times_that_of_current_scaling(data: Data) -> None:
    exact = data.x.double() @ data.weight.double().t()
    errors = {}
    for name, spec, slots in (("delayed", DELAYED, stale_slots(data.before)), ("current", CastSpec(E4M3FN), {})):
        casts = LinearCasts(spec, CASTS.weight, CASTS.grad_output, FP32, emulation=Emulation.EXACT)
        y = linear(data.x, data.weight, None, casts, delayed=slots, out_dtype=torch.float32)
        errors[name] = relative_error(y, exact).item()
    assert errors["delayed"] > 5 * errors["current"]
    limit = scaling.tensor_amax(data.before).item()
    assert errors["delayed"] == pytest.approx(clipping_error(limit), rel=0.1)  # 26 %
    assert 0.034 <= errors["current"] <= 0.040  # two E4M3 roundings


def layer_error(recipe: ng.Recipe, data: Data) -> float:
    """Of a layer's output on `x`, after three training steps on `before`."""
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(data.weight)
    model, optimizer = ng.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), recipe)
    for _ in range(3):
        model(data.before).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [row.status for row in ng.report(model)] == ["converted"]
    return relative_error(model(data.x).detach(), data.x.double() @ data.weight.double().t()).item()


WIDE = {"compute": FP32, "emulation": "exact"}


def test_so_it_is_in_a_prepared_model(data: Data) -> None:
    current = layer_error(ng.recipe("fp8_current", **WIDE), data)
    delayed = layer_error(ng.recipe("fp8_delayed", amax_history_len=16, **WIDE), data)
    assert delayed > 5 * current
    assert 0.034 <= current <= 0.040


@pytest.mark.parametrize(
    "weight",
    [
        CastSpec(E4M3FN),
        DELAYED,
    ],
    ids=["current", "delayed"],
)
def test_smoothing_mends_a_prepared_model(data: Data, weight: CastSpec) -> None:
    recipe = ng.recipe("fp8_delayed", amax_history_len=16, smooth=("*",), weight=weight, **WIDE)
    assert 0.034 <= layer_error(recipe, data) <= 0.040


@pytest.mark.parametrize("smooth", [False, True], ids=["plain", "smooth"])
def test_smoothing_brings_every_channel_within_six_and_a_quarter_percent(data: Data, smooth: bool) -> None:
    # a weight of one: what comes out is the input as it was cast
    casts = LinearCasts(DELAYED, CastSpec(E4M3FN), CastSpec(E5M2), FP32, emulation=Emulation.EXACT, smooth=smooth)
    factors = torch.exp2(data.before.abs().amax(0).log2().floor())
    slots = stale_slots(data.before / factors if smooth else data.before)
    y = linear(data.x, torch.eye(FEATURES), None, casts, delayed=slots, out_dtype=torch.float32)
    by_channel = relative_error(y, data.x, dim=0)
    others = torch.arange(FEATURES) != OUTLIER
    assert ((by_channel > 0.015) & (by_channel < 0.0625))[others].all()
    if smooth:
        assert by_channel[OUTLIER] < 0.0625
        # every value: half a gap of a normal E4M3 value, or of a subnormal one of a channel that reaches up to 2 of 448
        floor = 2.0**-10 * scaling.dequant_scale_of(slots["input"].quant_scale) * 2 * data.x.abs().amax(0)
        held = (y - data.x).abs() <= torch.maximum(data.x.abs() * (1 / 16 + 1e-6), floor)
        assert held.all(dim=0).float().mean() > 0.98  # the maxima of `before` may be a little smaller
        assert ((y - data.x).abs() <= torch.maximum(data.x.abs() / 8, floor)).all()
    else:
        assert by_channel[OUTLIER] > 0.5


def test_smoothing_leaves_gradients_as_exact_as_they_were(data: Data) -> None:
    grad = torch.randn(TOKENS, FEATURES, generator=torch.Generator().manual_seed(1))
    exact = {"x": grad.double() @ data.weight.double(), "weight": grad.double().t() @ data.x.double()}
    errors = {}
    for smooth in (False, True):
        leaves = {"x": data.x.clone().requires_grad_(), "weight": data.weight.clone().requires_grad_()}
        casts = LinearCasts(
            CASTS.input, CASTS.weight, CASTS.grad_output, FP32, emulation=Emulation.EXACT, smooth=smooth
        )
        linear(leaves["x"], leaves["weight"], None, casts, out_dtype=torch.float32).backward(grad)
        for name, leaf in leaves.items():
            assert leaf.grad is not None
            errors[name, smooth] = relative_error(leaf.grad, exact[name]).item()
    assert all(0.055 <= error <= 0.064 for error in errors.values()), errors  # E5M2 by E4M3
