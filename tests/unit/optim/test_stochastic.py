"""bfloat16 parameters under stochastic rounding: the mean follows float32, and nothing else differs."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import narrowgauge as ng
from narrowgauge.numerics import kernels, philox
from narrowgauge.optim.guard import StepGuard
from narrowgauge.optim.stochastic import NO_OPTIMIZER, StochasticRounding

BF16, FP16, FP32 = ng.formats.BF16, ng.formats.FP16, ng.formats.FP32
FORMS: dict[str, dict[str, Any]] = {
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


class Weights(nn.Module):
    """4096 ones whose gradient is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))

    def forward(self) -> Tensor:
        return self.weight.float().sum()


def rounded(parameters: list[Tensor], build: Callable[..., Optimizer] = SGD, **options: Any) -> Optimizer:
    optimizer = build(parameters, **{"lr": 1e-3, **options})
    StochasticRounding(optimizer).attach()
    return optimizer


def step(optimizer: Optimizer, grads: list[Tensor]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p, grad in zip(parameters, grads, strict=True):
        p.grad = grad.to(p.dtype)
    optimizer.step()


def hundred_steps(recipe: str | ng.Recipe, **options: Any) -> Tensor:
    model = Weights()
    model, optimizer = ng.prepare(model, SGD(model.parameters(), lr=1e-3, **options), recipe)
    for _ in range(100):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach()


# case 35: a step of 1e-3 is below half an ulp of bfloat16 at 1


@pytest.mark.parametrize("form", FORMS)
def test_stochastic_rounding_keeps_small_updates(form: str) -> None:
    weight = hundred_steps("bf16_pure", **FORMS[form])
    assert weight.dtype is torch.bfloat16
    # each value is a walk of steps of 2^-8; its standard deviation is 0.019, that of the mean of 4096 is 0.0003
    assert abs(weight.float().mean().item() - 0.9) <= 0.002
    assert 0.014 < weight.float().std().item() < 0.025


def test_float32_masters_keep_small_updates() -> None:
    with pytest.warns(UserWarning, match="1 trainable parameters were bfloat16"):
        weight = hundred_steps("bf16")
    assert weight.dtype is torch.float32
    assert (weight - 0.9).abs().max().item() <= 0.004


def test_nearest_rounding_loses_them_and_prepare_warns() -> None:
    recipe = ng.Recipe(name="mine", compute=BF16, param=ng.CastSpec(BF16))
    with pytest.warns(UserWarning, match="without a master copy: updates below half a unit .* are lost"):
        weight = hundred_steps(recipe)
    assert torch.equal(weight, torch.ones_like(weight))


def test_without_an_optimizer_the_report_says_that_nothing_rounds() -> None:
    model = Weights()
    ng.prepare(model, None, "bf16_pure")
    assert model.weight.dtype is torch.bfloat16 and NO_OPTIMIZER in str(ng.report(model))
    ng.prepare(model, SGD(model.parameters(), lr=1.0), "bf16_pure")
    assert NO_OPTIMIZER not in str(ng.report(model))


# against torch in float32


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [AdamW, Adam])
def test_the_moments_are_those_of_float32_and_the_parameters_scatter_about_its_path(form: str, kind: Any) -> None:
    count, steps, ulp = 4096, 20, 2.0**-8  # of values in [0.5, 1)
    start = torch.empty(count).uniform_(0.6, 0.9).bfloat16()
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.float())
    options = {"lr": 1e-3, "weight_decay": 0.0, **FORMS[form]}
    optimizer, reference = rounded([ours], kind, **options), kind([theirs], **options)
    variance = torch.zeros(count)
    for _ in range(steps):
        grad = torch.randn(count).bfloat16()
        before = theirs.detach().clone()
        step(optimizer, [grad])
        step(reference, [grad])
        share = (theirs.detach() - before).abs() / ulp  # ours stood on a bfloat16 value: the share of one gap
        assert share.max() < 1
        variance += share * (1 - share) * ulp**2
    for name in ("exp_avg", "exp_avg_sq"):
        moment = optimizer.state[ours][name]
        assert moment.dtype is torch.float32 and torch.equal(moment, reference.state[theirs][name])
    error = ours.detach().float() - theirs.detach()
    assert abs(error.mean().item()) < 4 * math.sqrt(variance.sum().item()) / count
    # the mean of the squares of `count` errors, each near normal with kurtosis 3
    assert abs((error.square().sum() / variance.sum()).item() - 1) < 4 * math.sqrt(2 / count)


def test_weight_decay_and_momentum_are_taken_in_float32() -> None:
    weight = nn.Parameter(torch.full((4096,), 0.75, dtype=torch.bfloat16))
    optimizer = rounded([weight], SGD, lr=0.01, momentum=0.9, weight_decay=0.01)
    step(optimizer, [torch.full((4096,), 0.001)])
    grad = torch.tensor(0.001).bfloat16().float() + 0.01 * 0.75
    buffer = optimizer.state[weight]["momentum_buffer"]
    assert buffer.dtype is torch.float32 and torch.allclose(buffer, grad, rtol=1e-6, atol=0)
    # one step of 8.5e-5 is 0.0218 of a gap of 2^-8: so many of 4096 values move down
    moved = (weight.detach().float() != 0.75).sum().item()
    share = 0.01 * grad.item() * 2**8
    assert abs(moved - 4096 * share) < 4 * math.sqrt(4096 * share)
    assert set(weight.detach().float().tolist()) == {0.75, 0.75 - 2.0**-8}


def test_the_bits_come_from_one_key_a_step_and_one_stream_a_parameter() -> None:
    torch.manual_seed(5)
    key = philox.draw_key("cpu")
    torch.manual_seed(5)
    weights = [nn.Parameter(torch.ones(64, dtype=torch.bfloat16)) for _ in range(3)]
    optimizer = rounded([weights[0]])
    optimizer.add_param_group({"params": weights[1:], "lr": 2e-3})
    for p in (weights[0], weights[2]):  # the second keeps its place in the count without a gradient
        p.grad = torch.ones_like(p)
    optimizer.step()
    for stream, lr in ((0, 1e-3), (2, 2e-3)):
        exact = torch.ones(64) - torch.tensor(lr)
        expected = kernels.quantize(exact, None, BF16, key=key, stream=stream).codes
        assert torch.equal(weights[stream].detach(), expected)
    assert torch.equal(weights[1].detach(), torch.ones(64, dtype=torch.bfloat16))


def test_a_generator_of_ones_own_leaves_torchs_alone() -> None:
    def run(seed: int) -> Tensor:
        weight = nn.Parameter(torch.ones(256, dtype=torch.bfloat16))
        optimizer = SGD([weight], lr=1e-3)
        StochasticRounding(optimizer, torch.Generator().manual_seed(seed)).attach()
        state = torch.get_rng_state()
        step(optimizer, [torch.ones(256)])
        assert torch.equal(torch.get_rng_state(), state)
        return weight.detach()

    assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))


# what does not change


def test_an_update_of_zero_keeps_the_bits() -> None:
    start = torch.randn(512).bfloat16()
    start[:2] = torch.tensor([0.0, -0.0])
    weight = nn.Parameter(start.clone())
    optimizer = rounded([weight], AdamW, weight_decay=0.0)
    grad = torch.zeros(512)
    grad[-1] = 1.0
    for _ in range(3):
        step(optimizer, [grad])
    assert torch.equal(weight.detach()[:-1].view(torch.int16), start[:-1].view(torch.int16))


def test_parameters_in_other_dtypes_are_stepped_as_they_are() -> None:
    narrow, wide = nn.Parameter(torch.ones(8, dtype=torch.bfloat16)), nn.Parameter(torch.ones(8))
    optimizer = rounded([narrow, wide], AdamW, weight_decay=0.0)
    for _ in range(2):
        step(optimizer, [torch.ones(8), torch.ones(8)])
    assert torch.allclose(wide.detach(), torch.tensor(0.998), rtol=1e-6, atol=0)
    assert optimizer.state[wide]["step"] == optimizer.state[narrow]["step"] == 2
    assert set(optimizer.state) == {narrow, wide}


@pytest.mark.parametrize("form", FORMS)
def test_a_skipped_step_draws_no_bits(form: str) -> None:
    def run(bad: bool) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        model = Weights()
        model, optimizer = ng.prepare(model, AdamW(model.parameters(), lr=1e-3, **FORMS[form]), "bf16_pure")
        for index in range(3):
            if index == 1 and not bad:
                continue
            model().backward()
            if index == 1:
                model.weight.grad[7] = math.nan
            optimizer.step()
            assert optimizer.step_was_skipped is (index == 1)
            optimizer.zero_grad()
        return model.weight.detach(), torch.get_rng_state()

    for with_skip, without in zip(run(True), run(False), strict=True):
        assert torch.equal(with_skip, without)


def test_a_closure_whose_gradients_are_bad_is_skipped() -> None:
    model = Weights()
    model, optimizer = ng.prepare(model, SGD(model.parameters(), lr=1e-3), "bf16_pure")

    def closure(scale: float) -> Tensor:
        optimizer.zero_grad()
        loss = model() * scale
        loss.backward()
        return loss.detach()

    state = torch.get_rng_state()
    assert math.isinf(optimizer.step(lambda: closure(math.inf)))
    assert optimizer.step_was_skipped and bool((model.weight == 1).all())
    assert torch.equal(torch.get_rng_state(), state)
    assert optimizer.step(closure=lambda: closure(1.0)) == 4096.0
    assert not optimizer.step_was_skipped and not bool((model.weight == 1).all())


def test_loss_scaling_skips_and_unscales_before_the_copies_are_made() -> None:
    recipe = ng.recipe("bf16_pure", compute=FP16)
    model = Weights()
    model, optimizer = ng.prepare(model, SGD(model.parameters(), lr=1e-3), recipe)
    scaler = ng.LossScaler(recipe, init_scale=1024.0)
    for index in range(101):
        scaler.scale(model()).backward()
        if index == 0:
            model.weight.grad[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert index > 0 or bool((model.weight == 1).all())
    assert scaler.get_scale() == 512.0
    assert abs(model.weight.detach().float().mean().item() - 0.9) <= 0.002


# steps that raise


@pytest.mark.parametrize("form", FORMS)
def test_a_step_that_raises_leaves_the_parameters_as_they_were(form: str) -> None:
    weights = [nn.Parameter(torch.ones(16, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = rounded(weights, AdamW, **FORMS[form])
    weights[0].grad = torch.ones_like(weights[0])
    weights[1].grad = torch.ones_like(weights[1]).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    for p in weights:
        assert p.dtype is torch.bfloat16 and torch.equal(p.detach(), torch.ones_like(p))
    step(optimizer, [torch.ones(16)] * 2)
    assert all(0.98 < p.detach().float().mean() < 1.0 for p in weights)


def test_a_closure_that_raises_leaves_everything_as_it_was() -> None:
    weight = nn.Parameter(torch.ones(16, dtype=torch.bfloat16))
    optimizer = rounded([weight])

    def closure() -> float:
        weight.grad = torch.ones_like(weight)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(closure)
    assert weight.dtype is torch.bfloat16 and torch.equal(weight.detach(), torch.ones_like(weight))


# hooks, schedulers, files


def test_nothing_of_a_step_outlives_it() -> None:
    weight = nn.Parameter(torch.ones(12345, dtype=torch.bfloat16))
    optimizer = rounded([weight], AdamW)
    step(optimizer, [torch.ones(12345)])
    moments = {id(optimizer.state[weight][name]) for name in ("exp_avg", "exp_avg_sq")}
    optimizer.zero_grad()
    alive = [o for o in gc.get_objects() if type(o) is Tensor and o.shape == (12345,) and o.dtype is torch.float32]
    assert {id(tensor) for tensor in alive} <= moments


def test_hooks_of_others_find_the_gradients_that_they_change_and_the_new_parameters() -> None:
    weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = SGD([weight], lr=1.0)
    seen: list[float] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(weight.detach().float().mean().item()))
    StochasticRounding(optimizer).attach()

    def halve(*_: Any) -> None:
        weight.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    step(optimizer, [torch.ones(64)])
    assert seen == [0.5]


def test_schedulers_built_before_and_after_go_on_working() -> None:
    weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = SGD([weight], lr=1.0)
    before = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    StochasticRounding(optimizer).attach()
    after = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    for expected in (0.0, -0.5, -0.75):  # steps of 1, 1/2, 1/4: exact in bfloat16
        step(optimizer, [torch.ones(64)])
        before.step()
        after.step()
        assert torch.equal(weight.detach().float(), torch.full((64,), expected))


def test_preparing_again_leaves_one_or_none() -> None:
    model = Weights()
    optimizer = SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        ng.prepare(model, optimizer, "bf16_pure")
    attached = StochasticRounding.on(optimizer)
    assert attached is not None
    hooks = [hook.__self__ for hook in optimizer._optimizer_step_pre_hooks.values()]  # type: ignore[attr-defined]
    assert hooks == [StepGuard.on(optimizer), attached]
    with pytest.warns(UserWarning, match="made float32 masters"):
        ng.prepare(model, optimizer, "fp32")
    assert StochasticRounding.on(optimizer) is None
    assert len(optimizer._optimizer_step_post_hooks) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_gradients_are_float32_again_under_a_recipe_that_says_so(recipe: str) -> None:
    model = Weights()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    ng.prepare(model, optimizer, "bf16_pure")
    model().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="made float32 masters"):
        ng.prepare(model, optimizer, recipe)
    assert model.weight.grad is not None and model.weight.grad.dtype is torch.float32
    optimizer.zero_grad()
    model().backward()
    assert model.weight.grad.dtype is torch.float32
    before = model.weight.detach().clone()
    optimizer.step()
    assert (model.weight < before).all()


def test_moments_that_were_there_before_become_float32_and_keep_their_values() -> None:
    model = Weights().float()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    model().backward()
    optimizer.step()
    before = optimizer.state[model.weight]["exp_avg"].clone()
    ng.prepare(model, optimizer, "bf16_pure")
    after = optimizer.state[model.weight]["exp_avg"]
    assert after.dtype is torch.float32 and torch.equal(after, before)


def make() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16))
    return ng.prepare(model, AdamW(model.parameters(), lr=3e-3), "bf16_pure")


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> list[Tensor]:
    for index in steps:
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(index))
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    moments = [optimizer.state[p][name] for p in model.parameters() for name in ("exp_avg", "exp_avg_sq")]
    return [t.detach().clone() for t in (*model.parameters(), *moments)]


def test_a_resumed_run_is_the_same_run_in_bits(tmp_path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer, range(4))
    ng.save(tmp_path / "at4", model, optimizer, random=torch.get_rng_state())
    whole = train(model, optimizer, range(4, 8))
    model, optimizer = make()
    train(model, optimizer, range(2))  # another state, to be replaced
    torch.set_rng_state(ng.load(tmp_path / "at4", model, optimizer)["random"])
    for expected, found in zip(whole, train(model, optimizer, range(4, 8)), strict=True):
        assert expected.dtype == found.dtype and torch.equal(expected, found)


def test_torchs_own_state_dict_keeps_the_moments_in_float32() -> None:
    model, optimizer = make()
    train(model, optimizer, range(3))
    other, loaded = make()
    loaded.load_state_dict(optimizer.state_dict())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert loaded.state[q][name].dtype is torch.float32
            assert torch.equal(loaded.state[q][name], optimizer.state[p][name])
    assert loaded.state[q]["step"] == 3
