"""A warm-up: until so many rolls the scale follows from the tensor at hand (FP8-LM's first 16 steps)."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.layers.linear import Linear
from narrowgauge.numerics.formats import E4M3FN, E5M2
from narrowgauge.ops.experts import GroupedLinear
from narrowgauge.ops.reduce import SINGLE_PROCESS
from narrowgauge.recipes.serialize import from_dict, to_dict

WARMUP = 3


def warm(recipe: ng.Recipe, warmup: int = WARMUP) -> ng.Recipe:
    """`recipe` with a warm-up for input and grad_output."""
    changed = {}
    for role in ("input", "grad_output"):
        spec = getattr(recipe, role)
        changed[role] = dataclasses.replace(spec, scale=dataclasses.replace(spec.scale, warmup=warmup))
    return recipe.replace(**changed)


RECIPE = warm(ng.DelayedScaling(amax_history_len=4).replace(weight=ng.CastSpec(E4M3FN), emulation="exact"))
CURRENT = ng.recipe("fp8_current", emulation="exact")


def made(recipe: ng.Recipe, with_optimizer: bool = True) -> tuple[nn.Sequential, torch.optim.Optimizer | None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0) if with_optimizer else None
    return ng.prepare(model, optimizer, recipe)


def batch(step: int) -> Tensor:
    """Magnitudes that grow by 4 with every step, so that no scale of an earlier one would do."""
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(step)) * 4.0**step


def run(model: nn.Module, optimizer: torch.optim.Optimizer | None, steps: range) -> list[Tensor]:
    """Outputs and weight gradients of every step."""
    found = []
    for step in steps:
        y = model(batch(step))
        y.square().mean().backward()
        found += [y.detach(), *(p.grad.clone() for p in model.parameters())]
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
    return found


def same(a: list[Tensor], b: list[Tensor]) -> list[bool]:
    return [torch.equal(x, y) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_it_is_current_scaling_and_then_the_history_decides(with_optimizer: bool) -> None:
    """Bit for bit: the formulas of both scales are one where the margin is 0."""
    found = run(*made(RECIPE, with_optimizer), range(WARMUP + 1))
    current = run(*made(CURRENT, with_optimizer), range(WARMUP + 1))
    first = run(*made(warm(RECIPE, 0), with_optimizer), range(1))
    per_step = len(found) // (WARMUP + 1)
    assert all(same(found[: WARMUP * per_step], current[: WARMUP * per_step]))
    assert not any(same(found[WARMUP * per_step :], current[WARMUP * per_step :])[:3])
    assert not all(same(found[:per_step], first))


def test_the_margin_acts_in_the_warm_up_too() -> None:
    recipe = warm(ng.DelayedScaling(margin=2, amax_history_len=4))
    slots = made(recipe)[0][0].delayed_slots()["input"]
    x = torch.tensor([[1.0, -3.5]])
    assert slots.scale_for(x, recipe.input, SINGLE_PROCESS).item() == 448 / 4 / 3.5
    for bad in (0.0, float("inf"), float("nan")):
        assert (
            slots.scale_for(torch.full((2, 2), bad), recipe.input, SINGLE_PROCESS).item() == 1.0
        )  # the scale in force


def test_a_skipped_step_is_no_roll() -> None:
    model, optimizer = made(RECIPE)
    model(batch(0) * float("inf")).sum().backward()
    optimizer.step()
    assert optimizer.step_was_skipped
    found = run(model, optimizer, range(WARMUP + 1))
    assert all(same(found, run(*made(RECIPE), range(WARMUP + 1))))


def test_after_the_warm_up_no_tensor_is_looked_at_first() -> None:
    model, optimizer = made(RECIPE)
    layers = [layer for layer in model if isinstance(layer, Linear)]
    for step in range(WARMUP + 1):
        assert [layer.warming for layer in layers] == [step < WARMUP] * 2
        assert [layer.delayed_slots()["input"].rolls is None for layer in layers] == [step >= WARMUP] * 2
        run(model, optimizer, range(step, step + 1))


def test_roles_without_a_warm_up_have_none() -> None:
    recipe = warm(ng.DelayedScaling(amax_history_len=4))
    assert made(recipe)[0][0].delayed_slots()["weight"].rolls is None
    assert not made(ng.DelayedScaling())[0][0].warming


@pytest.mark.parametrize("stop", [1, WARMUP, WARMUP + 1])
def test_a_run_that_is_stopped_goes_on_bitwise(stop: int, tmp_path) -> None:
    model, optimizer = made(RECIPE)
    expected = run(model, optimizer, range(WARMUP + 2))
    model, optimizer = made(RECIPE)
    found = run(model, optimizer, range(stop))
    ng.save(tmp_path / "checkpoint", model, optimizer)
    model, optimizer = made(RECIPE)
    ng.load(tmp_path / "checkpoint", model, optimizer)
    assert all(same(found + run(model, optimizer, range(stop, WARMUP + 2)), expected))


def test_a_copy_goes_on_where_the_model_was() -> None:
    model, optimizer = made(RECIPE)
    run(model, optimizer, range(1))
    again = copy.deepcopy(model)
    again, other = ng.prepare(again, torch.optim.SGD(again.parameters(), lr=0.0), RECIPE)
    rest = range(1, WARMUP + 2)
    assert all(same(run(again, other, rest), run(model, optimizer, rest)))


def test_fresh_parameters_begin_anew() -> None:
    model, optimizer = made(RECIPE)
    run(model, optimizer, range(WARMUP + 1))
    model[0].reset_parameters()
    assert model[0].warming and not model[2].warming


def test_meta_construction_begins_with_the_warm_up() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))
    ng.prepare(model, None, RECIPE)
    model.to_empty(device="cpu")
    model.load_state_dict(made(RECIPE)[0].state_dict())
    expected = run(made(RECIPE, with_optimizer=False)[0], None, range(WARMUP + 1))
    assert all(same(run(model, None, range(WARMUP + 1)), expected))


def test_each_expert_has_its_own() -> None:
    """An expert without tokens does not roll: its warm-up lasts longer, and the host looks again."""
    torch.manual_seed(0)
    model = nn.Sequential(GroupedLinear(2, 32, 32, bias=False))
    model, optimizer = ng.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), RECIPE)
    layer = model[0]
    for _ in range(WARMUP):
        layer(batch(0), torch.tensor([8, 0])).sum().backward()
        optimizer.step()
    assert layer.amax_rolls.tolist() == [WARMUP, 0] and layer.warming
    x = torch.full((1, 1), 2.0)
    slots = layer.delayed_slots()["input"]
    assert slots.scale_for(x, RECIPE.input, SINGLE_PROCESS).tolist()[1] == 448 / 2
    assert slots.scale_for(x, RECIPE.input, SINGLE_PROCESS)[0] == slots.quant_scale[0]
    for _ in range(WARMUP):
        layer(batch(0), torch.tensor([4, 4])).sum().backward()
        optimizer.step()
    assert not layer.warming


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiled_as_eager(backend: str) -> None:
    torch._dynamo.reset()
    expected = run(*made(RECIPE), range(WARMUP + 2))
    model, optimizer = made(RECIPE)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert all(same(run(compiled, optimizer, range(WARMUP + 2)), expected))


def test_fp8_lm_warms_up_for_its_window() -> None:
    for name in ("fp8_lm_o1", "fp8_lm_o2", "fp8_lm_o3"):
        recipe = ng.recipe(name)
        assert recipe.input == ng.CastSpec(E4M3FN, scale=ng.Delayed(history_length=16, warmup=16))
        assert recipe.grad_output == ng.CastSpec(E5M2, scale=ng.Delayed(history_length=16, warmup=16))


def test_how_it_is_printed_and_written() -> None:
    recipe = ng.recipe("fp8_lm_o1")
    assert str(recipe.input) == "E4M3FN, delayed (max of 16, margin 0, every 1, current for the first 16), per tensor"
    assert to_dict(recipe)["input"]["scale"]["warmup"] == 16
    assert from_dict(to_dict(recipe)) == recipe


@pytest.mark.parametrize("warmup", [-1, 1.0, True, "16", None])
def test_it_is_a_number_of_steps(warmup) -> None:
    with pytest.raises(ng.RecipeError, match=f"warmup={warmup!r}: expected a whole number of steps, at least 0"):
        ng.Delayed(warmup=warmup)
