"""torch.compile of prepared models: no graph breaks, the numbers of eager."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng

# torch 2.13's own tracing of autograd functions warns so
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.gate = nn.LayerNorm(32), nn.Linear(32, 48), nn.Linear(32, 48)
        self.down, self.lm_head = nn.Linear(48, 32), nn.Linear(32, 24)

    def block(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down(self.up(x) * nn.functional.silu(self.gate(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(x + self.block(x))


def train(recipe: str, managed: bool, compiled: bool) -> list[Tensor]:
    torch._dynamo.reset()
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ng.prepare(model, optimizer if managed else None, recipe)
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    seen = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        y = run(torch.randn(8, 32, generator=generator))
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(y.detach())
    return [*seen, *(value.detach().float() for value in model.state_dict().values())]


# `test_prepare_compiled` compiles every recipe with recomputation; these are compared there less closely than here
LOOSE_THERE = ("fp16", "fp16_pure", "bf16_pure", "narrow8_sr", "mxfp4", "nvfp4")
SLOW = [*((name, True) for name in LOOSE_THERE), ("fp8_delayed", False)]


@pytest.mark.parametrize(
    ("recipe", "managed"), [("fp8_delayed", True), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_compiled_training_is_eager_training(recipe: str, managed: bool) -> None:  # case 111
    for a, b in zip(train(recipe, managed, True), train(recipe, managed, False), strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=0, atol=1e-5)


class Broken(Mlp):
    def block(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        torch._dynamo.graph_break()
        return self.down(y)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, at the break
@pytest.mark.parametrize(
    ("recipe", "in_place"), [("bf16", True), ("bf16", False), pytest.param("fp8_delayed", True, marks=pytest.mark.slow)]
)
def test_a_graph_break_changes_nothing(recipe: str, in_place: bool) -> None:
    torch._dynamo.reset()
    model = Broken()
    ng.prepare(model, None, recipe)
    x = torch.randn(8, 32)
    expected = model(x)
    if in_place:
        model.compile(backend="eager")
    run = model if in_place else torch.compile(model, backend="eager")
    assert torch.equal(run(x), expected)


@pytest.mark.parametrize("recipe", ["fp32", "fp8_current"])
def test_a_prepared_model_exports(recipe: str) -> None:
    model, x = Mlp().eval(), torch.randn(8, 32)
    ng.prepare(model, None, recipe)
    exported = torch.export.export(model, (x,))
    assert torch.equal(exported.module()(x), model(x))
