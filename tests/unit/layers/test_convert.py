"""Conversion keeps every object of the model, skips what it must, and says so."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from states import assert_same_state, state_of
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

import narrowgauge as ng
from narrowgauge.layers import norm
from narrowgauge.layers.linear import Linear
from narrowgauge.layers.report import CONVERTED, KEPT, SKIPPED

RECIPES = ng.recipe_names()


class OwnForward(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Renamed(nn.Linear):
    pass


class Twice(nn.Module):
    """The same layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.b = self.a

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def test_a_root_layer_is_converted_in_place() -> None:  # case 59
    layer = nn.Linear(16, 16)
    weight = layer.weight
    model, _ = ng.prepare(layer, None, "fp8_current")
    assert model is layer and type(model) is Linear and model.weight is weight
    assert ng.report(model)[""].status == CONVERTED


def test_float32_layers_are_torchs_own_unless_their_operands_are_tf32() -> None:
    """TF32 has 10 bits of mantissa: it has no 1 + 2^-11, whose half is rounded to even, and it has 1 + 2^-10."""
    x = torch.zeros(2, 16)
    x[0, 0], x[1, 0] = 1 + 2.0**-11, 1 + 2.0**-10
    for recipe, kind, expected in (("fp32", nn.Linear, x[0, 0].item()), ("tf32", Linear, 1.0)):
        layer = nn.Linear(16, 16, bias=False)
        with torch.no_grad():
            layer.weight.copy_(torch.eye(16))
        ng.convert(layer, recipe)
        assert type(layer) is kind
        assert layer(x)[:, 0].tolist() == [expected, x[1, 0].item()]


def test_hooks_fire_once_a_call() -> None:  # case 59
    layer = nn.Linear(16, 16)
    calls: list[str] = []
    layer.register_forward_hook(lambda *_: calls.append("forward"))
    layer.register_forward_pre_hook(lambda *_: calls.append("before"))
    layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    layer.weight.register_hook(lambda grad: calls.append("gradient"))
    ng.prepare(layer, None, "fp8_current")
    layer(torch.randn(2, 16, requires_grad=True)).sum().backward()
    assert sorted(calls) == ["backward", "before", "forward", "gradient"]


def test_subclasses_and_computed_weights_are_skipped_and_reported() -> None:  # case 59
    model = nn.Sequential(
        OwnForward(16, 16), Renamed(16, 16), weight_norm(nn.Linear(16, 16)), nn.Linear(16, 16), nn.Conv1d(16, 16, 1)
    )
    old_style = nn.utils.spectral_norm(nn.Linear(16, 16))
    model.append(old_style)
    classes = [type(module) for module in model]
    report = ng.convert(model, "fp8_current")
    assert [type(module) for module in model] == [*classes[:3], Linear, *classes[4:]]
    assert [report[str(at)].status for at in range(6)] == [SKIPPED, SKIPPED, SKIPPED, CONVERTED, KEPT, SKIPPED]
    for at, words in ((0, "a forward of its own"), (1, "subclass"), (2, "parametrized (weight)"), (5, "hook")):
        assert words in report[str(at)].reason


def test_the_report_tells_what_runs_whatever_is_registered_on_a_layer_later() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    ng.convert(model, "fp8_current")
    weight_norm(model[0])
    prune.l1_unstructured(model[1], "weight", amount=0.5)
    x = torch.randn(4, 32)
    for at in range(3):
        off = (model[at](x) - nn.functional.linear(x, model[at].weight, model[at].bias)).norm()
        assert off > 0.01  # FP8
        assert (ng.report(model)[str(at)].status, ng.report(model)[str(at)].backend) == (CONVERTED, "emulated")
    report = ng.convert(model, "bf16")
    assert "FP8" not in report["1"].reason and report["1"].status == KEPT
    assert "E4M3FN" in report["0"].reason and report["0"].status == CONVERTED


def test_a_layer_without_a_size_says_what_to_do() -> None:
    model = nn.Sequential(nn.LazyLinear(32), nn.Linear(32, 32))
    report = ng.convert(model, "fp8_current")
    assert report["0"].status == SKIPPED and "run one forward pass before" in report["0"].reason


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.Conv1d(16, 16, 1)), "no torch.nn.Linear that can be converted"),
        (nn.Sequential(nn.Linear(16, 4), nn.GELU()), "'0' is kept"),
    ],
)
def test_a_recipe_that_quantizes_nothing_of_a_model_says_so(model: nn.Module, reason: str) -> None:
    with pytest.warns(UserWarning, match=f"none of this model's is quantized: .*{reason}"):
        ng.convert(model, "fp8_current")


def test_a_shared_layer_is_converted_once_and_stays_shared() -> None:  # case 59
    model = Twice()
    report = ng.convert(model, "fp8_delayed")
    assert model.a is model.b and type(model.a) is Linear
    assert [row.name for row in report] == ["a"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ng.prepare(model, optimizer, "fp8_delayed")
    model(torch.randn(2, 16)).sum().backward()
    optimizer.step()
    assert model.a.amax_rolls == 1


def test_converting_twice_changes_nothing(mlp) -> None:  # case 59
    model = mlp()
    ng.convert(model, "fp8_delayed")
    model(torch.randn(4, 32)).sum().backward()
    model(torch.randn(4, 32)).sum().backward()
    before, buffers = state_of(model), dict(model.named_buffers())
    assert str(ng.convert(model, "fp8_delayed")) == str(ng.report(model))
    assert_same_state(before, state_of(model))
    assert all(buffers[name] is buffer for name, buffer in model.named_buffers())


def test_another_recipe_converts_again(mlp) -> None:
    model = mlp()
    x = torch.randn(4, 32)
    plain = model(x)
    keys = model.state_dict().keys()
    seen = {}
    for recipe in ("fp8_delayed", "bf16", "fp8_current", "fp32"):
        ng.convert(model, recipe)
        seen[recipe] = model(x)
    assert torch.equal(seen["fp32"], plain) and type(model[0]) is nn.Linear
    assert model.state_dict().keys() == keys
    assert not torch.equal(seen["fp8_current"], plain)
    assert "quantized" not in model[0].__dict__


@pytest.mark.parametrize("recipe", RECIPES)
def test_requires_grad_survives_and_frozen_weights_stay(recipe: str, mlp) -> None:  # case 56
    model = nn.Sequential(mlp(), nn.LayerNorm(32), nn.Linear(32, 32))
    for at, p in enumerate(model.parameters()):
        p.requires_grad_(at % 2 == 0)
    wanted = {name: p.requires_grad for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)

    def check(module: nn.Module) -> None:
        assert {name: p.requires_grad for name, p in module.named_parameters()} == wanted

    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    model, optimizer = ng.prepare(model, optimizer, recipe)
    check(model)
    trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    for _ in range(3):
        model(torch.randn(4, 32)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, p in model.named_parameters():
        assert torch.equal(p.detach(), frozen[name]) if name in frozen else not torch.equal(p.detach(), trained[name])
    check(copy.deepcopy(model))
    model.load_state_dict(model.state_dict())
    check(model)
    check(model.to(torch.bfloat16))


def test_norms_without_weight_or_bias_convert_and_keep_their_bits() -> None:  # case 57
    model = nn.Sequential(
        nn.LayerNorm(32, elementwise_affine=False),
        nn.LayerNorm(32, bias=False),
        nn.RMSNorm(32),
        nn.RMSNorm(32, elementwise_affine=False),
        nn.LayerNorm(32),
        nn.Linear(32, 32, bias=False),
    )
    originals = copy.deepcopy(model)
    keys = list(model.state_dict())
    report = ng.convert(model, "fp8_current")
    assert [row.status for row in report] == [CONVERTED] * 6
    assert [type(m) for m in model[:3]] == [norm.LayerNorm, norm.LayerNorm, norm.RMSNorm]
    assert list(model.state_dict()) == keys
    x = torch.randn(4, 32) * 3 + 1
    for converted, original in list(zip(model, originals, strict=True))[:5]:
        assert torch.equal(converted(x), original(x))


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_norm_statistics_are_float32_for_half_inputs(kind: type[nn.Module]) -> None:
    layer = kind(4096)
    x = (torch.randn(2, 4096) * 300).half()  # the squares overflow float16
    exact = layer(x.float())
    ng.convert(layer, "fp16")
    y = layer(x)
    assert y.dtype is torch.float16
    assert torch.equal(y, exact.half())


def test_ties_stay(mlp) -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(64, 32), "lm_head": nn.Linear(32, 64, bias=False)})
    model["lm_head"].weight = model["embedding"].weight
    ng.convert(model, ng.recipe("fp8_current", exclude=()))
    assert model["lm_head"].weight is model["embedding"].weight


def test_a_glob_that_matches_nothing_is_told(mlp) -> None:
    recipe = ng.recipe("fp8_current", exclude=("*.mpl.*",))
    with pytest.warns(UserWarning, match=r"'\*\.mpl\.\*' matches no linear layer"):
        ng.convert(mlp(), recipe)


def test_the_report_names_every_layer_with_backend_and_reason(mlp) -> None:
    model = nn.ModuleDict(
        {"embed": nn.Embedding(64, 32), "mlp": mlp(), "small": nn.Linear(32, 4), "lm_head": nn.Linear(32, 64)}
    )
    report = ng.convert(model, ng.recipe("fp8_current", first_last=(1, 0)))
    rows = {row.name: row for row in report}
    assert list(rows) == ["embed", "mlp.0", "mlp.2", "small", "lm_head"]
    assert [rows[name].status for name in rows] == [KEPT, KEPT, CONVERTED, KEPT, KEPT]
    assert "among the first 1" in rows["mlp.0"].reason
    assert "include" in rows["mlp.2"].reason and "E4M3FN" in rows["mlp.2"].reason
    assert "min_size=16" in rows["small"].reason
    assert "head" in rows["lm_head"].reason
    assert rows["mlp.2"].backend == "emulated"
    table = str(report).splitlines()
    assert table[0].split() == ["name", "module", "status", "backend", "reason"] and len(table) == 2 + len(rows)
    assert report.to_dict()["rows"][1]["name"] == "mlp.0"
    assert report.counts() == {CONVERTED: 1, KEPT: 4, SKIPPED: 0}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"smooth": "*.dwon"}, r"'\*.dwon' matches no linear layer; check its spelling"),
        ({"smooth": "1", "exclude": "1"}, "smooth='1' does nothing.*'1' is kept .matches exclude glob '1'"),
    ],
)
def test_smoothing_of_no_layer_is_said(fields: dict[str, str], words: str) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with pytest.warns(UserWarning, match=words):
        ng.convert(model, ng.recipe("fp8_current", **fields))


def test_conversion_is_silent_for_the_named_recipes(mlp) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for recipe in RECIPES:
            ng.convert(mlp(), recipe)
