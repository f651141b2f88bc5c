"""The loss scaler: GradScaler's interface, bounds, and an end to fruitless skipping."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.optim.scaler import MAX_SCALE


def weight_and_sgd(values: list[float], lr: float = 1.0) -> tuple[nn.Parameter, torch.optim.SGD]:
    w = nn.Parameter(torch.tensor(values))
    return w, torch.optim.SGD([w], lr=lr)


@pytest.mark.parametrize("recipe", ng.recipe_names())
def test_it_is_inert_unless_the_recipe_computes_in_float16(recipe: str) -> None:
    scaler = ng.LossScaler(recipe)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.is_enabled() is recipe.startswith("fp16")
    w, optimizer = weight_and_sgd([1.0])
    loss = w.sum()
    assert (scaler.scale(loss) is loss) is not scaler.is_enabled()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert w.item() == 0.0


@pytest.mark.parametrize("growth_factor", [2.0, 1e38])
def test_the_scale_never_becomes_infinite(growth_factor: float) -> None:  # case 19
    scaler = ng.LossScaler("fp16", init_scale=2.0**120, growth_interval=1, growth_factor=growth_factor)
    w, optimizer = weight_and_sgd([1.0], lr=1e27)
    for _ in range(200):
        before = w.item()
        scaler.scale((w * 1e-30).sum()).backward()
        scaler.unscale_(optimizer)
        assert w.grad.isfinite().all()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert w.item() < before
        assert 0 < scaler.get_scale() <= MAX_SCALE
    assert scaler.get_scale() >= 2.0**120


def test_a_configured_maximum_wins() -> None:  # case 19
    scaler = ng.LossScaler("fp16", init_scale=4.0, growth_interval=1, max_scale=16.0)
    w, optimizer = weight_and_sgd([1.0])
    for _ in range(5):
        scaler.scale(w.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 16.0


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_permanent_overflow_stops_with_the_culprits_name(prepared: bool, fused: bool) -> None:  # case 20
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.01, fused=fused)
    if prepared:
        ng.prepare(model, optimizer, "fp16", autocast=False)
    before = [p.detach().clone() for p in model.parameters()]
    scaler = ng.LossScaler("fp16", init_scale=2.0**4, max_skips=20)
    with pytest.raises(ng.DivergenceError, match=r"step 20: the last 20 steps .* loss scale 1; .* is '0.weight'"):
        for _ in range(200):
            scaler.scale(sum((p * float("inf")).sum() for p in model.parameters())).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() >= 1.0
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert not optimizer.state


def test_clipping_after_unscaling_sees_the_real_norm() -> None:  # case 30
    w, optimizer = weight_and_sgd([0.0, 0.0])
    scaler = ng.LossScaler("fp16", init_scale=65536.0)
    scaler.scale((w * torch.tensor([3.0, 4.0])).sum()).backward()
    scaler.unscale_(optimizer)
    assert ng.clip_grad_norm_([w], 1.0).item() == 5.0
    scaler.step(optimizer)
    assert torch.allclose(w, torch.tensor([-0.6, -0.8]), atol=1e-6)


def test_accumulation_unscales_once_for_plain_and_fused() -> None:  # case 31
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(32, 32)
        batches = torch.randn(4, 8, 32)
        reference = nn.Linear(32, 32)
        reference.load_state_dict(model.state_dict())
        (sum(reference(x).square().mean() for x in batches) / 4).backward()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        ng.prepare(model, optimizer, "fp16")
        scaler = ng.LossScaler("fp16", init_scale=1024.0)
        for x in batches:
            scaler.scale(model(x).float().square().mean() / 4).backward()
        scaler.unscale_(optimizer)
        norm = ng.clip_grad_norm_(model.parameters(), 1e6)
        assert torch.allclose(model.weight.grad, reference.weight.grad, atol=1e-3)
        assert norm.item() == pytest.approx(
            torch.cat([p.grad.flatten() for p in reference.parameters()]).norm().item(), abs=1e-3
        )
        scaler.step(optimizer)
        scaler.update()
        results.append([p.detach() for p in model.parameters()])
    for plain, fused_result in zip(*results, strict=True):
        assert torch.allclose(plain, fused_result, atol=1e-6)


def test_gradscalers_interface_and_errors_hold() -> None:
    scaler = ng.LossScaler("fp16")
    w, optimizer = weight_and_sgd([1.0])
    scaler.scale(w.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
    scaler.update()
    with pytest.raises(ng.NarrowgaugeError, match="closure"):
        scaler.step(optimizer, closure=lambda: None)


def test_a_step_without_gradients_does_nothing() -> None:
    scaler = ng.LossScaler("fp16")
    w, optimizer = weight_and_sgd([1.0])
    for _ in range(2):
        scaler.scale(w.sum())
        scaler.step(optimizer)
        scaler.update()
    assert w.item() == 1.0 and scaler.get_scale() == 65536.0


def test_float16_gradients_are_refused_with_the_parameters_name() -> None:  # case 23
    model = nn.Sequential(nn.Linear(4, 4)).half()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    scaler = ng.LossScaler("fp16")
    scaler.scale(model[0].weight.float().sum()).backward()
    with pytest.raises(ng.NarrowgaugeError, match=r"'0.weight' has float16 gradients.*narrowgauge.prepare"):
        scaler.step(optimizer)


def test_torchs_own_scaler_gives_the_same_result() -> None:  # case 27
    results = []
    for make in (lambda: ng.LossScaler("fp16"), lambda: torch.amp.GradScaler("cpu")):
        torch.manual_seed(0)
        model = nn.Linear(32, 32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        ng.prepare(model, optimizer, "fp16")
        scaler = make()
        for step in range(4):
            scaler.scale(model(torch.ones(2, 32)).float().square().mean()).backward()
            if step == 1:
                model.weight.grad[0, 0] = float("inf")
            scaler.unscale_(optimizer)
            ng.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append((model.weight.detach(), scaler.get_scale()))
    assert torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1] == 32768.0


def test_state_survives_saving_and_pickling_within_bounds() -> None:
    scaler = ng.LossScaler("fp16", init_scale=2.0**20, growth_interval=7)
    w, optimizer = weight_and_sgd([1.0])
    scaler.scale(w.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    other = ng.LossScaler("fp16", max_scale=2.0**18)
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale() == 2.0**18
    assert other.state_dict() == {**scaler.state_dict(), "scale": 2.0**18}
    assert pickle.loads(pickle.dumps(scaler)).state_dict() == scaler.state_dict()


@pytest.mark.parametrize(
    "options",
    [
        {"init_scale": 0.5},
        {"min_scale": 0.0},
        {"max_scale": float("inf")},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"growth_interval": 0},
        {"max_skips": 0},
    ],
)
def test_bad_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ng.NarrowgaugeError, match="expected"):
        ng.LossScaler("fp16", **options)
    with pytest.raises(ng.RecipeError, match="fp16"):
        ng.LossScaler("fp61")


def test_a_closure_that_is_none_is_no_closure() -> None:
    scaler = ng.LossScaler("fp16")
    w, optimizer = weight_and_sgd([1.0])
    scaler.scale(w.sum()).backward()
    scaler.step(optimizer, None)  # as accelerate calls it
    assert w.item() == 0.0
