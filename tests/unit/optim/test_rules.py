"""The update rules as pure functions: torch.optim's results in float64 to 1e-12, in float32 to its own rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from narrowgauge.optim import rules
from narrowgauge.optim.muon import ADJUSTMENTS, COEFFICIENTS
from narrowgauge.optim.rules import Adam, Lion, Muon, Rule, Sgd

STEPS = 7
SHAPE = (12, 5)

ADAM = {
    "default": {},
    "large betas": {"betas": (0.95, 0.9999), "weight_decay": 0.3},
    "no averages": {"betas": (0.0, 0.0), "eps": 1e-3},
    "no decay": {"weight_decay": 0.0, "lr": 0.1},
}
SGD = {
    "plain": {},
    "decay": {"weight_decay": 0.2},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
}
MUON = {
    "default": {},
    "plain momentum": {"nesterov": False, "weight_decay": 0.0},
    "adjusted to AdamW": {"adjust_lr_fn": "match_rms_adamw"},
    "other iteration": {"ns_coefficients": (3.0, -4.0, 2.0), "ns_steps": 3, "eps": 1e-3, "momentum": 0.5},
}


def gradients(dtype: torch.dtype, shape: tuple[int, ...] = SHAPE) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(STEPS)]


def start(dtype: torch.dtype, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def of_torch(kind: Any, options: dict[str, Any], dtype: torch.dtype, shape: tuple[int, ...] = SHAPE) -> list[Tensor]:
    """The parameter after each step of torch's optimizer, one tensor at a time."""
    p = nn.Parameter(start(dtype, shape))
    optimizer = kind([p], **options)
    after = []
    for grad in gradients(dtype, shape):
        p.grad = grad
        optimizer.step()
        after.append(p.detach().clone())
    return after


def of_rule(
    rule: Rule, number: Callable[[int], Any], moments: int, dtype: torch.dtype, shape: tuple[int, ...] = SHAPE
) -> list[Tensor]:
    """The parameter after each step of ours. number: the numbers of a step, from 1."""
    p = start(dtype, shape)
    state = tuple(torch.zeros(shape, dtype=dtype) for _ in range(moments))
    after = []
    for step, grad in enumerate(gradients(dtype, shape), 1):
        before = (p.clone(), *(m.clone() for m in state))
        new, new_state = rule.update(p, grad, state, number(step))
        for old, kept in zip((p, *state), before, strict=True):  # pure: nothing is changed in place
            assert torch.equal(old, kept)
        p, state = new, new_state
        assert p.dtype is dtype and all(m.dtype is dtype for m in state)
        after.append(p)
    return after


def assert_near(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """float64 to 1e-12, float32 to two units in the last place of values near 4 for each step."""
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True), 1):
        limit = 1e-12 if a.dtype is torch.float64 else step * 2 * 2.0**-21
        assert (a - b).abs().max() <= limit
        assert not torch.equal(a, start(a.dtype, tuple(a.shape)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("options", ADAM.values(), ids=ADAM)
def test_adam_is_torchs(options: dict[str, Any], decoupled: bool, dtype: torch.dtype) -> None:
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    given = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, **options}

    def number(step: int) -> Adam:
        return Adam.at(step, given["lr"], given["betas"], given["eps"], given["weight_decay"], decoupled)

    assert_near(of_rule(Rule.ADAM, number, 2, dtype), of_torch(kind, {**given, "foreach": False}, dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("options", SGD.values(), ids=SGD)
def test_sgd_is_torchs(options: dict[str, Any], dtype: torch.dtype) -> None:
    momentum = options.get("momentum", 0.0)

    def number(step: int) -> Sgd:
        return Sgd(
            lr=1e-2,
            momentum=momentum,
            one_minus_dampening=1 - options.get("dampening", 0.0),
            nesterov=options.get("nesterov", False),
            l2=options.get("weight_decay", 0.0),
            first=step == 1,
        )

    theirs = of_torch(torch.optim.SGD, {"lr": 1e-2, **options, "foreach": False}, dtype)
    assert_near(of_rule(Rule.SGD, number, 1 if momentum else 0, dtype), theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (8, 8)], ids=str)
@pytest.mark.parametrize("options", MUON.values(), ids=MUON)
def test_muon_is_torchs(options: dict[str, Any], shape: tuple[int, int], dtype: torch.dtype) -> None:
    given = {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "ns_coefficients": COEFFICIENTS,
             "eps": 1e-7, "ns_steps": 5, "adjust_lr_fn": None, **options}  # fmt: skip
    factor = ADJUSTMENTS[given["adjust_lr_fn"] or "original"](*shape)
    number = Muon(
        lr=given["lr"] * factor,
        momentum=given["momentum"],
        one_minus_momentum=1 - given["momentum"],
        nesterov=given["nesterov"],
        decay=1 - given["lr"] * given["weight_decay"],
        coefficients=given["ns_coefficients"],
        ns_steps=given["ns_steps"],
        eps=given["eps"],
    )
    theirs = of_torch(torch.optim.Muon, given, dtype, shape)
    ours = of_rule(Rule.MUON, lambda step: number, 1, dtype, shape)
    if dtype is torch.float64:
        assert_near(ours, theirs)
    else:  # a unit in float32's last place may be one in bfloat16's, where the iteration runs
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True), 1):
            assert (a - b).abs().max() <= step * given["lr"] * factor * 2.0**-6


def lion_of_the_paper(p: np.ndarray, grads: list[np.ndarray], lr: float, b1: float, b2: float, wd: float) -> np.ndarray:
    """Algorithm 2 of arXiv:2302.06675, line by line."""
    m = np.zeros_like(p)
    for g in grads:
        c = b1 * m + (1 - b1) * g
        p = p - lr * (np.sign(c) + wd * p)
        m = b2 * m + (1 - b2) * g
    return p


@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.0, 0.0), (0.95, 0.98)], ids=str)
def test_lion_is_that_of_the_paper(betas: tuple[float, float]) -> None:
    ours = of_rule(Rule.LION, lambda step: Lion.at(1e-2, betas, 0.3), 1, torch.float64)[-1]
    grads = [g.numpy() for g in gradients(torch.float64)]
    expected = lion_of_the_paper(start(torch.float64).numpy(), grads, 1e-2, *betas, 0.3)
    assert np.abs(ours.numpy() - expected).max() <= 1e-12


def test_one_step_of_adam_in_numbers() -> None:
    """m = 0.1 g, v = 0.001 g^2; the first step is lr * g / (|g| + eps), after the decay."""
    h = Adam.at(1, 0.01, (0.9, 0.999), 1e-8, 0.1, True)
    p, (m, v) = rules.adam(torch.tensor([1.0, -2.0, 0.5]), torch.tensor([4.0, -1e-3, 0.0]), (torch.zeros(3),) * 2, h)
    torch.testing.assert_close(m, torch.tensor([0.4, -1e-4, 0.0]), rtol=2e-7, atol=0)
    torch.testing.assert_close(v, torch.tensor([0.016, 1e-9, 0.0]), rtol=4e-7, atol=0)
    torch.testing.assert_close(p, torch.tensor([0.999 - 0.01, -1.998 + 0.01, 0.4995]), rtol=0, atol=2e-7)


def test_the_numbers_of_a_step_are_computed_in_double_precision() -> None:
    """1 - 0.999^1 in float32 is off by 5e-5 of itself."""
    h = Adam.at(1, 1e-3, (0.9, 0.999), 1e-8, 0.0, True)
    assert h.sqrt_bias_correction2 == math.sqrt(1 - 0.999)
    assert h.step_size == 1e-3 / (1 - 0.9)
    late = Adam.at(10**6, 1e-3, (0.9, 0.999), 1e-8, 0.0, True)
    assert (late.sqrt_bias_correction2, late.step_size) == (1.0, 1e-3)


@pytest.mark.parametrize(
    ("rule", "number", "moments"),
    [
        (Rule.ADAM, Adam.at(3, 1e-3, (0.9, 0.999), 1e-8, 0.0, True), 2),
        (Rule.SGD, Sgd(1e-3, 0.9, 1.0, True, 0.0, False), 1),
        (Rule.LION, Lion.at(1e-3, (0.9, 0.99), 0.0), 1),
        (Rule.MUON, Muon(1e-3, 0.95, 0.05, True, 1.0, COEFFICIENTS, 5, 1e-7), 1),
    ],
)
def test_a_gradient_that_was_always_zero_moves_nothing(rule: Rule, number: Any, moments: int) -> None:
    p = torch.randn(16, 8)
    new, state = rule.update(p, torch.zeros(16, 8), (torch.zeros(16, 8),) * moments, number)
    assert torch.equal(new, p)
    assert all(not m.any() for m in state)
