"""An observation's figures are those of the casts that training made, and looking changes no bit of it."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.numerics import rounding
from narrowgauge.numerics.measure import sqnr_db
from narrowgauge.observe.run_header import formats
from narrowgauge.optim.storage import decode
from narrowgauge.tensors.quantized import QuantizedTensor
from narrowgauge.tensors.tallies import values_of

WIDTH = 64


class Net(nn.Module):
    """Two products with a norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.norm(self.up(x))))


def prepared(recipe: str, lr: float = 1e-3, **fields: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return ng.prepare(model, optimizer, ng.recipe(recipe, min_state_size=1, **fields))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    torch.manual_seed(number)
    x = torch.randn(32, WIDTH)
    (model(x).float() - x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def stored(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Every tensor that training keeps, as bytes."""
    tensors = [*model.state_dict().values()]
    tensors += [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    found: list[Tensor] = []
    for t in tensors:
        parts = [t.codes, t.dequant_scale, t.amax] if isinstance(t, QuantizedTensor) else [t]
        found += [part.detach().contiguous().view(-1).view(torch.uint8).clone() for part in parts]
    return found


RECIPES = ("narrow8", "fp8_delayed", "fp8_lm_o2", "bf16", "bf16_pure", "nvfp4")


@pytest.mark.parametrize("recipe", RECIPES)
def test_looking_changes_no_bit_and_draws_no_random_number(recipe: str) -> None:
    ends = []
    for every, histograms_every in ((0, None), (1, 1), (3, 0)):
        model, optimizer = prepared(recipe)
        observation = ng.observe.Observation(model, optimizer, every, histograms_every)
        for number in range(1, 8):
            with observation.step(number):
                step(model, optimizer, number)
            assert (observation.read() is not None) == (every > 0 and number % every == 0)
        ends.append([*stored(model, optimizer), torch.get_rng_state()])
    for others in ends[1:]:
        assert len(others) == len(ends[0]) and all(map(torch.equal, ends[0], others))


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8", "nvfp4", "fp8_block"])
def test_operands_have_the_error_and_scale_of_their_casts(recipe: str) -> None:
    model, optimizer = prepared(recipe)
    layer = model.get_submodule("down")
    seen: dict[str, Tensor] = {"weight": layer.weight.detach().clone()}
    layer.register_forward_pre_hook(lambda module, args: seen.update(input=args[0].detach().clone()))
    layer.register_full_backward_hook(lambda module, grads, outs: seen.update(grad_output=outs[0].detach().clone()))
    observation = ng.observe.Observation(model, optimizer, every=1)
    with observation.step(1):
        step(model, optimizer, 1)
    found = observation.read()
    assert found is not None and set(found.layers["down"]) >= {"input", "weight", "grad_output"}
    for role, x in seen.items():
        spec = getattr(layer.training_casts, role)
        if spec.is_stochastic:  # another draw gives another error
            continue
        q = ng.quantize(x, spec)
        measures = found.layers["down"][role]
        assert measures["amax"] == x.abs().max().item()
        assert measures["sqnr_db"] == pytest.approx(sqnr_db(x, q.dequantize(torch.float32)), abs=0.05)  # bf16 carriers
        assert 10 < measures["sqnr_db"] < 60
        assert measures["scale"] > 0 and measures["scale"] == pytest.approx(_largest_scale(q), rel=1e-6)


def _largest_scale(q: QuantizedTensor) -> float:
    """By the values: the largest step between a code and the value it stands for."""
    values, plain = q.dequantize(torch.float64), rounding.decode(q.codes, q.spec.format).double()
    there = plain != 0
    return float((values[there] / plain[there]).abs().max())


def test_a_gradient_has_the_error_of_its_cast_and_its_zeros() -> None:
    model, optimizer = prepared("narrow8")
    wide: dict[str, Tensor] = {}
    weight = model.get_submodule("up").weight
    weight.register_hook(lambda grad: wide.update(grad=grad.detach().clone()))
    kept: dict[str, Tensor] = {}
    optimizer.register_step_pre_hook(lambda *_: kept.update(grad=values_of(weight.grad)))
    observation = ng.observe.Observation(model, optimizer, every=1, histograms_every=1)
    with observation.step(1):
        step(model, optimizer, 1)
    found = observation.read()
    assert found is not None and found.histograms is not None
    x, y, measures = wide["grad"], kept["grad"], found.layers["up"]["grad"]
    assert measures["sqnr_db"] == pytest.approx(sqnr_db(x, y), abs=1e-6) and 25 < measures["sqnr_db"] < 40
    assert measures["flushed"] == ((x != 0) & (y == 0)).sum().item() / x.numel()
    assert measures["zero"] == (y == 0).sum().item() / y.numel()
    assert measures["amax"] == x.abs().max().item() and measures["saturated"] == 0
    histogram = found.histograms["up"]["grad"]
    assert sum(histogram["counts"]) + histogram["zeros"] == x.numel()
    assert histogram["low"] + len(histogram["counts"]) - 1 == math.floor(math.log2(measures["amax"]))


def test_a_gradient_that_is_clipped_has_the_magnitude_of_its_cast() -> None:
    model, optimizer = prepared("narrow8")
    wide: dict[str, Tensor] = {}
    model.get_submodule("up").weight.register_hook(lambda grad: wide.update(grad=grad.detach().clone()))

    def clip(*_: object) -> None:
        ng.optim.clip_grad_norm_(model.parameters(), 1e-3)

    optimizer.register_step_pre_hook(clip)
    observation = ng.observe.Observation(model, optimizer, every=1, histograms_every=1)
    with observation.step(1):
        step(model, optimizer, 1)
    found = observation.read()
    assert found is not None and found.histograms is not None
    assert found.layers["up"]["grad"]["amax"] == wide["grad"].abs().max().item()
    assert found.layers["up"]["grad"]["sqnr_db"] > 25
    histogram = found.histograms["up"]["grad"]
    assert histogram["low"] + len(histogram["counts"]) - 1 == math.floor(math.log2(wide["grad"].abs().max().item()))


def test_moments_have_the_error_of_their_storage() -> None:
    model, optimizer = prepared("narrow8")
    step(model, optimizer, 1)
    weight = model.get_submodule("up").weight
    before = {role: decode(optimizer.state[weight][role], weight.shape).double() for role in ("exp_avg", "exp_avg_sq")}
    grads: dict[str, Tensor] = {}
    optimizer.register_step_pre_hook(lambda *_: grads.update(g=values_of(weight.grad).double()))
    observation = ng.observe.Observation(model, optimizer, every=1)
    with observation.step(1):
        step(model, optimizer, 2)
    found = observation.read()
    assert found is not None
    exact = {
        "exp_avg": 0.9 * before["exp_avg"] + 0.1 * grads["g"],
        "exp_avg_sq": 0.999 * before["exp_avg_sq"] + 0.001 * grads["g"].square(),
    }
    for role, values in exact.items():
        now = decode(optimizer.state[weight][role], weight.shape)
        measures = found.layers["up"][role]
        assert measures["sqnr_db"] == pytest.approx(sqnr_db(values, now), abs=1e-3) and 35 < measures["sqnr_db"] < 60
        assert measures["amax"] == pytest.approx(values.abs().max().item(), rel=1e-6)
        assert measures["flushed"] == ((values != 0) & (now == 0)).sum().item() / now.numel()


@pytest.mark.parametrize(("lr", "lowest", "highest"), [(1e-7, 0.9, 1.0), (1e-1, 0.0, 0.01)])
def test_updates_below_half_a_unit_of_the_parameter_are_lost(lr: float, lowest: float, highest: float) -> None:
    with pytest.warns(UserWarning, match="updates below half a unit"):
        model, optimizer = prepared("bf16_pure", lr, param=ng.CastSpec(ng.formats.BF16))
    before = copy.deepcopy(model.state_dict())
    observation = ng.observe.Observation(model, optimizer, every=1)
    with observation.step(1):
        step(model, optimizer, 1)
    found = observation.read()
    assert found is not None
    stays = (before["up.weight"] == model.state_dict()["up.weight"]).double().mean().item()
    assert found.layers["up"]["param"]["lost"] == pytest.approx(stays, abs=0.01)  # nearly every gradient is not zero
    assert lowest <= found.layers["up"]["param"]["lost"] <= highest


def test_an_update_of_nothing_is_not_lost() -> None:
    model, optimizer = prepared("bf16_pure", lr=0.0)
    observation = ng.observe.Observation(model, optimizer, every=1)
    with observation.step(1):
        step(model, optimizer, 1)
    found = observation.read()
    assert found is not None and "lost" not in found.layers["up"]["param"]


def test_values_that_no_gradient_moves_are_no_lost_updates() -> None:
    model, optimizer = prepared("bf16_pure", lr=1e-1)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    weight = model.get_submodule("up").weight
    weight.register_hook(lambda grad: torch.cat([torch.zeros_like(grad[:WIDTH]), grad[WIDTH:]]))
    before = weight.detach().clone()
    observation = ng.observe.Observation(model, optimizer, every=1)
    with observation.step(1):
        step(model, optimizer, 1)
    found = observation.read()
    assert found is not None and torch.equal(before[:WIDTH], weight[:WIDTH])
    assert found.layers["up"]["param"]["lost"] < 0.01  # of those that were to move


@pytest.mark.parametrize(("recipe", "lr"), [("narrow8", 1e-5), ("fp8_lm_o2", 3e-4)], ids=["residual", "master"])
def test_an_update_that_only_residual_or_master_take_in_is_not_lost(recipe: str, lr: float) -> None:
    model, optimizer = prepared(recipe, lr)
    before = stored(model, optimizer)[0]  # bytes of the weight's numbers or codes
    observation = ng.observe.Observation(model, optimizer, every=1)
    with observation.step(1):
        step(model, optimizer, 1)
    found = observation.read()
    stays = (before == stored(model, optimizer)[0]).double().mean().item()
    assert found is not None and found.layers["up"]["param"]["lost"] < 0.25 < 0.4 < stays
    assert found.layers["up"]["param"]["sqnr_db"] > 70  # of all digits that are kept: bf16 alone has about 56


def test_an_observation_that_is_off_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = prepared("narrow8")
    observation = ng.observe.Observation(model, optimizer, every=0)
    monkeypatch.setattr(observation, "begin", None)  # it would fail if it were called
    for number in range(1, 201):
        assert not observation.due(number)
    with observation.step(50):
        step(model, optimizer, 1)
    assert observation.read() is None


def test_histograms_come_at_every_fourth_sample_where_nothing_else_is_asked_for() -> None:
    observation = ng.observe.Observation(nn.Linear(2, 2), every=2)
    found = {}
    for number in range(1, 17):
        with observation.step(number):
            pass
        seen = observation.read()
        if seen is not None:
            found[number] = seen.histograms is not None
    assert found == {number: number % 8 == 0 for number in range(2, 17, 2)}


def test_of_several_processes_the_figures_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that saw the same: twice the values, and the same shares."""

    def gather(everyone: list[object], mine: object) -> None:
        everyone[:] = [mine, mine]

    found = []
    for processes in (1, 2):
        model, optimizer = prepared("narrow8")
        observation = ng.observe.Observation(model, optimizer, every=1, histograms_every=1)
        with observation.step(1):
            step(model, optimizer, 1)
        with monkeypatch.context() as patch:
            if processes == 2:
                patch.setattr(torch.distributed, "is_initialized", lambda: True)
                patch.setattr(torch.distributed, "get_world_size", lambda: 2)
                patch.setattr(torch.distributed, "get_backend", lambda: "gloo")
                patch.setattr(torch.distributed, "all_gather_object", gather)
            found.append(observation.read())
    alone, both = found
    assert alone is not None and both is not None and alone.histograms and both.histograms
    assert both.layers == alone.layers
    for role in ("input", "grad", "exp_avg"):
        one, two = alone.histograms["up"][role], both.histograms["up"][role]
        assert two == {**one, "counts": [2 * count for count in one["counts"]], "zeros": 2 * one["zeros"]}


def test_layers_come_back_as_they_were_after_an_error_in_a_sampled_step() -> None:
    model, optimizer = prepared("narrow8")
    observation = ng.observe.Observation(model, optimizer, every=1)
    with pytest.raises(ZeroDivisionError), observation.step(1):
        step(model, optimizer, 1)
        raise ZeroDivisionError
    assert model.get_submodule("up").counter is None and optimizer.watches == ()


def test_formats_of_the_header_have_the_ranges_of_their_formats() -> None:
    model, optimizer = prepared("narrow8")
    found = formats(model, optimizer)["up"]
    assert found["weight"] == {
        "format": "E4M3FN", "granularity": "per tensor", "scale": "current, float32", "max": 448.0, "min": 2.0**-9,
    }  # fmt: skip
    assert found["grad_output"]["format"] == "E5M2" and found["grad_output"]["min"] == 2.0**-16
    assert set(found) == {"input", "weight", "grad_output", "param", "grad", "exp_avg", "exp_avg_sq"}
    assert set(formats(*prepared("fp32"))["up"]) == {"param", "grad"}


@pytest.mark.parametrize("recipe", ["narrow8", "fp8_delayed", "fp8_lm_o2"])
def test_one_observation_inside_another_takes_nothing_from_it(recipe: str) -> None:
    """A guard and an observation of one's own are both due at some steps."""
    alone = prepared(recipe)
    wanted = ng.observe.Observation(*alone, every=1, histograms_every=1)
    with wanted.step(1):
        step(*alone, 1)
    model, optimizer = prepared(recipe)
    outer = ng.observe.Observation(model, optimizer, every=1, histograms_every=1)
    inner = ng.observe.Observation(model, optimizer, every=1, histograms_every=0)
    with outer.step(1):
        with inner.step(1):
            step(model, optimizer, 1)
    expected, seen = wanted.read(), inner.read()
    assert expected is not None and outer.read() == expected
    assert seen is not None and seen.layers == expected.layers and seen.histograms is None
    with outer.step(2), inner.step(2):
        pass
    assert outer.read() == ({}, {})  # and nothing looks any more
    assert stored(model, optimizer) and all(map(torch.equal, stored(*alone), stored(model, optimizer)))
