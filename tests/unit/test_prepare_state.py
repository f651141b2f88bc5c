"""prepare with narrow state: what the optimizer that takes the place of torch's carries over."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.recipes.spec import CastSpec

pytestmark = pytest.mark.usefixtures("one_thread", "seeded")
FP32, FP16, BF16 = ng.formats.FP32, ng.formats.FP16, ng.formats.BF16
NARROW = ("fp8_lm_o1", "fp8_lm_o2", "fp8_lm_o3", "narrow8", "narrow8_sr", "bf16_pure")


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(64, 96), nn.Linear(96, 96), nn.LayerNorm(96), nn.Linear(96, 64, bias=False))


def groups_of(model: nn.Module) -> list[dict]:
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1, "lr": 2e-3},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 1e-3},
    ]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, scheduler=None) -> list[float]:
    ids = torch.arange(64).reshape(4, 16)
    losses = []
    for _ in range(count):
        loss = nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten().roll(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", NARROW)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_groups_and_their_settings_are_taken_over(recipe: str, kind: type) -> None:
    model = make_model()
    theirs = kind(groups_of(model), lr=5e-3, betas=(0.8, 0.9), eps=1e-6)
    groups = theirs.param_groups
    scheduler = torch.optim.lr_scheduler.LambdaLR(theirs, lambda step: 0.5**step)
    _, ours = ng.prepare(model, theirs, recipe)
    assert isinstance(ours, LowPrecisionOptimizer) and type(ours) is getattr(ng.optim, kind.__name__)
    assert ours.param_groups is groups
    assert [(g["lr"], g["betas"], g["eps"], g["weight_decay"]) for g in groups] == [
        (2e-3, (0.8, 0.9), 1e-6, 0.1),
        (1e-3, (0.8, 0.9), 1e-6, 0.0),
    ]
    assert {id(p) for g in groups for p in g["params"]} == {id(p) for p in model.parameters()}
    losses = steps(model, ours, 3, scheduler)
    assert losses[-1] < losses[0]
    assert [g["lr"] for g in ours.param_groups] == [2e-3 / 8, 1e-3 / 8]


def test_the_replaced_optimizer_is_another_name_of_the_new_one() -> None:
    model = make_model()
    theirs = torch.optim.AdamW(groups_of(model))
    scheduler = torch.optim.lr_scheduler.LambdaLR(theirs, lambda step: 0.5**step)
    _, ours = ng.prepare(model, theirs, "narrow8")
    assert isinstance(theirs, torch.optim.AdamW) and not isinstance(theirs, LowPrecisionOptimizer)
    losses = steps(model, theirs, 3, scheduler)
    assert losses[-1] < losses[0]
    assert theirs.state is ours.state and ours.state[next(model.parameters())]["step"] == 3
    assert not theirs.step_was_skipped
    first = next(model.parameters())
    first.grad = torch.full((64, 96), torch.inf)
    theirs.step()
    assert theirs.step_was_skipped and ours.step_was_skipped
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    assert type(copy.deepcopy(theirs)) is ng.optim.AdamW
    later = torch.optim.lr_scheduler.LambdaLR(theirs, lambda step: 0.1**step)
    steps(model, theirs, 2, later)
    _, again = ng.prepare(model, theirs, "fp32")
    assert again is ours


def test_recipes_with_wide_state_keep_torchs_optimizer() -> None:
    for recipe in ng.recipe_names():
        if recipe not in NARROW:
            model = make_model()
            theirs = torch.optim.AdamW(model.parameters())
            assert ng.prepare(model, theirs, recipe)[1] is theirs


@pytest.mark.parametrize("recipe", NARROW)
def test_state_that_there_is_goes_on(recipe: str) -> None:
    model = make_model()
    theirs = torch.optim.AdamW(groups_of(model))
    steps(model, theirs, 5)
    wide = [(theirs.state[p]["exp_avg"].clone(), theirs.state[p]["exp_avg_sq"].clone()) for p in model.parameters()]
    values = [p.detach().clone() for p in model.parameters()]
    _, ours = ng.prepare(model, theirs, recipe)
    # relative to the largest value: half a step of E4M3 at the top of its range, of the codes on a curve, of bfloat16
    for p, (m, v), before in zip(model.parameters(), wide, values, strict=True):
        state = ours.state[p]
        assert state["step"] == 5
        for name, expected in (("exp_avg", m), ("exp_avg_sq", v)):
            error = (state[name].dequantize() if hasattr(state[name], "dequant_scale") else state[name]) - expected
            assert error.abs().max() <= expected.abs().max() / 16
        assert (ours.full_values(p) - before).abs().max() <= before.abs().max() * 2**-8
    steps(model, ours, 2)
    assert ours.state[next(model.parameters())]["step"] == 7


@pytest.mark.parametrize(("recipe", "bound"), [("narrow8", 2**-16), ("fp8_lm_o3", 2**-11), ("fp8_lm_o2", 2**-11)])
def test_digits_come_back_when_the_recipe_changes_again(recipe: str, bound: float) -> None:
    model = make_model()
    values = [p.detach().clone() for p in model.parameters()]
    _, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters()), recipe)
    assert any(p.dtype is not FP32.dtype or isinstance(p.data, ng.QuantizedTensor) for p in model.parameters())
    _, again = ng.prepare(model, optimizer, "fp32")
    assert again is optimizer
    for p, before in zip(model.parameters(), values, strict=True):
        assert type(p) is nn.Parameter and p.dtype is torch.float32
        assert ((p - before).abs() <= before.abs() * bound + before.abs().max() * 2**-24).all()
    assert all("master" not in optimizer.state[p] for p in model.parameters())
    losses = steps(model, optimizer, 3)
    assert losses[-1] < losses[0]


class WithEmpty(nn.Module):
    """A layer of no outputs before another one, in a group that ends with it."""

    def __init__(self, empty: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.full = nn.Linear(16, 32)
        self.empty = nn.Linear(16, 0) if empty else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.full(x)
        return y if self.empty is None else torch.cat([self.empty(x), y], dim=-1)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("recipe", ["fp8_current", *NARROW])
def test_a_layer_without_outputs_counts_its_steps(recipe: str, tmp_path: Path) -> None:  # case 46
    def build(empty: bool) -> tuple[WithEmpty, torch.optim.Optimizer]:
        model = WithEmpty(empty)
        groups = [{"params": list(model.parameters())}, {"params": []}]
        return ng.prepare(model, torch.optim.AdamW(groups, lr=1e-2), ng.recipe(recipe, min_state_size=0))

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for seed in range(3):
            torch.manual_seed(seed)
            model(torch.randn(8, 16)).float().square().sum().backward()
            torch.manual_seed(seed)
            optimizer.step()
            optimizer.zero_grad()

    alone, (model, optimizer) = build(False), build(True)
    train(*alone)
    train(model, optimizer)
    fresh = build(True)
    ng.save(tmp_path / "state", model, optimizer)
    ng.load(tmp_path / "state", *fresh)
    for each, its in ((model, optimizer), fresh):
        assert [int(its.state[p]["step"]) for p in each.parameters()] == [3] * 4
        for p, q in zip(each.full.parameters(), alone[0].parameters(), strict=True):
            assert torch.equal(p.detach().float(), q.detach().float())
        assert each.empty.weight.shape == (0, 16)


@pytest.mark.parametrize("recipe", NARROW)
def test_offloaded_state_gives_the_same_weights_in_bits(recipe: str) -> None:
    results = []
    for offload in (None, "cpu"):
        model = make_model()
        _, optimizer = ng.prepare(model, torch.optim.AdamW(groups_of(model)), recipe, offload=offload)
        torch.manual_seed(1)
        steps(model, optimizer, 5)
        results.append((model, optimizer))
    (model, ours), (other, offloaded) = results
    assert offloaded.offload == "cpu"
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.full_values(p), offloaded.full_values(q))
        for name, stored in ours.state[p].items():
            found = offloaded.state[q][name]
            assert stored == found if name == "step" else torch.equal(stored.detach() + 0.0, found.detach() + 0.0)


def test_offload_also_moves_the_state_of_a_recipe_with_wide_state() -> None:
    model = make_model()
    _, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters()), "bf16", offload="cpu")
    assert isinstance(optimizer, LowPrecisionOptimizer) and optimizer.offload == "cpu"
    losses = steps(model, optimizer, 3)
    assert losses[-1] < losses[0]
    with pytest.raises(ng.NarrowgaugeError, match="offload='disk': expected 'cpu', or None"):
        ng.prepare(model, torch.optim.AdamW(model.parameters()), "fp32", offload="disk")


def test_moments_beyond_what_a_named_recipe_says_need_an_optimizer_that_has_them() -> None:
    model = make_model()
    asked = ng.recipe("fp32", exp_avg_sq=CastSpec(FP16, scale=ng.TENSOR_POW2))
    with pytest.raises(ng.RecipeError, match="exp_avg_sq=.*this SGD keeps no such moment; use recipe.replace"):
        ng.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), asked)
    with pytest.raises(ng.RecipeError, match="exp_avg=.*this SGD keeps no such moment"):
        ng.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), ng.recipe("narrow8", moment_bits=4))
    assert all(p.dtype is torch.float32 for p in model.parameters())
    ng.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "narrow8")
    assert "SGD keeps no exp_avg_sq" in str(ng.report(model))


@pytest.mark.parametrize("option", ["amsgrad", "differentiable"])
def test_options_without_a_counterpart_are_refused_by_name(option: str) -> None:
    model = make_model()
    theirs = torch.optim.AdamW(model.parameters(), **{option: True})
    with pytest.raises(ng.ConversionError, match=f"{option}=True"):
        ng.prepare(model, theirs, "narrow8")
    assert all(p.dtype is torch.float32 for p in model.parameters())


@pytest.mark.parametrize("recipe", ["narrow8_sr", "bf16_pure"])
def test_random_bits_are_one_key_a_step_and_none_for_a_skipped_one(recipe: str) -> None:
    model = make_model()
    _, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe)
    generator = torch.Generator().manual_seed(3)
    optimizer.generator = generator
    steps(model, optimizer, 2)
    expected = torch.Generator().manual_seed(3)
    for _ in range(2):
        torch.randint(-(1 << 63), (1 << 63) - 1, (), dtype=torch.int64, generator=expected)
    assert torch.equal(generator.get_state(), expected.get_state())
    for p in model.parameters():
        p.grad = None
    first = next(model.parameters())
    first.grad = torch.full((64, 96), torch.inf, dtype=first.grad_dtype)
    optimizer.step()
    assert optimizer.step_was_skipped and torch.equal(generator.get_state(), expected.get_state())


@pytest.mark.parametrize("recipe", ["narrow8_sr", "bf16_pure"])
def test_the_same_seed_is_the_same_run_in_bits(recipe: str) -> None:
    runs = []
    for _ in range(2):
        model = make_model()
        _, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe)
        torch.manual_seed(5)
        steps(model, optimizer, 3)
        runs.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert any((a != b).any() for a, b in zip(runs[0], copy.deepcopy(make_model()).parameters(), strict=True))


@pytest.mark.parametrize("recipe", NARROW)
@pytest.mark.filterwarnings("ignore:. trainable parameters are in no group")
@pytest.mark.filterwarnings("ignore:a second backward added")  # nothing clears the gradients of the others
def test_parameters_in_no_group_have_no_state(recipe: str, tmp_path: Path) -> None:
    model = make_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model[1].parameters(), lr=1e-2), recipe)
    others = [p for p in model.parameters() if not any(p is own for own in model[1].parameters())]
    losses = steps(model, optimizer, 3)
    assert losses[-1] < losses[0]
    assert set(optimizer.state) == set(model[1].parameters()) and len(optimizer.state_dict()["state"]) == 2
    ng.save(tmp_path / "checkpoint", model, optimizer)
    ng.load(tmp_path / "checkpoint", model, optimizer)
    copy.deepcopy((model, optimizer))
    for name, p in model.named_parameters():
        if any(p is other for other in others):
            stored = p.detach().float() - before[name]
            assert stored.abs().max() <= 2.0**-4 * before[name].abs().max(), name
    second = torch.optim.AdamW(others, lr=1e-2)  # built from the parameters that the first prepare has left
    model, second = ng.prepare(model, second, recipe)
    assert steps(model, second, 3)[-1] < losses[-1]
    assert set(second.state) == set(others) and set(optimizer.state) == set(model[1].parameters())


def test_digits_that_no_optimizer_keeps_are_said() -> None:
    for recipe, lost in (("narrow8", True), ("fp8_lm_o3", True), ("narrow8_sr", False), ("fp32", False)):
        model = make_model()
        optimizer = torch.optim.AdamW(model[1].parameters(), lr=1e-2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ng.prepare(model, optimizer, recipe)
        assert any("are in no group of the optimizer (the first: '0.weight')" in str(w.message) for w in caught) is lost
    model.requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].requires_grad_().parameters(), lr=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ng.prepare(model, optimizer, "fp8_lm_o3")
    assert type(model[0].weight) is nn.Parameter and model[0].weight.dtype is torch.float32


def test_codes_whose_digits_another_optimizer_keeps_are_not_taken_for_all() -> None:
    model = make_model()
    model, first = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), "fp8_lm_o3")
    steps(model, first, 2)
    other = ng.optim.AdamW(model[1].parameters(), lr=1e-2, master=CastSpec(FP32))
    with pytest.raises(ng.ConversionError, match=r"'0.weight' is stored as \(E4M3FN.*so pass that one"):
        ng.prepare(model, other, "narrow8")


@pytest.mark.parametrize("recipe", ["fp32", "fp8_current", *NARROW])
def test_an_optimizer_of_parameters_without_values_is_refused(recipe: str) -> None:  # case 113
    with torch.device("meta"):
        model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ng.ConversionError, match="parameter 0 of group 0.*is on the meta device.*then build the optim"):
        ng.prepare(model, optimizer, recipe)
