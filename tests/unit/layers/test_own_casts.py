"""Layers with casts of their own in a model: what each runs in, and that it changes nothing elsewhere."""

import copy

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.layers.convert import take_up
from narrowgauge.models.config import GPTConfig
from narrowgauge.models.gpt import GPT
from narrowgauge.observe.plan_layout import Spread
from narrowgauge.observe.plan_search import largest
from narrowgauge.observe.planner import plan

CONFIG = GPTConfig(layers=3, width=64, heads=2, context=32, vocab_size=128)


class Siblings(nn.Module):
    """Two layers that read one tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.a(x) + self.b(x)


def run(layer, x):
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype))
    return y.detach(), x.grad, [p.grad for p in layer.parameters()]


def assert_same(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("other", ["bf16", "mxfp8", "fp8_rowwise", "nvfp4"])
def test_each_layer_runs_as_its_own_recipe_would(other):
    torch.manual_seed(0)
    model, x = nn.ModuleList([nn.Linear(32, 48), nn.Linear(32, 48)]), torch.randn(16, 32)
    alone = [copy.deepcopy(layer) for layer in model]
    ng.prepare(model, None, ng.recipe("fp8_current").for_layers("1", other), autocast=False)
    for layer, twin, recipe in zip(model, alone, ("fp8_current", other), strict=True):
        ng.prepare(twin, None, recipe, autocast=False)
        torch.manual_seed(1)  # some casts draw random bits
        found = run(layer, x)
        torch.manual_seed(1)
        assert_same(found, run(twin, x))


def test_siblings_with_other_casts_do_not_share_one():
    torch.manual_seed(0)
    model, x = Siblings(), torch.randn(16, 32)
    wanted = []
    for name, recipe in (("a", "fp8_current"), ("b", "mxfp8")):
        alone = copy.deepcopy(getattr(model, name))
        ng.prepare(alone, None, recipe, autocast=False)
        wanted.append(run(alone, x))
    ng.prepare(model, None, ng.recipe("fp8_current").for_layers("b", "mxfp8"), autocast=False)
    output, _, grads = run(model, x)
    assert_same(output, wanted[0][0] + wanted[1][0])
    assert_same(grads, [*wanted[0][2], *wanted[1][2]])


def test_the_report_says_which():
    model = Siblings()
    ng.prepare(model, None, ng.recipe("narrow8").for_layers("a", "bf16"))
    rows = {row.name: row for row in ng.report(model).rows}
    assert rows["a"].status == "kept" and "fields of its own, 'a'" in rows["a"].reason
    assert rows["b"].status == "converted"


def test_taking_up_wider_casts_leaves_other_layers_histories():
    torch.manual_seed(0)
    model = Siblings()
    optimizer = torch.optim.AdamW(model.parameters())
    recipe = ng.recipe("fp8_delayed")
    model, optimizer = ng.prepare(model, optimizer, recipe)
    for _ in range(3):
        model(torch.randn(16, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    take_up(model, recipe.resolve("cpu").for_layers("a", input=ng.CastSpec(ng.formats.E4M3FN)))
    after = dict(model.named_buffers())
    assert {name for name in after if name.startswith("b.")} == {name for name in before if name.startswith("b.")}
    for name in (name for name in before if name.startswith("b.")):
        assert_same(after[name], before[name])
    assert not model.a.training_casts.input.is_delayed and model.a.training_casts.weight.is_delayed
    model(torch.randn(16, 32)).sum().backward()
    optimizer.step()


def test_frozen_layers_have_no_history_either():
    recipe = ng.recipe("fp8_current").for_layers("b", "fp8_delayed")
    model = ng.freeze(Siblings(), recipe)
    assert not any(layer.training_casts.input.is_delayed for layer in (model.a, model.b))


def test_saved_and_loaded_with_them(tmp_path):
    recipe = ng.recipe("narrow8").for_layers("b", "fp8_delayed")
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        model, optimizer = ng.prepare(model := Siblings(), torch.optim.AdamW(model.parameters()), recipe)
        if states:
            ng.load(tmp_path / "checkpoint", model, optimizer)
        else:
            model(torch.randn(16, 32)).sum().backward()
            optimizer.step()
            ng.save(tmp_path / "checkpoint", model, optimizer)
        states.append(model.state_dict())
    assert_same(states[1], states[0])


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("own", ["bf16", "mxfp8"])
def test_the_planner_counts_what_is_there(own, checkpointing):
    recipe = ng.recipe("fp8_delayed").for_layers("blocks.1.*", own)
    found = plan(CONFIG, recipe, batch_size=2, checkpointing=checkpointing)
    model = GPT(CONFIG, activation_checkpointing=checkpointing == "full")
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters()), recipe)
    ids = torch.zeros(2, 32, dtype=torch.int64)
    from narrowgauge.observe.ledger import SavedActivations

    with SavedActivations(model) as saved:
        _, loss = model(ids, ids)
    loss.backward()
    optimizer.step()
    there = ng.ledger(model, optimizer)
    assert {role: found.bytes[role] for role in there.roles} == dict(there.roles)
    if checkpointing == "none":
        assert found.bytes["activation"] == pytest.approx(saved.bytes, rel=0.001)


def test_layers_of_one_model_have_no_largest_one():
    recipe = ng.recipe("narrow8").for_layers("blocks.1.*", "bf16")
    assert plan(CONFIG, recipe, Spread(tensor=2)).own_casts == (4, 13)
    with pytest.raises(ng.NarrowgaugeError, match="casts for layers of one model by name"):
        largest(recipe, 8, 80)
