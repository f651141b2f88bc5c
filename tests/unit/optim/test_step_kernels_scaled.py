"""The fused step of what has one scale for a whole tensor, against its slow twin: the same bits."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import pytest
import torch
from step_items import (
    ADAM,
    GRADS,
    HALF,
    HALF_NONZERO,
    HYPERS,
    KEY,
    SCALED_PARAMS,
    SIGNED,
    UNSIGNED,
    WHOLE_E4M3,
    check,
    check_same,
    make,
    same_bits,
    values,
)
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.numerics.formats import E4M3FN, E5M2, FP16, FP32, Format
from narrowgauge.numerics.rounding import NEAREST_EVEN, NONZERO, STOCHASTIC, Rounding
from narrowgauge.numerics.scaling import CURRENT, CURRENT_POW2, TENSOR_POW2
from narrowgauge.optim import base, kernels, storage
from narrowgauge.optim.kernels import Plan
from narrowgauge.optim.rules import Adam, Hyper, Rule, Sgd
from narrowgauge.optim.update import Item, update
from narrowgauge.recipes.cast_spec import CastSpec
from narrowgauge.tensors.quantized import QuantizedTensor, quantize

MOMENTS = {
    "fp8_lm": (WHOLE_E4M3, HALF_NONZERO),
    "fp32": (CastSpec(FP32), CastSpec(FP32)),
    "tiles": (SIGNED, UNSIGNED),
    "current": (CastSpec(E5M2), CastSpec(E4M3FN, scale=CURRENT_POW2, rounding=NONZERO)),
    "fp16": (CastSpec(FP16, scale=CURRENT), CastSpec(E5M2, scale=TENSOR_POW2, rounding=NONZERO)),
}
FP8_LM = MOMENTS["fp8_lm"]
MINUS = Sgd(-1.0, 0.0, 1.0, False, 0.0, True)  # p + g: any value there is


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("param", [*SCALED_PARAMS, "residual", "fp32"])
def test_every_storage(param: str, moments: str) -> None:
    for i, grad in enumerate(GRADS):
        if param in SCALED_PARAMS or moments not in ("fp32", "tiles"):
            check(Rule.ADAM, [make(param, grad, MOMENTS[moments], ADAM, (33, 300 + i), i)], steps=3)


@pytest.mark.parametrize("param", SCALED_PARAMS)
@pytest.mark.parametrize(("rule", "hyper", "moments"), [case for case in HYPERS if case[0] is not Rule.MUON])
def test_every_rule(rule: Rule, hyper: Hyper, moments: int, param: str) -> None:
    for specs in (FP8_LM, (CastSpec(FP32),) * 2):
        check(rule, [make(param, "e4m3", specs[:moments], hyper, (12, 200), 2)], steps=2)


@pytest.mark.parametrize("param", SCALED_PARAMS)
@pytest.mark.parametrize("other", ["parameter", "first", "second"])
def test_formats_next_to_those_of_fp8_lm(param: str, other: str) -> None:
    """Each differs from what `numba_fp8_lm` is for in one place: rounding of parameter or moment, a narrower moment."""
    nonzero = dataclasses.replace(WHOLE_E4M3, rounding=NONZERO)
    specs = {"first": (nonzero, HALF_NONZERO), "second": (WHOLE_E4M3, nonzero)}.get(other, FP8_LM)
    item = make(param, "e4m3", specs, ADAM, (33, 300), 3)
    if other == "parameter":
        held = quantize(values((33, 300), 1.0, 3), HALF_NONZERO)
        item = item._replace(master=held) if param == "copied" else item._replace(param=held)
        # steps so small that what was zero becomes less than half of the least that float16 has
        tiny = Adam.at(3, 1e-12, (0.9, 0.99), 1e-8, 0.1, decoupled=True)
        item = item._replace(hyper=tiny, grad=quantize(torch.full((33, 300), 0.01), CastSpec(E4M3FN)))
    check(Rule.ADAM, [item], steps=2)


def test_muon_is_the_twins() -> None:
    rule, hyper, moments = HYPERS[-1]
    item = make("scaled", "e4m3", FP8_LM[:moments], hyper, (12, 200), 2)
    assert not kernels.takes(rule, item)
    assert Plan(rule).run([item]) == [item]


@pytest.mark.parametrize("spec", [HALF, WHOLE_E4M3, CastSpec(E5M2), CastSpec(FP16, scale=CURRENT)], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (1023,), (1025,), (2, 3, 50), (3000, 1)], ids=str)
def test_every_shape_and_format_of_a_parameter(shape: tuple[int, ...], spec: CastSpec) -> None:
    item = make("fp32", "fp32", FP8_LM, ADAM, shape, 4)
    check(Rule.ADAM, [item._replace(param=quantize(item.param, spec))], steps=2)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_many_parameters_in_one_call(threads: int) -> None:
    """Of all kinds and sizes, some in one pass and some in two, so that threads meet within them."""
    torch.set_num_threads(threads)  # the fixture of this folder sets it back
    shapes, params = ((300, 333), (1, 1), (129, 128), (77,), (400, 512)), (*SCALED_PARAMS, "stochastic", "fp32")
    kinds = itertools.product(params, shapes, MOMENTS.values())
    items = [make(param, GRADS[i % len(GRADS)], specs, ADAM, shape, i) for i, (param, shape, specs) in enumerate(kinds)]
    check(Rule.ADAM, [item._replace(stream=i) for i, item in enumerate(items)])


@pytest.mark.parametrize("rounding", [NEAREST_EVEN, NONZERO], ids=str)
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, FP16], ids=str)
def test_every_tie(fmt: Format, rounding: Rounding) -> None:
    """All halves between two values of a format and their neighbours in float32, of both signs, and half the least."""
    integer = torch.int16 if fmt is FP16 else torch.uint8
    bits = torch.arange(1 << fmt.bits - 1, dtype=torch.int32).to(integer).view(fmt.dtype).float()
    points = bits[bits.isfinite()].sort().values
    halves = (points[1:] + points[:-1]) / 2
    near = torch.cat([points, halves, halves.nextafter(torch.tensor(0.0)), halves.nextafter(torch.tensor(torch.inf))])
    grad = torch.cat([near, -near])
    param = quantize(torch.zeros_like(grad), CastSpec(fmt, scale=TENSOR_POW2, rounding=rounding))
    item = Item(param, None, grad, (), MINUS, False, 0)
    check(Rule.SGD, [item])
    found = item.param.dequantize()[len(points) : len(near)].view(3, -1)
    assert item.param.dequant_scale == 1.0  # type: ignore[attr-defined]
    even = torch.arange(len(halves)) % 2 == 0
    expected = torch.stack([torch.where(even, points[:-1], points[1:]), points[:-1], points[1:]])
    if rounding is NONZERO:
        expected[:, 0] = points[1]
    assert torch.equal(found, expected)


def test_any_bits_of_parameters_and_moments() -> None:
    """Every finite code of float16 and of E4M3."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    codes = bits[bits.isfinite()]
    bytes_ = torch.arange(len(codes), dtype=torch.int32).remainder(256).to(torch.uint8)
    bytes_ = torch.where(bytes_ & 0x7F == 0x7F, 0, bytes_).view(torch.float8_e4m3fn)
    for exponent in (-140, -20, 0, 20):
        scale = torch.tensor(2.0).pow(exponent)
        param = QuantizedTensor(codes.clone(), scale.clone(), HALF)
        first = QuantizedTensor(bytes_.clone(), scale.clone(), WHOLE_E4M3)
        second = QuantizedTensor(codes.abs(), scale.clone(), HALF_NONZERO)
        grad = values((len(codes),), 2.0**exponent, 6)
        for each in (grad, quantize(grad, CastSpec(E4M3FN))):
            item = Item(param, None, each, (first, second), ADAM, False, 0)
            check(Rule.ADAM, [copy.deepcopy(item)], steps=2)


@pytest.mark.parametrize("param", SCALED_PARAMS)
@pytest.mark.parametrize("step", [1, 10, 100_000])
def test_every_bias_correction(step: int, param: str) -> None:
    """With quotients by its reciprocal, and divided where it is too small for that."""
    for beta2 in (0.5, 0.999, 1 - 1e-7, 1 - 2.0**-50):
        hyper = Adam.at(step, 1e-3, (0.9, beta2), 1e-8, 0.1, decoupled=True)
        check(Rule.ADAM, [make(param, "e4m3", FP8_LM, hyper, (5, 700), step)])


@pytest.mark.parametrize("param", SCALED_PARAMS)
def test_values_at_the_ends_of_float32(param: str) -> None:
    for scale in (2.0**-149, 2.0**-130, 2.0**-100, 2.0**-60, 2.0**40, 2.0**50):
        item = make(param, "fp32", FP8_LM, ADAM, (8, 512), 5)
        item = item._replace(grad=item.grad * scale)
        narrow = copy.deepcopy(item)._replace(grad=quantize(item.grad, CastSpec(E4M3FN)))
        check(Rule.ADAM, [item, narrow], steps=3)
        check(Rule.SGD, [make(param, "fp32", (), MINUS, (8, 512), 5)._replace(grad=item.grad)], steps=2)


@pytest.mark.parametrize("param", SCALED_PARAMS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_what_is_not_finite_is_the_twins(value: float, param: str) -> None:
    """A gradient that makes a NaN, an infinity, or a second moment that overflows: nothing of it is written."""
    good, bad = make(param, "fp32", FP8_LM, ADAM, (8, 512), 5), make(param, "fp32", FP8_LM, ADAM, (3, 700), 6)
    bad.grad[1, 3] = value
    if value == torch.inf:
        narrow = quantize(bad.grad, CastSpec(E4M3FN))
        narrow.dequant_scale.fill_(torch.inf)
        bad = bad._replace(grad=narrow)
    twin, before = copy.deepcopy(good), copy.deepcopy(bad)
    assert [id(item) for item in Plan(Rule.ADAM).run([bad, good])] == [id(bad)]
    update(Rule.ADAM, twin, KEY)
    check_same(good, twin)
    check_same(bad, before)


@pytest.mark.parametrize("param", SCALED_PARAMS)
@pytest.mark.parametrize("is_narrow", [False, True])
def test_zero_gradients_move_no_bit(param: str, is_narrow: bool) -> None:  # case 41
    """Also where a fresh cast of the same values would give another scale and another amax."""
    item = make(param, "fp32", FP8_LM, ADAM._replace(decay=1.0), (8, 128), 15)
    zeros = torch.zeros(8, 128)
    grad = quantize(zeros, CastSpec(E4M3FN)) if is_narrow else zeros
    item = item._replace(grad=grad, moments=tuple(storage.encode(zeros, spec) for spec in FP8_LM))
    for stored in (item.param, item.master):
        if isinstance(stored, QuantizedTensor):
            stored.codes.copy_((stored.codes.float() / 64).to(stored.codes.dtype))
            stored.amax.mul_(3)
    if isinstance(item.master, QuantizedTensor):  # the parameter is what its master says
        item.param.copy_(item.master.dequantize())
    item.moments[0].dequant_scale.fill_(0.25)  # type: ignore[attr-defined] - kept where all is zero
    before = copy.deepcopy(item)
    check(Rule.ADAM, [item], steps=2)
    assert same_bits(item.param, before.param) and same_bits(item.master, before.master)
    assert same_bits(item.moments[0], before.moments[0])


@pytest.mark.parametrize("grad", [0.0, 1e-3])
def test_a_master_that_saturated(grad: float) -> None:
    """Its codes do not say which of its values were infinite, so that the twin decides whether it is written."""
    item = make("copied", "fp32", FP8_LM, ADAM, (8, 128), 15)._replace(grad=torch.full((8, 128), grad))
    assert isinstance(item.master, QuantizedTensor)
    item.master.amax.fill_(torch.inf)
    before = copy.deepcopy(item)
    assert Plan(Rule.ADAM).run([item]) == [item]
    check_same(item, before)


def test_a_plan_notices_what_changed_between_its_steps() -> None:
    item = make("copied", "e4m3", FP8_LM, ADAM, (40, 256), 11)
    twin, plan = copy.deepcopy(item), Plan(Rule.ADAM)
    other = make("scaled", "fp32", FP8_LM, ADAM, (40, 256), 12)
    changes = (
        {}, {"grad": other.grad}, {"moments": other.moments}, {"master": None}, {"param": other.param},
        {"moments": tuple(storage.encode(storage.decode(m, item.param.shape), CastSpec(FP32)) for m in item.moments)},
    )  # fmt: skip
    for change in changes:
        item, twin = item._replace(**change), twin._replace(**copy.deepcopy(change))
        assert plan.run([item], KEY) == []
        update(Rule.ADAM, twin, KEY)
        check_same(item, twin)


def test_a_plan_returns_what_the_kernels_do_not_take() -> None:
    item = make("copied", "e4m3", FP8_LM, ADAM, (40, 256), 11)
    wide = item.param.dequantize()
    others = [
        item._replace(param=quantize(wide, dataclasses.replace(WHOLE_E4M3, rounding=STOCHASTIC))),
        item._replace(param=quantize(wide.T, WHOLE_E4M3).T),
        item._replace(master=wide.clone()),
        item._replace(master=quantize(wide, CastSpec(FP16, scale=CURRENT))),
        item._replace(param=quantize(torch.cat([wide, wide]), WHOLE_E4M3)[:40]),
        item._replace(moments=(quantize(wide, CastSpec(FP16)), item.moments[1])),
    ]
    assert [kernels.takes(Rule.ADAM, each) for each in (item, *others)] == [True] + [False] * len(others)
    assert [id(each) for each in Plan(Rule.ADAM).run(others)] == [id(each) for each in others]


def test_autograd_sees_what_a_step_writes() -> None:
    item = make("copied", "fp32", FP8_LM, ADAM, (8, 128), 14)
    stored = [each for each in (item.param, item.master, *item.moments) if isinstance(each, QuantizedTensor)]
    parts = [part for each in stored for part in (each.codes, each.dequant_scale, each.amax)]
    before = [part._version for part in parts]
    Plan(Rule.ADAM).run([item])
    assert len(parts) == 12
    assert [part._version for part in parts] == [version + 1 for version in before]


@pytest.mark.parametrize("recipe", ["fp8_lm_o1", "fp8_lm_o2", "fp8_lm_o3", "fp16_pure"])
def test_the_recipes_need_no_twin(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(rule: Rule, item: Item, key: Tensor | None) -> None:
        raise AssertionError("stepped by plain torch operations")

    monkeypatch.setattr(base, "update", refuse)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    optimizer = ng.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = ng.prepare(model, optimizer, recipe=recipe)[:2]
    model(torch.randn(16, 64)).float().square().mean().backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert any(isinstance(p, QuantizedTensor) for p in before)
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
