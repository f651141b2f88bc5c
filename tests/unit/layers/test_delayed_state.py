"""Delayed scaling's state on a layer: when it moves, when it stays, how it is saved."""

from __future__ import annotations

import gc
import io
import json
import struct
from pathlib import Path

import pytest
import torch
from states import assert_same_state, state_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.layers import delayed
from narrowgauge.layers.linear import Linear
from narrowgauge.layers.statistics import collect

GOLDEN = Path(__file__).parents[2] / "golden" / "delayed.json"


def prepared(model: nn.Module, recipe: str | ng.Recipe = "fp8_delayed", lr: float = 0.01):
    return ng.prepare(model, torch.optim.SGD(model.parameters(), lr=lr), recipe)


def delayed_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v for k, v in state_of(model).items() if delayed.is_state_name(k.rpartition(".")[2])}


def float32_of(bits: str) -> float:
    return struct.unpack(">f", bytes.fromhex(bits))[0]


def test_rolls_of_many_layers_at_once_give_the_golden_states() -> None:
    for case in json.loads(GOLDEN.read_text())["cases"]:
        if case["fp8_max"] != 448.0:
            continue
        recipe = ng.DelayedScaling(
            margin=case["margin"],
            interval=case["interval"],
            amax_history_len=case["amax_history_len"],
            amax_compute_algo=case["algo"],
        )
        model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
        ng.convert(model, recipe)
        layers = [layer for layer in model if isinstance(layer, Linear)]
        for amax, after in zip(case["amax_per_step_f32_hex"], case["after_step"], strict=True):
            for layer in layers:
                layer.delayed_slots()["input"].history[0] = float32_of(amax)
                layer.get_buffer(delayed.PENDING).fill_(True)
            delayed.roll(layers)
            for layer in layers:
                slots = layer.delayed_slots()["input"]
                assert slots.history.tolist() == [float32_of(bits) for bits in after["history_f32_hex"]]
                assert slots.quant_scale.item() == float32_of(after["scale_f32_hex"])


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_checkpointing_leaves_state_and_gradients_as_they_are(mlp, with_optimizer: bool) -> None:  # case 11
    def run(kind: bool | None):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        ng.prepare(model, optimizer if with_optimizer else None, ng.DelayedScaling(amax_history_len=8))
        torch.manual_seed(1)
        seen = []
        for _ in range(5):
            x = torch.randn(6, 32, requires_grad=True)
            y = model(x) if kind is None else checkpoint(model, x, use_reentrant=kind)
            y.square().sum().backward()
            seen += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        return seen, delayed_state(model)

    plain, state = run(None)
    histories = {name: value for name, value in state.items() if name.endswith(delayed.HISTORY)}
    assert len(histories) == 2 * 3
    # one entry a step and tensor; without an optimizer the last step is still in the live slot
    assert all((history != 0).sum() == 5 for history in histories.values())
    assert state["0.amax_rolls"] == (5 if with_optimizer else 4)
    assert all(scale != 1 for name, scale in state.items() if name.endswith(delayed.SCALE))
    for kind in (False, True):
        seen, other = run(kind)
        assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
        assert_same_state(state, other)


def test_evaluation_changes_no_state_and_no_later_step(mlp) -> None:  # case 13
    def run(evaluate: bool):
        model, optimizer = prepared(mlp())
        torch.manual_seed(1)
        data = torch.randn(6, 5, 32)
        for step, x in enumerate(data):
            if step == 3 and evaluate:
                before = state_of(model)
                model.eval()
                with torch.no_grad():
                    model(torch.ones(5, 32) * 1000)
                    model.train()(torch.ones(5, 32) * 1000)
                assert_same_state(before, state_of(model))
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model)

    assert_same_state(run(True), run(False))


def test_backward_works_in_eval_mode(mlp) -> None:  # case 13
    model, _ = prepared(mlp())
    before = delayed_state(model)
    x = torch.randn(4, 32, requires_grad=True)
    model.eval()(x).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    assert_same_state(before, delayed_state(model))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_bad_activation_leaves_no_trace_in_later_scales(mlp, bad: float) -> None:  # case 15
    model, optimizer = prepared(mlp(), ng.DelayedScaling(amax_history_len=4))
    for step in range(9):
        x = torch.randn(6, 32)
        if step == 3:
            x[0, 0] = bad
        model(x).square().sum().backward()
        optimizer.step()
        assert optimizer.step_was_skipped is (step == 3)
        optimizer.zero_grad()
        for name, value in delayed_state(model).items():
            assert value.isfinite().all(), name
            if name.endswith("quant_scale"):
                assert value > 0
        amax = x.abs().amax()
    first = model[0].delayed_slots()["input"]
    # the window holds finite data only: the scale follows it
    assert torch.equal(first.quant_scale, torch.tensor(448.0) / first.history.amax())
    assert first.history[-1] == amax


@pytest.mark.parametrize("grown", ["input", "grad_output"])
def test_sudden_growth_saturates_and_heals(grown: str) -> None:  # case 16
    # no bias: it would hide the error of the product
    layer = nn.Linear(32, 48, bias=False)
    weight = layer.weight.detach().clone()
    recipe = ng.DelayedScaling(amax_history_len=2).replace(emulation="exact")
    model, optimizer = ng.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.0), recipe, autocast=False)
    # measured: 3.8 % for E4M3 by E4M3, 5.9 % with E5M2 (cases.md); below, nothing was cast
    windows = {"output": (0.025, 0.06), "grad_input": (0.04, 0.09), "grad_weight": (0.04, 0.09)}
    grows = {"input": ("output", "grad_weight"), "grad_output": ("grad_input", "grad_weight")}[grown]
    for step in range(7):
        factor = 100.0 if step >= 3 else 1.0
        x = (torch.randn(64, 32) * (factor if grown == "input" else 1.0)).requires_grad_()
        g = torch.randn(64, 48) * (factor if grown == "grad_output" else 1.0)
        with collect(model) as counted:
            y = model(x)
            y.backward(g)
        found = {"output": y.detach(), "grad_input": x.grad, "grad_weight": layer.weight.grad}
        exact = {"output": x.detach() @ weight.t(), "grad_input": g @ weight, "grad_weight": g.t() @ x.detach()}
        assert all(value.isfinite().all() for value in found.values())
        share = counted.read()[""][grown]["saturated"]
        assert (share > 0.5) == (step == 3), step
        for name, value in found.items():
            error = ((value - exact[name]).norm() / exact[name].norm()).item()
            if step == 3 and name in grows:
                assert 0.9 < error < 1, name  # clipped to a hundredth
            elif step:  # the first step has no history: its scale is 1
                assert windows[name][0] <= error <= windows[name][1], (step, name)
        optimizer.step()
        optimizer.zero_grad()


def test_saved_state_does_not_grow(mlp) -> None:  # case 17
    model, optimizer = prepared(nn.Sequential(nn.Linear(16, 16)))
    sizes, alive = [], []
    with ng.autocast("fp8_delayed"):
        for step in range(300):
            model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (4, 299):
                saved = io.BytesIO()
                torch.save(model.state_dict(), saved)
                sizes.append((len(saved.getvalue()), len(model.state_dict())))
                gc.collect()
                alive.append(sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()))
    assert sizes[0] == sizes[1]
    assert alive[0] >= alive[1]  # no step leaves a tensor behind; those of earlier tests may go meanwhile


@pytest.mark.parametrize(("saved", "loaded"), [(16, 4), (4, 16), (1, 4), (4, 1)])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_another_history_length_keeps_the_newest_entries(mlp, saved: int, loaded: int, algorithm: str) -> None:
    # case 18
    model, optimizer = prepared(mlp(), ng.DelayedScaling(amax_history_len=saved))
    for _ in range(20):
        model(torch.randn(4, 32)).sum().backward()
        optimizer.step()
    recipe = ng.DelayedScaling(amax_history_len=loaded, margin=1, amax_compute_algo=algorithm)
    other, other_optimizer = prepared(mlp(), recipe)
    other.load_state_dict(model.state_dict())
    old, new = (m[0].delayed_slots()["input"] for m in (model, other))
    kept = min(saved, loaded) - 1
    assert len(new.history) == loaded
    if kept:
        assert torch.equal(new.history[-kept:], old.history[-kept:])
    assert not new.history[1 : loaded - kept].any()
    assert torch.equal(new.quant_scale, old.quant_scale)
    for _ in range(2):
        x = torch.randn(4, 32)
        window = torch.cat([new.history[1:], x.abs().amax().reshape(1)])
        other(x).sum().backward()
        other_optimizer.step()
        # the window and the algorithm of the new recipe, and its margin
        amax = window.amax() if algorithm == "max" else window[-1]
        assert torch.equal(new.quant_scale, torch.tensor(448.0 / 2) / amax)


def test_state_is_fresh_where_a_checkpoint_has_none_and_ignored_where_a_layer_has_none(mlp) -> None:
    model, optimizer = prepared(mlp())
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    assert model[0].get_buffer(delayed.ROLLS) == 1
    bf16, _ = prepared(mlp(), "bf16")
    bf16.load_state_dict(model.state_dict())
    model.load_state_dict(bf16.state_dict())
    assert model[0].get_buffer(delayed.ROLLS) == 0
    assert model[0].delayed_slots()["input"].quant_scale == 1


def test_state_stays_float32_when_the_model_changes_dtype(mlp) -> None:
    model, optimizer = prepared(mlp())
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    before = delayed_state(model)
    model.half().bfloat16().to(torch.float64)
    assert_same_state(before, delayed_state(model))
    assert model[0].weight.dtype is torch.float64


def test_reset_parameters_forgets_the_history(mlp) -> None:
    model, optimizer = prepared(mlp())
    fresh = delayed_state(model)
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    for layer in (model[0], model[2]):
        layer.reset_parameters()
    assert_same_state(fresh, delayed_state(model))


def test_a_layer_that_did_not_run_keeps_its_state(mlp) -> None:
    model, optimizer = prepared(mlp())
    for used in (model, model[0], model):
        before = delayed_state(model[2])
        used(torch.randn(4, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        changed = any(not torch.equal(v, before[k]) for k, v in delayed_state(model[2]).items())
        assert changed == (used is model)


def test_an_empty_batch_changes_no_state(mlp) -> None:  # case 54
    model, optimizer = prepared(mlp())
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    before = delayed_state(model)
    y = model(torch.randn(0, 32))
    assert y.shape == (0, 32)
    y.sum().backward()
    optimizer.step()
    assert_same_state(before, delayed_state(model))


def test_the_reducer_takes_the_maximum_over_ranks(mlp) -> None:
    models = [prepared(mlp(), ng.DelayedScaling(amax_history_len=2))[0] for _ in range(2)]
    packed: list[torch.Tensor] = []

    class Keep:
        def max_(self, amax: torch.Tensor) -> torch.Tensor:
            packed.append(amax.clone())
            return amax

    class OtherRank:
        def max_(self, amax: torch.Tensor) -> torch.Tensor:
            return torch.maximum(amax, packed[1])

    for factor, model in zip((1.0, 3.0), models, strict=True):
        model(torch.ones(4, 32) * factor).sum().backward()
        delayed.roll([model[0], model[2]], Keep())
    assert len(packed) == 2  # one collective a step
    model = prepared(mlp(), ng.DelayedScaling(amax_history_len=2))[0]
    model(torch.ones(4, 32)).sum().backward()
    delayed.roll([model[0], model[2]], OtherRank())
    assert model[0].delayed_slots()["input"].history.tolist() == [0.0, 3.0]


def test_rolling_at_the_step_and_rolling_lazily_give_the_same_scales(mlp) -> None:
    scales = []
    for managed in (True, False):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        ng.prepare(model, optimizer if managed else None, "fp8_delayed")
        torch.manual_seed(1)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(4, 32)).square().sum().backward()
            optimizer.step()
        with torch.no_grad():
            model.eval()(torch.randn(4, 32))
        model.train()(torch.randn(4, 32))  # here the lazy one rolls
        scales.append([s.quant_scale.clone() for layer in (model[0], model[2]) for s in layer.delayed_slots().values()])
    assert scales[0] == scales[1]
