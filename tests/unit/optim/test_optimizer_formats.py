"""Every format of weight, gradient, moment and master: updates happen, add up, and leave alone what has no gradient."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from state_formats import (
    GRADS,
    MASTERS,
    MOMENTS,
    ROW_256,
    SCALED_FP16,
    WEIGHTS,
    assert_same_bits,
    bits,
    parameter,
    set_grad,
)
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.numerics.formats import BF16, E4M3FN, FP32, INT8, UINT8
from narrowgauge.optim import rules, storage

SHAPE = (2, 256)
NAMES = ("exp_avg", "exp_avg_sq")


@pytest.fixture(autouse=True)
def without_warnings() -> Iterator[None]:
    """Of bfloat16 and FP8 weights without a master, which are meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*do not move where an update is below.*")
        yield


# every pair updates the weight: case 45


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("moments", MOMENTS)
def test_every_weight_and_state_format_updates_the_weight(moments: str, weight: str) -> None:
    """0.25 at lr 0.05, gradient 1, decay 0.1, 4 steps: fp32 AdamW ends at 0.0465 (without decay at 0.05)."""
    for master in ("none", "scaled fp16"):
        assert_updates(weight, moments, master, "fp32")


@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_every_weight_and_master_format_updates_the_weight(weight: str, master: str) -> None:
    for grad in GRADS:
        assert_updates(weight, "int8 square root", master, grad)


def assert_updates(weight: str, moments: str, master: str, grad: str) -> None:
    m, v = MOMENTS[moments]
    p = parameter(torch.full(SHAPE, 0.25), weight)
    optimizer = ng.optim.AdamW(
        [p], lr=0.05, weight_decay=0.1, exp_avg=m, exp_avg_sq=v, master=MASTERS[master], min_state_size=0
    )
    seen = [0.25]
    for _ in range(4):
        set_grad(p, torch.ones(SHAPE), grad)
        optimizer.step()
        values = optimizer.full_values(p)
        assert values.min() == values.max()
        seen.append(values[0, 0].item())
    # bfloat16's half unit below 0.25 is 2^-11; a scale keeps the largest value of a tensor as it is, and so all here
    limit = 4 * 2.0**-11 if master == "bf16" or (weight, master) == ("bf16", "none") else 5e-4
    assert abs(seen[-1] - 0.0465) <= limit
    assert all(after < before - 0.04 for before, after in zip(seen, seen[1:], strict=False))
    # what the model reads is the master's value in the weight's own format
    unit = {"fp32": 0.0, "scaled fp16": 2.0**-11, "bf16": 2.0**-8, "E4M3": 2.0**-4}[weight]
    assert ((p.detach().dequantize() - values).abs() <= values.abs() * unit).all()


def test_decay_alone_acts_on_the_value_and_not_on_codes() -> None:
    """lr 0.1, decay 0.5: 5 % a step, with values of several magnitudes, whatever the scale."""
    x = torch.tensor([[0.5, -0.25, 0.125, 2.0]]).expand(2, 4).contiguous()
    for weight in WEIGHTS:
        p = parameter(x, weight)
        optimizer = ng.optim.AdamW([p], lr=0.1, weight_decay=0.5, master=SCALED_FP16)
        for _ in range(3):
            set_grad(p, torch.zeros(2, 4), "fp32")
            optimizer.step()
        unit = {"fp32": 2.0**-22, "scaled fp16": 3 * 2.0**-11, "bf16": 3 * 2.0**-11, "E4M3": 3 * 2.0**-11}[weight]
        torch.testing.assert_close(optimizer.full_values(p), x * 0.95**3, rtol=unit, atol=0)


# zero gradients: case 39

# how far a constant gradient moves a weight in 500 steps, against float32 state. bfloat16 rounds the last increments of
# exp_avg_sq away, float16 fewer of them
MOVED = {"fp32": (0.0, 0.0), "bf16": (0.025, 0.04), "scaled fp16": (1e-3, 4e-3), "FP8-LM": (1e-3, 4e-3)}


@cache
def walk(moments: str, weight: str = "fp32", master: str = "none", steps: int = 500) -> tuple[Tensor, Tensor]:
    """256 weights before and after, gradient 1 on the first half and exactly 0 on the rest, no decay."""
    m, v = MOMENTS[moments]
    p = parameter(torch.randn(256, generator=torch.Generator().manual_seed(0)), weight)
    grad = torch.zeros(256)
    grad[:128] = 1
    optimizer = ng.optim.AdamW(
        [p], lr=1e-3, weight_decay=0.0, exp_avg=m, exp_avg_sq=v, master=MASTERS[master], min_state_size=0
    )
    optimizer.set_values(p, optimizer.full_values(p))  # a copy may hold fewer digits than the weight's own value
    before = optimizer.full_values(p)
    for _ in range(steps):
        set_grad(p, grad, "fp32")
        optimizer.step()
    return before, optimizer.full_values(p)


@pytest.mark.parametrize("moments", MOMENTS)
def test_zero_gradients_never_move_a_weight(moments: str) -> None:
    before, after = walk(moments)
    assert torch.equal(before[128:], after[128:])
    reference = walk("fp32")[1]
    off = ((after - before)[:128] / (reference - before)[:128] - 1).abs().max().item()
    least, most = MOVED.get(moments, (0.0, 1e-5))
    assert least <= off <= most


@pytest.mark.parametrize(
    ("weight", "master"),
    [("bf16", "8-bit residual"), ("bf16", "16-bit remainder"), ("bf16", "fp32"), ("scaled fp16", "none"),
     ("E4M3", "scaled fp16"), ("E4M3", "fp32")],
)  # fmt: skip
def test_zero_gradients_never_move_a_narrow_weight(weight: str, master: str) -> None:
    """Nor does a new scale of the tensor: it is a power of two, or that of a copy of the master."""
    before, after = walk("int8 square root", weight, master, steps=100)
    assert torch.equal(before[128:], after[128:])
    # 100 steps of 1e-3, which float16 rounds to a unit in the last place of values above 2
    assert ((before - after)[:128] - 0.1).abs().median() <= 0.005


def test_stored_bits_stay_where_the_update_is_zero() -> None:
    """A residual that was split otherwise than by `split`, and a tensor's scale, included."""
    for weight, master in (("bf16", MASTERS["8-bit residual"]), ("bf16", MASTERS["16-bit remainder"]),
                           ("scaled fp16", None), ("E4M3", None), ("E4M3", SCALED_FP16)):  # fmt: skip
        p = parameter(torch.randn(4, 64), weight)
        optimizer = ng.optim.AdamW([p], lr=1e-2, weight_decay=0.0, master=master)
        set_grad(p, torch.randn(4, 64), "fp32")
        optimizer.step()
        kept = optimizer.state[p].get("master")
        if weight == "bf16":
            kept.flatten()[::7] = kept.flatten()[::7].clamp(max=100) + 3  # type: ignore[union-attr]
        optimizer.param_groups[0]["lr"] = 0.0
        before = bits(p.data) + ([] if kept is None else bits(kept))
        for _ in range(3):
            set_grad(p, torch.randn(4, 64), "fp32")
            optimizer.step()
        after = bits(p.data) + ([] if kept is None else bits(kept))
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), weight


def test_only_the_values_that_move_are_split_anew() -> None:
    p = parameter(torch.randn(2, 128), "bf16")
    optimizer = ng.optim.AdamW([p], lr=1e-2, weight_decay=0.0, master=MASTERS["8-bit residual"])
    grad = torch.zeros(2, 128)
    grad[0] = 1
    for _ in range(5):
        set_grad(p, grad, "fp32")
        optimizer.step()
    master = optimizer.state[p]["master"]
    assert master[0].any() and not master[1].any()


# what is quantized, and when


@pytest.mark.parametrize("moments", [name for name in MOMENTS if name != "fp32"])
def test_the_step_uses_the_moments_before_they_are_cast(moments: str) -> None:
    """Second step: from the stored moments of the first in float32, and not from those that are stored after it."""
    m_spec, v_spec = MOMENTS[moments]
    p = nn.Parameter(torch.randn(2, 256))
    optimizer = ng.optim.AdamW([p], lr=0.1, exp_avg=m_spec, exp_avg_sq=v_spec, min_state_size=0)
    p.grad = torch.randn(2, 256)
    optimizer.step()
    stored = tuple(storage.decode(optimizer.state[p][name], p.shape).clone() for name in NAMES)
    before, grad = p.detach().clone(), torch.randn(2, 256)
    p.grad = grad
    optimizer.step()
    numbers = rules.Adam.at(2, 0.1, (0.9, 0.999), 1e-8, 0.01, True)
    expected, new = rules.adam(before, grad, stored, numbers)
    assert torch.equal(p, expected)
    # and it makes a difference: the step with what is stored now is another
    now = tuple(storage.decode(optimizer.state[p][name], p.shape).clone() for name in NAMES)
    assert not torch.equal(now[0], new[0]) and not torch.equal(now[1], new[1])
    denominator = now[1].sqrt() / numbers.sqrt_bias_correction2 + numbers.eps
    late = before * numbers.decay - numbers.step_size * (now[0] / denominator)
    assert (late - expected).abs().max() > 2e-5


@pytest.mark.parametrize("moments", [name for name in MOMENTS if name not in ("fp32", "bf16")])
def test_v_never_vanishes_under_m(moments: str) -> None:
    """Gradients a million times smaller than their neighbours: v of 1e-12 of the tile's, which no 8 bits hold."""
    m_spec, v_spec = MOMENTS[moments]
    grad = torch.ones(1, 256)
    grad[0, ::4] = 1e-6
    grad[0, 1::4] = 0

    def run(keep_nonzero: bool) -> tuple[Tensor, Tensor]:
        p = nn.Parameter(torch.zeros(1, 256))
        optimizer = ng.optim.AdamW(
            [p], lr=1e-3, weight_decay=0.0, exp_avg=m_spec, exp_avg_sq=v_spec, min_state_size=0,
            keep_nonzero=keep_nonzero,
        )  # fmt: skip
        for _ in range(20):
            p.grad = grad.clone()
            optimizer.step()
        return p.detach()[0], storage.decode(optimizer.state[p]["exp_avg_sq"], p.shape)[0]

    moved, v = run(keep_nonzero=True)
    assert (v[::4] > 0).all() and not v[1::4].any()
    assert not moved[1::4].any()
    # no step is longer than one of Adam's, but for the rounding of v: E4M3's half unit is 6 %, its root 3 %
    assert (moved[::4].abs() <= 20 * 1e-3 * 1.03).all()
    torch.testing.assert_close(moved[2::4], torch.full((64,), -0.02), rtol=1e-2, atol=0)
    if v_spec.format in (UINT8, E4M3FN) and v_spec.companding is not ng.RANGE_EXPANSION:
        assert (run(keep_nonzero=False)[1][::4] == 0).all()  # what the rule is there for


def test_an_optimizer_with_one_moment_keeps_it_as_exp_avg() -> None:
    m_spec = MOMENTS["int8 square root"][0]
    for kind, name in ((ng.optim.Lion, "exp_avg"), (ng.optim.Muon, "momentum_buffer")):
        p = nn.Parameter(torch.randn(2, 256))
        optimizer = kind([p], exp_avg=m_spec, min_state_size=0)
        p.grad = torch.randn(2, 256)
        optimizer.step()
        assert optimizer.state[p][name].spec == m_spec
        assert set(optimizer.state[p]) == {"step", name}


@pytest.mark.parametrize("moments", [name for name in MOMENTS if name not in ("fp32", "bf16")])
@pytest.mark.parametrize("kind", [ng.optim.SGD, ng.optim.Lion, ng.optim.Muon], ids=lambda kind: kind.__name__)
def test_narrow_momentum_follows_float32_momentum(kind: Any, moments: str) -> None:
    """20 steps with noisy gradients: the walk in narrow state is nearer to that in float32 than half its length."""
    options = {"momentum": 0.9} if kind is ng.optim.SGD else {}

    def run(spec: ng.CastSpec) -> Tensor:
        p = nn.Parameter(torch.zeros(8, 256))
        optimizer = kind([p], lr=1e-2, weight_decay=0.0, exp_avg=spec, min_state_size=0, **options)
        generator = torch.Generator().manual_seed(5)
        direction = torch.randn(8, 256, generator=generator)
        for _ in range(20):
            p.grad = direction + torch.randn(8, 256, generator=generator)
            optimizer.step()
        return p.detach()

    expected, found = run(ng.CastSpec(FP32)), run(MOMENTS[moments][0])
    error = ((found - expected).norm() / expected.norm()).item()
    assert error <= (0.5 if moments.startswith("4 bits") else 0.1)


# masters and 16-bit weights: cases 35 and 37


@pytest.mark.parametrize(
    ("options", "least", "most", "warns"),
    [
        ({"master": ng.CastSpec(FP32)}, 0.896, 0.904, False),
        ({"master": MASTERS["8-bit residual"]}, 0.896, 0.904, False),
        ({"master": MASTERS["16-bit remainder"]}, 0.896, 0.904, False),
        ({"master": SCALED_FP16}, 0.896, 0.904, False),
        ({"stochastic_rounding": True}, 0.898, 0.902, False),
        ({}, 1.0, 1.0, True),
    ],
    ids=["fp32 master", "residual", "remainder", "fp16 master", "stochastic rounding", "neither"],
)
def test_updates_below_half_a_unit_add_up_or_are_warned_of(
    options: dict[str, Any], least: float, most: float, warns: bool
) -> None:
    """Case 35: ones in bfloat16, gradient 1, SGD at lr 1e-3, 100 steps."""
    p = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = ng.optim.SGD([("weight", p)], lr=1e-3, **options)
    assert [("'weight'" in str(w.message) and "master" in str(w.message)) for w in caught] == [True] * warns
    assert all(w.filename == __file__ for w in caught)  # it points at the line that built the optimizer
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert least <= p.float().mean() <= most
    assert (p != 1).any() or warns


def test_float32_and_scaled_float16_weights_are_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ng.optim.AdamW([parameter(torch.ones(4), "fp32"), parameter(torch.ones(4), "scaled fp16")])
        ng.optim.AdamW([parameter(torch.ones(4), "E4M3")], master=SCALED_FP16)
        ng.optim.AdamW([parameter(torch.ones(4), "bf16")], overrides={"*": {"stochastic_rounding": True}})
    with pytest.warns(UserWarning, match="E4M3FN.* parameters without a master"):
        ng.optim.AdamW([parameter(torch.ones(4), "E4M3")])


@pytest.mark.parametrize("grad", [0.0, 1e-4, -1e-4, 6e-8])
def test_float16_weights_are_stepped_in_float32(grad: float) -> None:
    """Case 37: eps 1e-8 and the square of 1e-4 are 0 in float16."""
    p = nn.Parameter(torch.ones(8, dtype=torch.float16))
    optimizer = ng.optim.AdamW([p], lr=1e-3, weight_decay=0.0)
    p.grad = torch.full_like(p, grad)
    optimizer.step()
    assert p.dtype is torch.float16 and p.isfinite().all()
    step = 0.0 if grad == 0 else 1e-3 * p.grad.float().abs().max() / (p.grad.float().abs().max() + 1e-8)
    expected = torch.tensor(1.0 - float(step) * (1 if grad > 0 else -1)).half()
    assert (p == expected).all()
    assert optimizer.state[p]["exp_avg"].dtype is torch.float32


def test_moments_of_bfloat16_weights_are_float32() -> None:
    p = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = ng.optim.AdamW([p], stochastic_rounding=True)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.state[p]["exp_avg"].dtype is optimizer.state[p]["exp_avg_sq"].dtype is torch.float32


# values of parameters


@pytest.mark.parametrize("master", MASTERS)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_values_that_are_set_are_read_back(weight: str, master: str) -> None:
    p = parameter(torch.randn(4, 32), weight)
    optimizer = ng.optim.AdamW([p], master=MASTERS[master])
    values = torch.randn(4, 32)
    optimizer.set_values(p, values)
    found = optimizer.full_values(p)
    of_master = {"fp32": 0.0, "bf16": 2.0**-8, "scaled fp16": 2.0**-11, "8-bit residual": 2.0**-16,
                 "16-bit remainder": 0.0}  # fmt: skip
    own = {"fp32": 0.0, "bf16": 2.0**-8, "scaled fp16": 2.0**-11, "E4M3": 2.0**-4}[weight]
    residual = master in ("8-bit residual", "16-bit remainder")
    has = weight != "fp32" and master != "none" and (not residual or weight == "bf16")
    unit = of_master[master] if has else own
    least = 2.0**-9 * values.abs().max().item() / 448 if weight == "E4M3" and not has else 1e-7
    assert ((found - values).abs() <= values.abs() * unit * 1.01 + least).all()
    assert found.data_ptr() != p.data_ptr()  # a copy


def test_a_parameter_that_others_wrote_is_taken_as_it_is() -> None:
    """Its residual is dropped, and a copy made anew: initialisation after the optimizer was built (case 75)."""
    for weight, master in (("bf16", "8-bit residual"), ("bf16", "16-bit remainder"), ("bf16", "fp32"),
                           ("E4M3", "scaled fp16")):  # fmt: skip
        p = parameter(torch.randn(4, 32), weight)
        optimizer = ng.optim.AdamW([p], lr=1e-2, weight_decay=0.0, master=MASTERS[master])
        set_grad(p, torch.randn(4, 32), "fp32")
        optimizer.step()
        with torch.no_grad():
            p.copy_(torch.full((4, 32), 3.0))
        assert torch.equal(optimizer.full_values(p), torch.full((4, 32), 3.0))
        optimizer.param_groups[0]["lr"] = 0.0
        set_grad(p, torch.ones(4, 32), "fp32")
        optimizer.step()
        assert torch.equal(p.detach().dequantize().float(), torch.full((4, 32), 3.0))


def test_the_weight_is_the_nearest_to_its_master() -> None:
    p = parameter(torch.randn(4, 64), "bf16")
    optimizer = ng.optim.AdamW([p], lr=1e-3, master=ng.CastSpec(FP32))
    for _ in range(10):
        set_grad(p, torch.randn(4, 64), "fp32")
        optimizer.step()
    assert torch.equal(p, optimizer.state[p]["master"].to(torch.bfloat16))


def test_8_bit_residuals_follow_float32_weights() -> None:
    """100 steps of AdamW: within an 8th of a bfloat16 unit of the walk in float32; bfloat16 alone is not."""

    def run(weight: str, **options: Any) -> Tensor:
        p = parameter(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16().float(), weight)
        optimizer = ng.optim.AdamW([p], lr=1e-3, **options)
        generator = torch.Generator().manual_seed(1)
        for _ in range(100):
            set_grad(p, torch.randn(8, 64, generator=generator), "fp32")
            optimizer.step()
        return optimizer.full_values(p)

    expected = run("fp32")
    unit = expected.abs() * 2.0**-8 + 2.0**-12
    assert ((run("bf16", master=MASTERS["8-bit residual"]) - expected).abs() <= unit / 8).all()
    assert torch.equal(run("bf16", master=MASTERS["16-bit remainder"]), expected)
    assert not ((run("bf16", master=ng.CastSpec(BF16)) - expected).abs() <= unit).all()


def test_state_in_tiles_runs_along_the_rows_of_a_matrix() -> None:
    """A convolution's weight is kept as [out, in * height * width], a scalar as one value."""
    spec = ng.CastSpec(INT8, ROW_256, companding=ng.SQUARE_ROOT)
    shapes = {(6, 8, 3, 3): (6, 72), (4, 300): (4, 300), (300,): (300,), (): (1,), (2, 3, 4): (2, 12)}
    for shape, stored in shapes.items():
        p = nn.Parameter(torch.randn(shape))
        optimizer = ng.optim.AdamW([p], exp_avg=spec, min_state_size=0)
        p.grad = torch.randn(shape)
        optimizer.step()
        moment = optimizer.state[p]["exp_avg"]
        assert moment.shape == stored
        reference = nn.Parameter(torch.zeros(stored))
        twin = ng.optim.AdamW([reference], exp_avg=spec, min_state_size=0)
        reference.grad = p.grad.reshape(stored)
        twin.step()
        assert_same_bits(moment, twin.state[reference]["exp_avg"])


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("shape", [(7, 300), (300,), (), (4, 3, 5, 5), (0, 16)], ids=str)
def test_fresh_moments_are_what_a_cast_of_zeros_gives(moments: str, shape: tuple[int, ...]) -> None:
    for spec in MOMENTS[moments]:
        fresh = storage.zeros(torch.Size(shape), spec, torch.float32, torch.device("cpu"))
        assert_same_bits(fresh, storage.encode(torch.zeros(shape), spec))
