"""One optimizer step: sums, scales, clips and skips in the right order."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.train.step import optimizer_step


class Dot(nn.Module):
    """loss = weight . x, so that the gradient is x."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor, targets: Tensor) -> tuple[None, Tensor]:
        return None, (self.weight * x).sum()


class Net(nn.Module):
    """A small regression with converted layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))

    def forward(self, x: Tensor, targets: Tensor) -> tuple[None, Tensor]:
        return None, (self.layers(x) - targets).float().square().mean()


def pairs(*rows: Sequence[float]) -> list[tuple[Tensor, Tensor]]:
    return [(torch.tensor(row), torch.zeros(1)) for row in rows]


def prepared(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: str, scale: float = 2.0**16):
    model, optimizer = ng.prepare(model, optimizer, recipe)
    return model, optimizer, ng.LossScaler(recipe, "cpu", init_scale=scale)


def test_clipping_comes_after_unscaling_and_the_norm_is_the_real_one() -> None:  # case 30
    model = Dot(2)
    model, optimizer, scaler = prepared(model, torch.optim.SGD(model.parameters(), lr=1.0), "fp16", 65536.0)
    result = optimizer_step(model, optimizer, scaler, pairs([3.0, 4.0]), clip=1.0)
    assert result.grad_norm == 5.0
    assert model.weight.tolist() == pytest.approx([-0.6, -0.8], abs=1e-6)


def test_no_clip_measures_only() -> None:
    model = Dot(2)
    model, optimizer, scaler = prepared(model, torch.optim.SGD(model.parameters(), lr=1.0), "bf16")
    result = optimizer_step(model, optimizer, scaler, pairs([3.0, 4.0]), clip=0.0)
    assert result.grad_norm == 5.0 and model.weight.tolist() == [-3.0, -4.0]


@pytest.mark.filterwarnings("ignore:.*none of this model's is quantized:UserWarning")
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp16", "fp8_current", "fp8_delayed"])
def test_micro_batches_are_summed_in_float32(recipe: str) -> None:  # case 28
    model = Dot(1)
    model, optimizer, scaler = prepared(model, torch.optim.SGD(model.parameters(), lr=1.0), recipe, 1.0)
    result = optimizer_step(model, optimizer, scaler, pairs([256.0], [1.0], [-256.0], [3.0]), clip=0.0)
    assert model.weight.item() == -1.0  # the mean of the four; a bfloat16 sum would lose the 1
    assert result.loss == 0.0


@pytest.mark.parametrize("parts", [1, 4])
def test_gradients_of_micro_batches_are_cast_once_from_their_exact_sum(parts: int) -> None:  # case 28
    kept = ng.recipe("narrow8", min_state_size=0)
    grads = []
    for recipe in (kept, kept.replace(grad=ng.CastSpec(ng.formats.FP32))):
        torch.manual_seed(0)
        net = Net()
        batches = [(torch.randn(4, 32), torch.randn(4, 32)) for _ in range(parts)]
        model, optimizer = ng.prepare(net, torch.optim.AdamW(net.parameters()), recipe)
        scaler = ng.LossScaler(recipe, "cpu")
        found: list[Tensor] = []

        def keep(found: list[Tensor] = found, model: nn.Module = model) -> None:
            found.extend(p.grad for p in model.parameters() if p.grad is not None)

        optimizer_step(model, optimizer, scaler, batches, clip=0.0, before_zero_grad=keep)
        grads.append(found)
    for narrow, wide in zip(*grads, strict=True):
        assert isinstance(narrow, ng.QuantizedTensor) and wide.dtype is torch.float32
        expected = ng.quantize(wide, kept.grad)
        assert torch.equal(narrow.codes.view(torch.uint8), expected.codes.view(torch.uint8))
        assert torch.equal(narrow.dequant_scale, expected.dequant_scale)


@pytest.mark.parametrize("fused", [True, False])
def test_accumulation_with_clipping_unscales_once(fused: bool) -> None:  # case 31, case 32
    torch.manual_seed(0)
    net, batches = Net(), [(torch.randn(4, 32), torch.randn(4, 32)) for _ in range(4)]
    with torch.no_grad():
        reference = Net()
        reference.load_state_dict(net.state_dict())
    model, optimizer, scaler = prepared(net, torch.optim.AdamW(net.parameters(), fused=fused), "fp16", 1024.0)
    seen: list[Tensor] = []

    def keep() -> None:
        seen.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)

    optimizer_step(model, optimizer, scaler, batches, clip=1e9, before_zero_grad=keep)
    loss = torch.stack([reference(*batch)[1] for batch in batches]).mean()
    loss.backward()
    for found, parameter in zip(seen, reference.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad, rtol=0, atol=1e-3)


@pytest.mark.parametrize("recipe", ["fp16", "bf16", "fp8_current"])
def test_fused_and_plain_adamw_take_the_same_clipped_step(recipe: str) -> None:  # case 31, case 32
    results = []
    for fused in (True, False):
        torch.manual_seed(0)
        net, batches = Net(), [(torch.randn(4, 32), torch.randn(4, 32)) for _ in range(4)]
        model, optimizer, scaler = prepared(net, torch.optim.AdamW(net.parameters(), fused=fused), recipe, 1024.0)
        for _ in range(3):
            optimizer_step(model, optimizer, scaler, batches, clip=0.5)
        results.append([p.detach() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_accumulation_equals_the_large_batch() -> None:
    parameters, losses, norms = [], [], []
    for parts in (1, 4):
        torch.manual_seed(0)
        net, x, targets = Net(), torch.randn(16, 32), torch.randn(16, 32)
        model, optimizer, scaler = prepared(net, torch.optim.SGD(net.parameters(), lr=1.0), "fp32")
        batches = list(zip(x.chunk(parts), targets.chunk(parts), strict=True))
        result = optimizer_step(model, optimizer, scaler, batches, clip=1.0)
        parameters.append([p.detach() for p in model.parameters()])
        losses.append(result.loss)
        norms.append(result.grad_norm)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and norms[0] == pytest.approx(norms[1], rel=1e-5)
    for a, b in zip(*parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recipe", ng.recipe_names())
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_batch_is_skipped_and_changes_nothing_in_every_recipe(
    recipe: str, bad: float
) -> None:  # case 21, case 25
    torch.manual_seed(0)
    net = Net()
    model, optimizer, scaler = prepared(net, torch.optim.AdamW(net.parameters(), lr=0.1), recipe, 2.0)
    good = [(torch.randn(4, 32), torch.randn(4, 32))]
    poisoned = [good[0], (torch.full((4, 32), bad), torch.zeros(4, 32))]
    assert not optimizer_step(model, optimizer, scaler, good, clip=1.0).skipped
    before = {name: value.clone() for name, value in model.state_dict().items()}
    moments = [copy.deepcopy(state) for state in optimizer.state.values()]
    result = optimizer_step(model, optimizer, scaler, poisoned, clip=1.0)
    assert result.skipped and result.bad_parameter == "layers.0.weight"
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for kept, state in zip(moments, optimizer.state.values(), strict=True):
        assert kept.keys() == state.keys()
        assert all(torch.equal(torch.as_tensor(kept[key]), torch.as_tensor(state[key])) for key in kept)
    assert all(p.grad is None for p in model.parameters())
    after = optimizer_step(model, optimizer, scaler, good, clip=1.0)
    assert not after.skipped and math.isfinite(after.loss) and after.bad_parameter == ""
