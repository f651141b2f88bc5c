"""EMA: float32 averages of parameters in any format."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import narrowgauge as ng
from narrowgauge.errors import ConfigError
from narrowgauge.numerics.formats import E4M3FN, FP16
from narrowgauge.optim import EMA

pytestmark = pytest.mark.usefixtures("one_thread", "seeded")
CastSpec = ng.CastSpec
STORED = [None, "bf16", CastSpec(E4M3FN), CastSpec(E4M3FN, scale=ng.TENSOR_POW2), CastSpec(FP16, scale=ng.TENSOR_POW2)]


def of_ones(stored: CastSpec | str | None) -> nn.Linear:
    layer = nn.Linear(16, 16, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    if isinstance(stored, CastSpec):
        layer.weight = nn.Parameter(ng.quantize(layer.weight.detach(), stored))
    return layer.bfloat16() if stored == "bf16" else layer


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 160), nn.LayerNorm(160), nn.GELU(), nn.Linear(160, 32))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 32)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_averages_move_where_the_format_of_the_parameters_would_not(stored: CastSpec | str | None) -> None:  # case 47
    layer = of_ones(stored)
    ema = EMA(layer, decay=0.9999)
    with torch.no_grad():
        layer.weight.fill_(2.0)
    for _ in range(1000):
        ema.update()
    average = ema.averages["weight"]
    assert ema.updates == 1000 and average.dtype is torch.float32
    assert (average - 1.0952).abs().max() <= 1e-3
    assert (average - (2 - 0.9999**1000)).abs().max() <= 1e-4
    in_format = torch.ones(1, dtype=torch.bfloat16)
    for _ in range(1000):
        in_format.lerp_(torch.full_like(in_format, 2.0), 1e-4)
    assert in_format == 1.0  # what is held against
    ema.copy_to(layer)
    tolerance = {None: 1e-7, "bf16": 2**-8}.get(stored, 2**-11 if getattr(stored, "format", 0) is FP16 else 2**-4)
    assert (layer.weight.detach().float() - average).abs().max() <= tolerance * 1.0952


def test_each_update_is_the_formula() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = EMA(model, decay=0.9)
    expected = {name: p.detach().double() for name, p in model.named_parameters()}
    for _ in range(5):
        step(model, optimizer)
        ema.update()
        for name, p in model.named_parameters():
            expected[name] = 0.9 * expected[name] + 0.1 * p.detach().double()
    assert ema.averages.keys() == expected.keys()
    for name, average in ema.averages.items():
        assert torch.allclose(average.double(), expected[name], rtol=0, atol=1e-6)
    ema.decay = 0.0
    ema.update()
    assert all(torch.equal(ema.averages[name], p) for name, p in model.named_parameters())


@pytest.mark.parametrize("recipe", ["narrow8", "fp8_lm_o3"])
def test_digits_that_the_optimizer_holds_are_averaged(recipe: str) -> None:
    model = network()
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe)
    ema, blind = EMA(model, optimizer, decay=0.5), EMA(model, decay=0.5)
    expected = {name: optimizer.full_values(p) for name, p in model.named_parameters()}
    for _ in range(4):
        step(model, optimizer)
        ema.update()
        blind.update()
        for name, p in model.named_parameters():
            expected[name] = 0.5 * expected[name] + 0.5 * optimizer.full_values(p)
    for name, average in ema.averages.items():
        assert torch.allclose(average, expected[name], rtol=1e-6, atol=1e-7)
    name = "0.weight"
    assert (blind.averages[name] - expected[name]).abs().max() > 100 * (ema.averages[name] - expected[name]).abs().max()
    ema.copy_to()
    for name, p in model.named_parameters():  # the optimizer has what the parameter cannot hold
        master = {"narrow8": 2**-8 / 254, "fp8_lm_o3": 2**-11}[recipe]
        error = (optimizer.full_values(p) - ema.averages[name]).abs()
        assert (error <= 1.001 * master * ema.averages[name].abs() + 1e-6).all()


@pytest.mark.parametrize("recipe", ["fp32", "narrow8", "narrow8_sr", "fp8_lm_o1", "fp8_lm_o3"])
def test_applied_averages_leave_no_trace(recipe: str) -> None:
    runs = []
    for look in (False, True):
        model = network()
        model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), recipe)
        ema = EMA(model, optimizer, decay=0.9)
        for seed in range(4):
            torch.manual_seed(seed)
            step(model, optimizer)
            ema.update()
            if look:
                with pytest.raises(KeyError), ema.applied():
                    for name, p in model.named_parameters():
                        average = ema.averages[name]
                        spec = getattr(p, "spec", None)
                        shown = average.to(p.dtype) if spec is None else ng.quantize(average, spec)
                        assert torch.equal(p, shown)
                    raise KeyError("as an evaluation may")
        runs.append([p.detach().float().clone() for p in model.parameters()] + list(ema.averages.values()))
        runs[-1] += [getattr(optimizer, "full_values", lambda p: p.detach().clone())(p) for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_graphs_from_before_live_on_and_those_from_inside_do_not() -> None:
    model = nn.Linear(16, 16).bfloat16()
    ema = EMA(model)
    with torch.no_grad():
        model.weight.mul_(2)
    x = torch.randn(2, 16, dtype=torch.bfloat16, requires_grad=True)
    before = model(x).sum()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    with ema.applied():
        inside = model(x).sum()
    before.backward()
    assert torch.equal(x.grad, expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        inside.backward()


def test_frozen_parameters_and_buffers_are_the_models_own() -> None:
    model = network()
    model[0].requires_grad_(False)
    ng.freeze(model[0], "narrow8")
    ema = EMA(model)
    assert list(ema.averages) == ["1.weight", "1.bias", "3.weight", "3.bias"]
    model.register_buffer("seen", torch.ones(3))
    with ema.applied():
        assert (model.seen == 1).all()
    tied = nn.ModuleDict({"table": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    tied["head"].weight = tied["table"].weight
    assert list(EMA(tied).averages) == ["table.weight"]


def test_a_saved_ema_goes_on_where_it_was() -> None:
    model = network().bfloat16()
    ema = EMA(model, decay=0.99)
    with torch.no_grad():
        model[0].weight.add_(1)
    ema.update()
    file = io.BytesIO()
    torch.save(ema.state_dict(), file)
    file.seek(0)
    other = EMA(network().bfloat16(), decay=0.5)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert (other.decay, other.updates) == (0.99, 1)
    assert all(torch.equal(other.averages[name], average) for name, average in ema.averages.items())
    plain = network()
    ema.copy_to(plain)  # a copy in float32 takes them as they are
    assert all(torch.equal(p, ema.averages[name]) for name, p in plain.named_parameters())


def test_a_model_that_is_prepared_later_keeps_its_averages() -> None:
    model = network()
    ema = EMA(model, decay=0.9)
    before = {name: average.clone() for name, average in ema.averages.items()}
    model, ema.optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters()), "fp8_lm_o3")
    ema.update()
    assert all(torch.allclose(ema.averages[name], before[name], atol=1e-4) for name in before)


def test_bad_input_is_refused() -> None:
    for decay in (-0.1, 1.1, math.nan, True, "0.9"):
        with pytest.raises(ConfigError, match="from 0 to 1"):
            EMA(network(), decay=decay)  # type: ignore[arg-type]
    with torch.device("meta"):
        empty = network()
    with pytest.raises(ng.NarrowgaugeError, match="meta device and has no values"):
        EMA(empty)
    ema = EMA(network())
    with pytest.raises(ng.CheckpointError, match="found none of its 'updates'"):
        ema.load_state_dict({"decay": 0.9})
    state = copy.deepcopy(ema.state_dict())
    del state["averages"]["0.bias"]
    with pytest.raises(ng.CheckpointError, match="the saved averages lack '0.bias'"):
        ema.load_state_dict(state)
    with pytest.raises(ng.CheckpointError, match="the model does not train '0.bias'"):
        other = network()
        other[0].bias.requires_grad_(False)
        EMA(other).load_state_dict(ema.state_dict())
    with pytest.raises(ng.CheckpointError, match=r"expected shape \[160\], found \[3\]"):
        state["averages"]["0.bias"] = torch.zeros(3)
        ema.load_state_dict(state)
    with pytest.raises(ng.NarrowgaugeError, match=r"'0.weight': expected shape \[160, 32\].*found none"):
        ema.copy_to(nn.Linear(2, 2))
    with ema.applied():
        for what in (ema.update, ema.copy_to):
            with pytest.raises(ng.NarrowgaugeError, match="inside `with ema.applied"):
                what()


@pytest.mark.parametrize(("recipe", "form"), [("narrow8", "bfloat16"), ("fp8_lm_o3", "E4M3FN"), ("bf16", None)])
def test_torchs_average_of_a_prepared_model_says_what_it_loses(recipe: str, form: str | None) -> None:  # case 47
    model = network()
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), recipe)
    copy.deepcopy(model)  # which warns of nothing
    if form is None:
        averaged = AveragedModel(model)
    else:
        with pytest.warns(UserWarning, match=f"AveragedModel keeps.*'0.weight': {form}.*narrowgauge.optim.EMA"):
            averaged = AveragedModel(model)
    assert averaged.module.forward.module is averaged.module
    for _ in range(2):
        step(model, optimizer)
        averaged.update_parameters(model)
    assert averaged(torch.randn(2, 32)).isfinite().all() and int(averaged.n_averaged) == 2
