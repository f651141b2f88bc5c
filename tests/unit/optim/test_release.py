"""Gradient release: parameters that are stepped inside backward."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import narrowgauge as ng
from narrowgauge.optim.guard import StepGuard
from narrowgauge.optim.release import PREVIOUS_NORM, GradientRelease
from narrowgauge.tensors.packed import PackedTensor
from narrowgauge.tensors.quantized import QuantizedTensor

WIDTH = 80  # 6400 values: above min_state_size


def prepared(
    recipe: str | ng.Recipe = "narrow8", kind: str = "AdamW", layers: int = 3, **options: object
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-2, **options)
    return ng.prepare(model, optimizer, recipe)


def loss_of(model: nn.Module, step: int = 0) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    return model(x).float().square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4, clip: float | None = None) -> None:
    for step in range(steps):
        loss_of(model, step).backward()
        if clip is not None:
            ng.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def bits(tensor: Tensor) -> bytes:
    names = {QuantizedTensor: ("codes", "dequant_scale", "amax"), PackedTensor: ("packed", "dequant_scale", "amax")}
    parts = [getattr(tensor, name) for name in names.get(type(tensor.data), ())] or [tensor]
    return b"".join(part.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for part in parts)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[object]:
    """The bits of parameters and of all state."""
    kept: list[object] = [bits(p.data) for p in model.parameters()]
    for p in model.parameters():
        kept += [(k, bits(v) if isinstance(v, Tensor) and v.ndim else float(v)) for k, v in optimizer.state[p].items()]
    return kept


# the same steps


@pytest.mark.parametrize("recipe", ["narrow8", "narrow8_sr", "fp8_lm_o2", "fp8_lm_o3"])
def test_without_clipping_all_bits_are_those_of_a_step_after_backward(recipe: str) -> None:
    results = []
    for released in (False, True):
        model, optimizer = prepared(recipe)
        if released:
            ng.optim.release_gradients(optimizer)
        torch.manual_seed(1)  # keys of stochastic rounding
        train(model, optimizer)
        results.append((everything(model, optimizer), torch.get_rng_state().tolist()))
    assert results[0] == results[1]


def test_every_optimizer_can_be_released() -> None:
    makers: dict[str, Callable[[list], torch.optim.Optimizer]] = {
        "SGD": lambda ps: ng.optim.SGD(ps, lr=0.1, momentum=0.9),
        "Lion": lambda ps: ng.optim.Lion(ps, lr=1e-2),
        "Muon": lambda ps: ng.optim.Muon([p for p in ps if p.ndim == 2], lr=1e-2),
        "Adam": lambda ps: ng.optim.Adam(ps, lr=1e-2),
    }
    for name, make in makers.items():
        results = []
        for released in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
            optimizer = make(list(model.parameters()))
            if released:
                ng.optim.release_gradients(optimizer)
            train(model, optimizer, 2)
            results.append([bits(p) for p in model.parameters()])
        assert results[0] == results[1], name


def test_a_closure_and_schedulers_work_as_ever() -> None:
    results = []
    for released in (False, True):
        model, optimizer = prepared()
        if released:
            ng.optim.release_gradients(optimizer)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(3):

            def closure(step: int = step, model: nn.Module = model) -> Tensor:
                loss = loss_of(model, step)
                loss.backward()
                return loss

            optimizer.step(closure)
            optimizer.zero_grad()
            scheduler.step()
        results.append(everything(model, optimizer))
    assert results[0] == results[1]


# memory


def test_no_gradient_outlives_its_parameters_step() -> None:
    model, optimizer = prepared(layers=6)
    seen: list[StorageWeakRef] = []
    most = 0

    def look(grad: Tensor) -> None:
        nonlocal most
        seen.append(StorageWeakRef(grad.untyped_storage()))
        most = max(most, sum(not each.expired() for each in seen))

    for p in model.parameters():
        p.register_hook(look)
    ng.optim.release_gradients(optimizer)
    loss_of(model).backward()
    assert len(seen) == 12 and most == 1 and all(each.expired() for each in seen)
    assert all(p.grad is None for p in model.parameters())


def test_an_optimizer_and_its_release_are_freed() -> None:
    model, optimizer = prepared()
    ng.optim.release_gradients(optimizer, 1.0)
    train(model, optimizer, 1)
    dead = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model[0].weight)]
    del model, optimizer
    gc.collect()
    assert all(ref() is None for ref in dead)


# clipping


def test_gradients_are_clipped_by_the_norm_of_the_step_before() -> None:
    max_norm, lr = 0.05, 0.5
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    twin = copy.deepcopy(model)
    optimizer = ng.optim.SGD(model.parameters(), lr=lr)
    release = ng.optim.release_gradients(optimizer, max_norm)
    previous = None
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        grads = torch.autograd.grad(loss_of(twin, step), list(twin.parameters()))
        factor = 1.0 if previous is None else min(1.0, max_norm / (previous + 1e-6))
        previous = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
        assert release.previous_norm is not None
        assert release.previous_norm.item() == pytest.approx(previous, rel=1e-5) and previous > max_norm
        with torch.no_grad():
            for p, grad in zip(twin.parameters(), grads, strict=True):
                p -= lr * factor * grad
        for p, expected in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, expected, rtol=1e-5, atol=1e-7)


def test_the_norm_goes_with_the_optimizers_state() -> None:
    def run(steps: range, state: tuple[dict, dict] | None) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = prepared()
        ng.optim.release_gradients(optimizer, 1e-3)
        if state is not None:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        for step in steps:
            loss_of(model, step).backward()
            optimizer.step()
        return model, optimizer

    whole = everything(*run(range(4), None))
    model, optimizer = run(range(2), None)
    state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    assert state[1][PREVIOUS_NORM] > 1e-3
    assert everything(*run(range(2, 4), state)) == whole
    del state[1][PREVIOUS_NORM]
    assert everything(*run(range(2, 4), state)) != whole  # the first step is not clipped


# what is not finite


def poison(model: nn.Module) -> None:
    """Make the gradient of the first layer's weight infinite."""
    model[0].weight.register_hook(lambda grad: torch.full_like(grad, math.inf))


def test_a_bad_gradient_leaves_its_parameter_and_counts_as_a_skipped_step() -> None:
    model, optimizer = prepared()
    release = ng.optim.release_gradients(optimizer, 1.0)
    train(model, optimizer, 1)
    assert not optimizer.step_was_skipped
    norm, before = release.previous_norm, [bits(p) for p in model.parameters()]
    state = dict(optimizer.state[model[0].weight])
    poison(model)
    loss_of(model).backward()
    optimizer.step()
    moved = [bits(p) != old for p, old in zip(model.parameters(), before, strict=True)]
    assert moved == [False, True, True, True, True, True]
    assert optimizer.state[model[0].weight]["step"] == state["step"] == 1
    assert optimizer.step_was_skipped and release.previous_norm is norm
    assert optimizer.state_dict()["narrowgauge_steps"] == 2  # taken and skipped


def test_a_run_of_bad_gradients_ends_with_the_name() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters()), "narrow8", max_skips=2)
    ng.optim.release_gradients(optimizer)
    poison(model)
    loss_of(model).backward()
    optimizer.step()
    loss_of(model).backward()
    with pytest.raises(ng.DivergenceError, match=r"last 2 steps were skipped.*'0\.weight'"):
        optimizer.step()


def test_histories_roll_once_a_step_and_not_for_a_skipped_one() -> None:
    recipe = ng.recipe("narrow8").replace(
        **{role: ng.CastSpec(ng.formats.E4M3FN, scale=ng.Delayed(history_length=4)) for role in ("input", "weight")}
    )
    results = []
    for released in (False, True):
        model, optimizer = prepared(recipe)
        if released:
            ng.optim.release_gradients(optimizer)
        train(model, optimizer, 3)
        results.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    assert results[0] and results[0].keys() == results[1].keys()
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    poison(model)
    loss_of(model, 9).backward()
    optimizer.step()
    scales = [name for name in results[0] if "scale" in name]
    assert scales and all(torch.equal(results[0][name], model.get_buffer(name)) for name in scales)


# what is refused


def test_a_second_backward_is_refused_before_anything_changes() -> None:
    model, optimizer = prepared()
    ng.optim.release_gradients(optimizer)
    loss_of(model).backward()
    before = everything(model, optimizer)
    with pytest.raises(ng.NarrowgaugeError, match=r"second gradient of '2\..*before optimizer.step\(\)"):
        loss_of(model).backward()
    assert everything(model, optimizer) == before
    optimizer.step()
    train(model, optimizer, 1)
    with pytest.raises(ng.NarrowgaugeError, match="second gradient"), ng.accumulate(model):
        loss_of(model).backward()
        loss_of(model).backward()


def test_other_optimizers_norms_and_loss_scaling_are_refused() -> None:
    model, optimizer = prepared()
    with pytest.raises(ng.NarrowgaugeError, match="expected an optimizer of narrowgauge.optim, found torch.optim"):
        ng.optim.release_gradients(torch.optim.AdamW(model.parameters()))
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(ng.NarrowgaugeError, match="expected max_norm above 0"):
            ng.optim.release_gradients(optimizer, bad)
    ng.optim.release_gradients(optimizer)
    scaler = ng.LossScaler("fp16", "cpu")
    scaler.scale(loss_of(model)).backward()
    with pytest.raises(ng.NarrowgaugeError, match="gradients of the scaled loss"):
        scaler.step(optimizer)


def test_removing_it_brings_gradients_back_and_releasing_again_replaces_it() -> None:
    model, optimizer = prepared()
    first = ng.optim.release_gradients(optimizer)
    second = ng.optim.release_gradients(optimizer, 1.0)
    assert GradientRelease.on(optimizer) is second
    loss_of(model).backward()
    optimizer.step()
    first.remove()
    assert GradientRelease.on(optimizer) is second
    second.remove()
    assert GradientRelease.on(optimizer) is None
    before = [bits(p) for p in model.parameters()]
    loss_of(model).backward()
    loss = [type(p.grad).__name__ for p in model.parameters()]
    assert loss == ["QuantizedTensor", "Tensor"] * 3 and [bits(p) for p in model.parameters()] == before
    optimizer.step()
    assert [bits(p) for p in model.parameters()] != before


def test_an_optimizer_that_was_not_prepared_skips_bad_gradients_too() -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = ng.optim.AdamW(model.parameters())
    release = ng.optim.release_gradients(optimizer)
    before = bits(model.weight)
    (model(torch.full((1, WIDTH), math.inf))).sum().backward()
    optimizer.step()
    assert optimizer.step_was_skipped and bits(model.weight) == before
    release.remove()
    assert StepGuard.on(optimizer) is None  # it was the release's own


def test_parameters_that_were_replaced_are_refused() -> None:
    model, optimizer = prepared("fp8_lm_o2")
    release = ng.optim.release_gradients(optimizer)
    model, optimizer = ng.prepare(model, optimizer, "narrow8")
    with pytest.raises(ng.NarrowgaugeError, match="come in the place of a parameter"):
        loss_of(model).backward()
    release.remove()
