"""Our optimizers with float32 state are torch's: results, state's names, groups, closures, later groups."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng

PAIRS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "AdamW": (ng.optim.AdamW, torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "AdamW, other betas": (ng.optim.AdamW, torch.optim.AdamW, {"betas": (0.5, 0.8), "eps": 1e-3}),
    "Adam": (ng.optim.Adam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "SGD": (ng.optim.SGD, torch.optim.SGD, {"lr": 1e-2}),
    "SGD, momentum": (ng.optim.SGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    "SGD, Nesterov": (ng.optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Muon": (ng.optim.Muon, torch.optim.Muon, {"lr": 1e-2}),
    "Muon, adjusted": (ng.optim.Muon, torch.optim.Muon, {"adjust_lr_fn": "match_rms_adamw", "nesterov": False}),
}
STEPS = 5


def matrices(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(n, 6, generator=generator, dtype=dtype)) for n in (4, 9)]


def run(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int = STEPS, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        optimizer.step()


def assert_near(ours: list[nn.Parameter], theirs: list[nn.Parameter], kind: str) -> None:
    for a, b in zip(ours, theirs, strict=True):
        limit = 1e-12 if a.dtype is torch.float64 else 2e-6
        if kind.startswith("Muon") and a.dtype is torch.float32:
            limit = STEPS * 1e-2 * 2.0**-6  # a unit in bfloat16's last place, in which the iteration runs
        assert (a - b).abs().max() <= limit


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("kind", "maximize"),
    # torch.optim.Muon does not maximize
    [(kind, maximize) for kind in PAIRS for maximize in (False, True) if not (maximize and "Muon" in kind)],
)
def test_steps_are_torchs(kind: str, maximize: bool, dtype: torch.dtype) -> None:
    ours, theirs, options = PAIRS[kind]
    options = {**options, "maximize": True} if maximize else options
    a, b = matrices(dtype), matrices(dtype)
    before = [p.detach().clone() for p in a]
    first, second = ours(a, **options), theirs(b, **options)
    run(first, a)
    run(second, b)
    assert_near(a, b, kind)
    assert not any(torch.equal(p, old) for p, old in zip(a, before, strict=True))
    # torch keeps the step as a tensor where it keeps one
    assert {*second.state[b[0]], "step"} == {*first.state[a[0]], "step"}
    for name, value in first.state[a[0]].items():
        if name != "step":
            torch.testing.assert_close(value, second.state[b[0]][name], rtol=1e-6, atol=1e-7)
            assert value.dtype is dtype


@pytest.mark.parametrize("kind", PAIRS)
def test_arguments_and_defaults_are_torchs(kind: str) -> None:
    """What torch's groups hold, ours do, but for the flags of its implementations."""
    ours, theirs, _ = PAIRS[kind]
    flags = {"foreach", "fused", "capturable", "differentiable", "amsgrad"}
    a, b = ours(matrices(torch.float32)).param_groups[0], theirs(matrices(torch.float32)).param_groups[0]
    assert {k: v for k, v in a.items() if k != "params"} == {k: v for k, v in b.items() if k not in {"params", *flags}}


@pytest.mark.parametrize("kind", PAIRS)
def test_the_state_of_torch_is_taken_up(kind: str) -> None:
    """3 steps of torch's, then 2 of ours: as 5 of torch's, bias corrections included."""
    ours, theirs, options = PAIRS[kind]
    a, b = matrices(torch.float64), matrices(torch.float64)
    before = theirs(a, **options)
    run(before, a, 3)
    after = ours(a, **options)
    after.load_state_dict(before.state_dict())
    run(after, a, 2, seed=2)
    through = theirs(b, **options)
    run(through, b, 3)
    run(through, b, 2, seed=2)
    assert_near(a, b, kind)


@pytest.mark.parametrize("kind", PAIRS)
def test_torch_takes_up_our_state(kind: str) -> None:
    ours, theirs, options = PAIRS[kind]
    a, b = matrices(torch.float32), matrices(torch.float32)
    before, after = ours(a, **options), theirs(a, **options)
    run(before, a, 3)
    state = before.state_dict()
    for entry in state["state"].values():
        entry["step"] = torch.tensor(float(entry["step"]))
    after.load_state_dict(state)
    for group in after.param_groups:
        for name, value in after.defaults.items():
            group.setdefault(name, value)
    run(after, a, 2, seed=2)
    through = theirs(b, **options)
    run(through, b, 3)
    run(through, b, 2, seed=2)
    assert_near(a, b, kind)


def test_momentum_that_is_switched_on_later_begins_with_the_gradient() -> None:
    """As in torch: the first gradient is not dampened."""
    a, b = matrices(torch.float64), matrices(torch.float64)
    options = {"lr": 0.1, "momentum": 0.0, "dampening": 0.5}
    first, second = ng.optim.SGD(a, **options), torch.optim.SGD(b, **options)
    for optimizer, parameters in ((first, a), (second, b)):
        for momentum in (0.0, 0.9, 0.0, 0.9):
            optimizer.param_groups[0]["momentum"] = momentum
            run(optimizer, parameters, 2)
    assert_near(a, b, "SGD")


def test_lion_with_weight_decay_in_numbers() -> None:
    """p = p - lr * (sign(0.9 m + 0.1 g) + wd * p); the moment follows with 0.99."""
    p = nn.Parameter(torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64))
    optimizer = ng.optim.Lion([p], lr=0.1, weight_decay=0.2)
    p.grad = torch.tensor([3.0, 0.001, 0.0], dtype=torch.float64)
    optimizer.step()
    expected = torch.tensor([0.98 - 0.1, -0.98 - 0.1, 0.49], dtype=torch.float64)
    torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-15)
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], p.grad * 0.01, rtol=1e-12, atol=0)


def test_groups_keep_their_own_numbers() -> None:
    a, b = matrices(torch.float64), matrices(torch.float64)
    groups = [{"lr": 0.1, "weight_decay": 0.0, "betas": (0.5, 0.9)}, {"lr": 1e-3, "eps": 1e-4}]
    first = ng.optim.AdamW([{"params": [p], **g} for p, g in zip(a, groups, strict=True)])
    second = torch.optim.AdamW([{"params": [p], **g} for p, g in zip(b, groups, strict=True)])
    run(first, a)
    run(second, b)
    assert_near(a, b, "AdamW")


def test_a_group_that_is_added_later_begins_with_step_1() -> None:
    a, b = matrices(torch.float64), matrices(torch.float64)
    for kind, parameters in ((ng.optim.AdamW, a), (torch.optim.AdamW, b)):
        optimizer = kind(parameters[:1], lr=0.1)
        run(optimizer, parameters[:1], 3)
        optimizer.add_param_group({"params": parameters[1], "lr": 1e-2})
        run(optimizer, parameters, 2)
        if kind is ng.optim.AdamW:
            assert [optimizer.state[p]["step"] for p in parameters] == [5, 2]
            assert optimizer.param_groups[1]["betas"] == (0.9, 0.999)
    assert_near(a, b, "AdamW")


def test_parameters_without_a_gradient_are_left_alone() -> None:
    parameters = matrices(torch.float32)
    optimizer = ng.optim.AdamW(parameters)
    before = parameters[1].detach().clone()
    run(optimizer, parameters[:1])
    assert torch.equal(parameters[1], before)
    assert parameters[1] not in optimizer.state


def test_a_closure_is_called_with_gradients_enabled() -> None:
    p = nn.Parameter(torch.tensor([2.0]))
    optimizer = ng.optim.SGD([p], lr=0.25)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 4.0
    assert p.item() == 1.0  # 2 - 0.25 * 4


def test_step_hooks_are_called() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = ng.optim.AdamW([p])
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *args: called.append("before"))
    optimizer.register_step_post_hook(lambda *args: called.append("after"))
    run(optimizer, [p], 2)
    assert called == ["before", "after"] * 2


@pytest.mark.parametrize("flag", ["foreach", "fused"])
def test_flags_of_torchs_implementations_change_nothing(flag: str) -> None:
    """Groups that were torch's have them: they choose between implementations of the same step."""
    a, b = matrices(torch.float32), matrices(torch.float32)
    for parameters, flags in ((a, {}), (b, {flag: True})):
        run(ng.optim.AdamW([{"params": parameters, **flags}]), parameters)
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_importing_the_optimizers_does_not_load_numba() -> None:
    code = "import sys, narrowgauge as ng; ng.optim.AdamW; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("build", [ng.optim.Muon, ng.optim.Lion, ng.optim.SGD], ids=lambda kind: kind.__name__)
def test_every_optimizer_is_one_of_torchs_optimizers(build: Callable[..., torch.optim.Optimizer]) -> None:
    optimizer = build([nn.Parameter(torch.ones(2, 2))], lr=0.5)
    assert isinstance(optimizer, torch.optim.Optimizer) and isinstance(optimizer, ng.optim.LowPrecisionOptimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert "lr: 0.5" in repr(optimizer)
