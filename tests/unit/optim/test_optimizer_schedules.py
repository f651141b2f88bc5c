"""Learning rates that change, compiled steps, and random bits that repeat."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from state_formats import MASTERS, MOMENTS
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import narrowgauge as ng

M, V = MOMENTS["int8 square root"]
KINDS: dict[str, Callable[..., ng.optim.LowPrecisionOptimizer]] = {
    "AdamW": lambda p, **o: ng.optim.AdamW(p, weight_decay=0.1, exp_avg=M, exp_avg_sq=V, min_state_size=0, **o),
    "SGD": lambda p, **o: ng.optim.SGD(p, momentum=0.9, exp_avg=M, min_state_size=0, **o),
    "Lion": lambda p, **o: ng.optim.Lion(p, weight_decay=0.1, exp_avg=M, min_state_size=0, **o),
    "Muon": lambda p, **o: ng.optim.Muon(p, exp_avg=M, min_state_size=0, **o),
}


def weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(8, n, generator=generator).to(dtype)) for n in (32, 300)]


def set_grads(parameters: list[nn.Parameter], seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


# learning rates: case 40


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("lr", [1e-3, torch.tensor(1e-3)], ids=["float", "tensor"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_schedule_reaches_the_step(kind: str, lr: float | Tensor, compiled: bool) -> None:
    """lr 1e-3 for 3 steps, then 0: weights stop at once, and nothing is compiled anew."""
    parameters = weights()
    optimizer = KINDS[kind](parameters, lr=copy.deepcopy(lr))
    scheduler = LambdaLR(optimizer, lambda epoch: float(epoch < 3))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
    moved, frames = [], []
    for seed in range(6):
        set_grads(parameters, seed)
        before = [p.detach().clone() for p in parameters]
        step()
        scheduler.step()
        moved.append([not torch.equal(p, old) for p, old in zip(parameters, before, strict=True)])
        assert isinstance(optimizer.param_groups[0]["lr"], type(lr))
        frames.append(torch._dynamo.utils.counters["frames"]["total"])
    assert moved == [[True, True]] * 3 + [[False, False]] * 3
    assert optimizer.state[parameters[0]]["step"] == 6
    assert frames == [frames[0]] * 6  # what the first step compiled, torch's wrapper of steps, is all
    assert (frames[0] > 0) == compiled


def test_the_compiled_step_is_the_eager_one() -> None:
    a, b = weights(), weights()
    first, second = KINDS["AdamW"](a, lr=1e-2), KINDS["AdamW"](b, lr=1e-2)
    torch._dynamo.reset()
    step = torch.compile(second.step, backend="eager")
    for seed in range(3):
        set_grads(a, seed)
        set_grads(b, seed)
        first.step()
        step()
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_a_scheduler_of_momentum_reaches_the_step() -> None:
    """OneCycleLR changes lr and betas: as torch's optimizer under the same scheduler."""
    a, b = [nn.Parameter(torch.ones(4, 4, dtype=torch.float64))], [nn.Parameter(torch.ones(4, 4, dtype=torch.float64))]
    first, second = ng.optim.AdamW(a, lr=0.1), torch.optim.AdamW(b, lr=0.1)
    schedulers = [OneCycleLR(o, max_lr=0.1, total_steps=10) for o in (first, second)]
    for seed in range(8):
        set_grads(a, seed)
        set_grads(b, seed)
        for optimizer, scheduler in zip((first, second), schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    torch.testing.assert_close(a[0], b[0], rtol=1e-12, atol=0)
    assert not torch.equal(a[0], torch.ones_like(a[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_lr_0_moves_nothing_and_keeps_the_moments_going(kind: str) -> None:
    parameters = weights()
    before = [p.detach().clone() for p in parameters]
    optimizer = KINDS[kind](parameters, lr=0.0)
    set_grads(parameters)
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))
    name = next(iter(optimizer.moments))
    assert optimizer.state[parameters[0]][name].dequantize().any()


# random bits


def walk(seed: int, steps: int = 4, pieces: Any = None, **options: Any) -> list[Tensor]:
    """bfloat16 weights after some steps with stochastic rounding. pieces: takes a step with (optimizer, parameters)."""
    parameters = weights(torch.bfloat16)
    optimizer = ng.optim.AdamW(
        parameters, lr=1e-3, stochastic_rounding=True, generator=torch.Generator().manual_seed(seed), **options
    )
    for step in range(steps):
        set_grads(parameters, step)
        if pieces is not None:
            pieces(optimizer, parameters)
        optimizer.step()
    return [p.detach().clone() for p in parameters]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_seed_makes_a_run_repeat_and_another_does_not() -> None:
    assert same(walk(1), walk(1))
    assert not same(walk(1), walk(2))
    torch.manual_seed(9)  # the optimizer's own generator leaves torch's alone
    state = torch.get_rng_state()
    walk(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_a_generator_torchs_default_one_is_drawn_from() -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(4)
        parameters = weights(torch.bfloat16)
        optimizer = ng.optim.AdamW(parameters, stochastic_rounding=True)
        set_grads(parameters)
        optimizer.step()
        return [p.detach().clone() for p in parameters]

    assert same(run(), run())


def test_a_step_in_pieces_is_the_step_in_bits() -> None:
    """Parameters one by one, in any order, and then `step` for the rest: what gradient release does."""

    def one_by_one(optimizer: Any, parameters: list[nn.Parameter]) -> None:
        for p in reversed(parameters):
            optimizer.step_parameters([p])
            p.grad = None

    def the_last_first(optimizer: Any, parameters: list[nn.Parameter]) -> None:
        optimizer.step_parameters(parameters[1:])
        parameters[1].grad = None

    whole = walk(1)
    assert same(walk(1, pieces=one_by_one), whole)
    assert same(walk(1, pieces=the_last_first), whole)
    assert same(walk(1, pieces=one_by_one, exp_avg=M, min_state_size=0), walk(1, exp_avg=M, min_state_size=0))


def test_every_step_and_parameter_has_bits_of_its_own() -> None:
    """Equal parameters with equal gradients part ways; each still moves by what float32 would on average."""
    a, b = (nn.Parameter(torch.ones(4096, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = ng.optim.SGD([{"params": [a]}, {"params": [b]}], lr=1e-3, stochastic_rounding=True)
    differences = []
    for _ in range(10):
        before = a.detach().clone()
        a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
        optimizer.step()
        differences.append(a.detach() != before)
    assert not torch.equal(a, b)
    assert not torch.equal(differences[0], differences[1])
    for p in (a, b):  # 10 steps of 1e-3; below 1 a unit is 2^-8, so that each mean has a deviation of 1e-4
        assert abs(p.float().mean().item() - 0.99) < 6e-4


def test_a_master_takes_no_random_bits() -> None:
    parameters = weights(torch.bfloat16)
    optimizer = ng.optim.AdamW(parameters, stochastic_rounding=True, master=MASTERS["8-bit residual"])
    set_grads(parameters)
    state = torch.get_rng_state()
    optimizer.step()
    assert torch.equal(torch.get_rng_state(), state)
