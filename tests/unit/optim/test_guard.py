"""Skipped steps leave everything as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.optim.guard import StepGuard, all_finite

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
}


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [v for p in model.parameters() for v in optimizer.state[p].values() if isinstance(v, Tensor)]
    return [t.detach().clone() for t in (*model.state_dict().values(), *states)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("recipe", ng.recipe_names())
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_skipped_step_leaves_everything_untouched(kind: str, recipe: str, bad: float) -> None:  # case 21
    def run(with_bad_step: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
        model, optimizer = ng.prepare(model, OPTIMIZERS[kind](model.parameters()), recipe)
        for step in range(3):
            if step == 1 and not with_bad_step:
                continue
            torch.manual_seed(step)  # a forward and backward may draw random bits, also that of a step to be skipped
            model(torch.ones(4, 32) * (step + 1)).float().square().mean().backward()
            before = snapshot(model, optimizer)
            if step == 1:
                model[1].weight.grad[3, 3] = bad
            optimizer.step()
            assert optimizer.step_was_skipped is (step == 1)
            if step == 1:
                # live amax slots are cleared, and nothing rolls
                cleared = [t.clone() for t in before]
                for t, (name, _) in zip(cleared, model.state_dict().items(), strict=False):
                    if name.endswith("amax_history"):
                        t[0] = 0
                    elif name.endswith("amax_pending"):
                        t.fill_(False)
                assert same(cleared, snapshot(model, optimizer))
                assert all(p.grad is None for p in model.parameters())
            optimizer.zero_grad()
        return snapshot(model, optimizer)

    assert same(run(True), run(False))


@pytest.mark.parametrize("recipe", ["narrow8", "fp8_lm_o2", "fp8_lm_o3"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_the_cast_of_a_gradient_saturates_is_seen(recipe: str, bad: float) -> None:  # case 21
    """Infinity is the largest code of an 8-bit gradient, and its state is in 8 bits too."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = ng.prepare(model, optimizer, ng.recipe(recipe, min_state_size=1))
    model(torch.ones(4, 32)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

    def bits() -> list[Tensor]:
        kept = [*model.parameters(), *(v for p in model.parameters() for v in optimizer.state[p].values())]
        stored = [t.detach() for t in kept if isinstance(t, Tensor)]
        parts = [(t.codes, t.dequant_scale, t.amax) if isinstance(t, ng.QuantizedTensor) else (t,) for t in stored]
        return [part.clone().reshape(-1).view(torch.uint8) for each in parts for part in each]

    before = bits()
    wide = torch.ones(16, 32)
    wide[3, 3] = bad
    model[1].weight.grad = ng.quantize(wide, ng.recipe(recipe).grad)
    optimizer.step()
    assert optimizer.step_was_skipped
    assert same(before, bits())
    assert [optimizer.state[p]["step"] for p in model.parameters()] == [1] * 4


def test_bad_gradients_do_not_add_up_into_later_steps() -> None:  # case 25
    model, optimizer = ng.prepare(*_layer_and_sgd(), "fp16")
    scaler = ng.LossScaler("fp16", init_scale=1024.0)
    for step in range(5):
        before = model.weight.detach().clone()
        loss = model(torch.ones(2, 16)).float().sum()
        scaler.scale(loss).backward()  # no zero_grad anywhere
        if step == 0:
            model.weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.weight, before) == (step == 0)
        assert step == 0 or model.weight.grad.isfinite().all()
    assert scaler.get_scale() == 512.0


def _layer_and_sgd() -> tuple[nn.Linear, torch.optim.SGD]:
    torch.manual_seed(0)
    layer = nn.Linear(16, 16)
    return layer, torch.optim.SGD(layer.parameters(), lr=0.01)


def test_a_run_of_skips_names_step_and_parameter() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ng.prepare(model, optimizer, "bf16", max_skips=3)

    def step(bad: bool) -> None:
        model(torch.ones(2, 16)).float().sum().backward()
        if bad:
            model[1].bias.grad[0] = float("nan")
        optimizer.step()
        optimizer.zero_grad()

    for bad in (True, True, False, True, True):  # a good step starts the count anew
        step(bad)
    with pytest.raises(ng.DivergenceError, match=r"step 6: the last 3 steps .* first parameter with one is '1.bias'"):
        step(True)


def test_a_closure_is_guarded_by_the_gradients_that_it_leaves() -> None:
    model, optimizer = ng.prepare(*_layer_and_sgd(), "fp32")
    before = model.weight.detach().clone()

    def closure(bad: bool) -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 16)).sum()
        loss.backward()
        if bad:
            model.weight.grad[0] = float("inf")
        return loss

    assert optimizer.step(lambda: closure(True)) is not None
    assert optimizer.step_was_skipped and torch.equal(model.weight, before)
    optimizer.step(closure=lambda: closure(False))
    assert not optimizer.step_was_skipped and not torch.equal(model.weight, before)


def test_the_finite_check_is_not_fooled_by_size_or_shape() -> None:
    big = torch.full((4,), 3e38)  # finite, though its norm is not
    assert all_finite([big, torch.zeros(0), torch.zeros(2, 2, dtype=torch.float16)])
    for bad in (float("inf"), -float("inf"), float("nan")):
        assert not all_finite([big, torch.tensor([1.0, bad])])
        assert not all_finite([torch.tensor([[bad, 1.0]], dtype=torch.bfloat16)])
    values = torch.tensor([1.0, float("nan")])
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), values, (4,), check_invariants=True)
    assert not all_finite([sparse])


def test_preparing_again_leaves_one_guard() -> None:
    model, optimizer = _layer_and_sgd()
    for recipe in ("fp8_delayed", "bf16"):
        ng.prepare(model, optimizer, recipe)
    guard = StepGuard.on(optimizer)
    assert guard is not None
    model(torch.ones(2, 16)).float().sum().backward()
    optimizer.step()
    assert guard.steps == 1
    guard.detach()
    assert StepGuard.on(optimizer) is None


def test_a_limit_of_no_skips_is_refused() -> None:
    model, optimizer = _layer_and_sgd()
    with pytest.raises(ng.NarrowgaugeError, match="max_skips of at least 1, found 0"):
        ng.prepare(model, optimizer, "bf16", max_skips=0)
