"""transformers' own linear layers: Conv1D, whose weight is transposed, and the experts of mixtures."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.pytorch_utils import Conv1D

import narrowgauge as ng
from narrowgauge.layers.report import CONVERTED, KEPT, SKIPPED
from narrowgauge.ops.experts import GroupedLinear
from narrowgauge.tensors.quantized import QuantizedTensor

pytestmark = pytest.mark.usefixtures("one_thread", "seeded")
RECIPES = ["bf16", "fp8_delayed", "fp8_rowwise", "mxfp8", "nvfp4", "fp8_lm_o2", "fp16_pure"]


def plain(x: Tensor) -> Tensor:
    return x.dequantize() if isinstance(x, QuantizedTensor) else x


def pair() -> tuple[nn.Sequential, nn.Sequential]:
    """A Linear, and the Conv1D that computes the same."""
    linear, conv = nn.Linear(64, 128), Conv1D(128, 64)
    with torch.no_grad():
        conv.weight.copy_(linear.weight.t())
        conv.bias.copy_(linear.bias)
    return nn.Sequential(linear), nn.Sequential(conv)


@pytest.mark.parametrize("recipe", RECIPES)
def test_conv1d_gives_the_bits_of_a_linear_layer_through_three_steps(recipe: str) -> None:
    models, x = pair(), torch.randn(32, 64)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        ng.prepare(model, optimizer, recipe)
    for step in range(3):
        found = []
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(step)  # of stochastic rounding
            y = model(x)
            (y.float().square().sum() / 1024).backward()
            found.append((y, plain(model[0].weight.grad), plain(model[0].bias.grad)))
            optimizer.step()
            optimizer.zero_grad()
        (y, weight, bias), (y_conv, weight_conv, bias_conv) = found
        assert torch.equal(y, y_conv) and torch.equal(weight, weight_conv.t()) and torch.equal(bias, bias_conv)
    assert torch.equal(plain(models[0][0].weight), plain(models[1][0].weight).t())


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "mxfp8"])
def test_conv1d_frozen_in_8_bits_passes_gradients_on(recipe: str) -> None:  # case 60
    _, model = pair()
    values = model[0].weight.detach().clone()
    ng.freeze(model, recipe)
    stored = model[0].weight.data
    assert isinstance(stored, QuantizedTensor) and stored.codes.dtype is torch.float8_e4m3fn
    assert 1e-3 < (stored.dequantize() - values).norm() / values.norm() < 0.05
    x = torch.randn(32, 64, requires_grad=True)
    model(x).sum().backward()
    wanted = values.sum(dim=1).expand(32, 64)
    assert F.cosine_similarity(x.grad.flatten(), wanted.flatten(), dim=0) > 0.99
    assert model[0].weight.grad is None


def test_conversion_keeps_every_object_and_goes_back() -> None:
    _, model = pair()
    before = {name: id(p) for name, p in model.named_parameters()}
    x = torch.randn(3, 5, 64)
    wanted = model(x)
    report = ng.convert(model, "fp8_current")
    assert (report["0"].module, report["0"].status) == ("Conv1D", CONVERTED)
    assert isinstance(model[0], Conv1D) and not torch.equal(model(x), wanted)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    ng.convert(model, "fp32")
    assert type(model[0]) is Conv1D and torch.equal(model(x), wanted)


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_and_pickles_compute_the_same(how: Any) -> None:
    model = nn.ModuleList([pair()[1], experts()])
    ng.convert(model, "fp8_delayed")
    twin = how(model)
    x, chosen = torch.randn(6, 64), choose(6)
    assert torch.equal(twin[0](x), model[0](x)) and isinstance(twin[0][0], Conv1D)
    assert torch.equal(twin[1](x[:, :32], *chosen), model[1](x[:, :32], *chosen)) and isinstance(
        twin[1], MixtralExperts
    )
    assert type(twin[1]) is type(model[1])


def experts() -> MixtralExperts:
    """Four experts of 32 inputs and 48 features inside."""
    config = MixtralConfig(hidden_size=32, intermediate_size=48, num_local_experts=4)
    config._experts_implementation = "eager"
    made = MixtralExperts(config)
    for p in made.parameters():
        nn.init.normal_(p, std=0.1)
    return made


def choose(tokens: int) -> tuple[Tensor, Tensor]:
    """Two of the first three experts for each token, and their weights."""
    index = torch.stack([torch.randperm(3)[:2] for _ in range(tokens)])
    return index, torch.rand(tokens, 2).softmax(-1)


class Twin(nn.Module):
    """The same experts as layers of this library, one after the other."""

    def __init__(self, of: MixtralExperts) -> None:
        super().__init__()
        self.up, self.down = GroupedLinear(4, 32, 96), GroupedLinear(4, 48, 32)
        with torch.no_grad():
            self.up.weight.copy_(of.gate_up_proj)
            self.down.weight.copy_(of.down_proj)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        rows = [(e, t, k) for e in range(4) for t in range(len(x)) for k in range(2) if index[t, k] == e]
        counts = torch.tensor([sum(row[0] == e for row in rows) for e in range(4)])
        gate, up = self.up(x[[t for _, t, _ in rows]], counts).chunk(2, dim=-1)
        down = self.down(F.silu(gate) * up, counts)
        found = [torch.zeros(32) for _ in x]
        for (_, t, k), row in zip(rows, down, strict=True):
            found[t] = found[t] + row * weights[t, k]
        return torch.stack(found)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "fp8_delayed", "mxfp8", "nvfp4"])
def test_experts_give_the_bits_of_grouped_layers_through_three_steps(recipe: str) -> None:
    ours = experts()
    models: list[nn.Module] = [ours, Twin(ours)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        ng.prepare(model, optimizer, recipe, autocast=False)
    for step in range(3):
        x, chosen = torch.randn(11, 32), choose(11)
        outputs = []
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(step)
            outputs.append(model(x, *chosen))
            outputs[-1].square().sum().backward()
            optimizer.step()
        assert torch.equal(*outputs)
        assert torch.equal(ours.gate_up_proj.grad, models[1].up.weight.grad)
        assert torch.equal(ours.down_proj.grad, models[1].down.weight.grad)
        assert ours.down_proj.grad[3].count_nonzero() == 0  # nobody chose it
        for optimizer in optimizers:
            optimizer.zero_grad()


def test_delayed_scaling_has_a_state_for_each_weight_and_expert() -> None:
    model = experts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ng.prepare(model, optimizer, "fp8_delayed", autocast=False)
    amax = torch.stack([model.gate_up_proj.detach().abs().amax((1, 2)), model.down_proj.detach().abs().amax((1, 2))])
    x, (index, weights) = torch.randn(11, 32), choose(11)
    model(x, index, weights).sum().backward()
    optimizer.step()
    assert model.amax_rolls.tolist() == [[1, 1, 1, 0]] * 2
    assert torch.equal(model.weight_amax_history[..., -1], amax * torch.tensor([1.0, 1.0, 1.0, 0.0]))
    assert torch.equal(model.input_amax_history[0, 0, -1], x[(index == 0).any(1)].abs().max())


def test_experts_are_stored_and_frozen_in_8_bits() -> None:
    model = nn.Sequential(experts())
    ng.freeze(model, "fp8_current")
    assert all(isinstance(p.data, QuantizedTensor) and not p.requires_grad for p in model.parameters())
    assert ng.report(model)["0"].reason.endswith("weight stored as E4M3FN, frozen")


def test_what_cannot_be_converted_is_skipped_and_says_why() -> None:
    transposed, parallel, narrow = experts(), experts(), experts()
    transposed.is_transposed, parallel._is_expert_parallel = True, True
    parts = {"transposed": transposed, "parallel": parallel, "narrow": narrow, "taken": Conv1D(32, 32)}
    report = ng.convert(nn.ModuleDict(parts), ng.recipe("fp8_current", exclude=("narrow",)))
    found = {row.name: row.status for row in report}
    assert found == {"transposed": SKIPPED, "parallel": SKIPPED, "narrow": KEPT, "taken": CONVERTED}
    assert "weights as [in, out]" in report["transposed"].reason
    assert "expert parallelism" in report["parallel"].reason
