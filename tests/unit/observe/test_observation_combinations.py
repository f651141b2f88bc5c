"""An observation beside what else a loop may do: others that look, errors, released gradients, scalers, odd layers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import narrowgauge as ng
from narrowgauge.numerics.measure import sqnr_db
from narrowgauge.observe import Observation
from narrowgauge.optim.release import release_gradients
from narrowgauge.optim.storage import decode

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def prepared(recipe: str | ng.Recipe = "narrow8", model: nn.Module | None = None, **fields: Any) -> tuple[Any, Any]:
    model = model or mlp()
    return ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3, **fields), recipe)


def step(model: nn.Module, optimizer: Any, scaler: Any = None) -> Tensor:
    loss = model(X).float().square().mean()
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    return loss.detach()


def looked_at(model: Any, optimizer: Any, run: Any = step, *args: Any) -> dict[str, Any]:
    observation = Observation(model, optimizer, every=1)
    with observation.step(1):
        run(model, optimizer, *args)
    found = observation.read()
    assert found is not None
    return found.layers


def test_compiled_code_is_compiled_again_when_the_last_of_them_has_ended() -> None:
    counter = CompileCounterWithBackend("eager")
    double = torch.compile(lambda x: x * 2, backend=counter)
    model = nn.Linear(4, 4)
    first, second = Observation(model, None, 1), Observation(model, None, 1)
    first.begin(1)
    second.begin(1)
    first.end()
    double(torch.ones(3))
    assert counter.frame_count == 0  # the second still looks
    second.end()
    double(torch.ones(3))
    assert counter.frame_count == 1


@pytest.mark.parametrize("recipe", ["narrow8", "fp8_current", "fp8_lm_o2"])
def test_observations_that_overlap_see_each_their_own_and_leave_nothing_behind(recipe: str) -> None:
    """Callbacks are called in one order at a step's beginning and at its end."""
    expected = looked_at(*prepared(recipe))
    model, optimizer = prepared(recipe)
    first, second, third = (Observation(model, optimizer, every=1, histograms_every=at) for at in (0, 1, 0))
    first.begin(1)
    second.begin(1)
    third.begin(1)
    third.end()
    step(model, optimizer)
    first.end()
    second.end()
    one, other, none = first.read(), second.read(), third.read()
    assert one is not None and other is not None and none is not None
    assert one.layers == other.layers == expected and none.layers == {}
    assert one.histograms is None and other.histograms is not None
    second.begin(2)
    first.begin(2)
    second.end()
    step(model, optimizer)
    first.end()
    one, other = first.read(), second.read()
    assert one is not None and other is not None and other.layers == {} and set(one.layers) == set(expected)
    assert all(getattr(module, "counter", None) is None for module in model.modules())
    assert not getattr(optimizer, "watches", ())


def test_of_a_step_that_failed_nothing_is_told_in_a_later_one() -> None:
    model, optimizer = prepared()
    observation = Observation(model, optimizer, every=2)
    with pytest.raises(ZeroDivisionError), observation.step(2):
        model(X)
        _ = 1 / 0
    with observation.step(3):
        step(model, optimizer)
    assert observation.read() is None
    for number in (4, 5):
        with observation.step(number):
            step(model, optimizer)
            break  # leaves as the end does
    found = observation.read()
    assert found is not None and "exp_avg" in found.layers["0"]


def test_a_generator_that_is_closed_within_a_step_looks_no_longer() -> None:
    model, optimizer = prepared()
    observation = Observation(model, optimizer, every=1)

    def batches() -> Iterator[int]:
        with observation.step(1):
            yield 1

    stream = batches()
    next(stream)
    stream.close()
    assert model[0].counter is None and optimizer.watches == () and observation.read() is None


@pytest.mark.parametrize("recipe", ["narrow8", "fp8_current"])
def test_gradients_are_those_of_the_optimizer_that_is_looked_at(recipe: str) -> None:
    model = mlp()
    half = torch.optim.AdamW(model[0].parameters(), lr=1e-3)
    model[2].requires_grad_(recipe != "narrow8")  # whose other parameters would lose digits
    model, half = ng.prepare(model, half, recipe)
    assert {name for name, roles in looked_at(model, half).items() if "grad" in roles} == {"0", "0.bias"}


def test_released_gradients_are_seen_within_backward_and_no_bit_changes() -> None:
    plain, released, looked = prepared(), prepared(), prepared()
    for _, optimizer in (released, looked):
        release_gradients(optimizer)
    expected = looked_at(*plain)
    found = looked_at(*looked)
    step(*released)
    assert found == expected
    for a, b in zip(released[0].parameters(), looked[0].parameters(), strict=True):
        assert torch.equal(a, b)


def test_under_a_loss_scale_gradients_that_the_step_reads_are_true_and_casts_are_those_of_the_scaled_loss() -> None:
    """Powers of two change no digit: what is cast, is cast by a scale so many times as large."""
    scale = 1024.0
    found = {}
    for name, recipe, scaler in (
        ("plain", "fp8_current", None),
        ("torch's", "fp8_current", torch.amp.GradScaler("cpu", init_scale=scale)),
        ("fused", "fp8_current", torch.amp.GradScaler("cpu", init_scale=scale)),
        ("unscaled first", "fp8_current", torch.amp.GradScaler("cpu", init_scale=scale)),
    ):
        model, optimizer = prepared(recipe, fused=name in ("fused", "unscaled first"))

        def run(model: Any, optimizer: Any, name: str = name, scaler: Any = scaler) -> None:
            if name == "unscaled first":
                scaler.scale(model(X).float().square().mean()).backward()
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
            else:
                step(model, optimizer, scaler)

        found[name] = looked_at(model, optimizer, run)
    expected = found.pop("plain")
    for layers in found.values():
        for layer, roles in layers.items():
            assert roles["grad"] == expected[layer]["grad"]
        for layer in ("0", "2"):
            assert layers[layer]["grad_output"]["amax"] == scale * expected[layer]["grad_output"]["amax"]
            assert layers[layer]["grad_output"]["sqnr_db"] == expected[layer]["grad_output"]["sqnr_db"]


def test_of_a_step_that_is_skipped_there_are_operands_and_no_update() -> None:
    model, optimizer = prepared()
    observation = Observation(model, optimizer, every=1)
    with observation.step(1):
        (model(X).square().mean() * float("nan")).backward()
        optimizer.step()
    found = observation.read()
    assert optimizer.step_was_skipped and found is not None
    assert set(found.layers["0"]) == {"input", "weight", "grad_output", "grad"}
    assert "sqnr_db" not in found.layers["0"]["grad"] and math.isnan(found.layers["0"]["grad"]["amax"])


class Odd(nn.Module):
    """A layer that is read twice, one that is never reached, a frozen one, and a tied pair."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.never, self.frozen = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.tied = nn.Linear(64, 64)
        self.tied.weight = self.twice.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.frozen(self.twice(torch.tanh(self.twice(x)))))


def test_odd_layers_have_the_shares_of_their_tensors() -> None:
    model, optimizer = prepared("fp8_current", Odd())
    seen: list[Tensor] = []
    model.twice.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().float()))
    found = looked_at(model, optimizer)
    assert "never" not in found and set(found["frozen"]) == {"input", "weight", "grad_output"}
    assert set(found["tied"]) == {"input", "weight", "grad_output"}  # its weight's gradient stands under the first name
    cast = [ng.quantize(x, model.twice.training_casts.input).dequantize() for x in seen]
    assert found["twice"]["input"]["sqnr_db"] == pytest.approx(
        float(sqnr_db(torch.cat(seen), torch.cat(cast))), abs=1e-4
    )
    assert found["twice"]["input"]["amax"] == float(torch.cat(seen).abs().max())


def test_a_model_that_changes_its_dtype_is_looked_at_as_it_is_then() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = ng.prepare(model, optimizer, "fp8_current")
    observation = Observation(model, optimizer, every=1)
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float32), 1):
        model.to(dtype)
        weight = model[0].weight.detach().float().clone()
        with observation.step(number):
            step(model, optimizer)
        found = observation.read()
        assert found is not None and found.layers["0"]["weight"]["amax"] == float(weight.abs().max())
        assert "grad" in found.layers["0"]


@pytest.mark.parametrize("name", ["Muon", "Lion", "SGD"])
def test_moments_of_other_rules_have_the_error_of_their_storage(name: str) -> None:
    kept: list[list[Tensor]] = []
    for looks in (False, True):
        model = mlp()
        for layer in (model[0], model[2]):
            layer.bias = None
        fields: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
        optimizer = getattr(ng.optim, name)(model.named_parameters(), lr=1e-3, **fields)
        model, optimizer = ng.prepare(model, optimizer, ng.recipe("narrow8", min_state_size=1))
        observation = Observation(model, optimizer, every=int(looks))
        for number in (1, 2):
            with observation.step(number):
                step(model, optimizer)
            found = observation.read()
        kept.append([p.detach().clone() for p in model.parameters()])
        moment = "exp_avg" if name == "Lion" else "momentum_buffer"
        stored = optimizer.state[model[0].weight][moment]
        kept[-1].append(decode(stored, model[0].weight.shape))
        if found is not None:
            assert {*found.layers["0"]} == {"input", "weight", "grad_output", "grad", "param", "exp_avg"}
            # eight bits on the square-root curve: their least distance is a 127th of the largest
            assert 20.0 < found.layers["0"]["exp_avg"]["sqnr_db"] < 50.0
    assert all(map(torch.equal, *kept))
