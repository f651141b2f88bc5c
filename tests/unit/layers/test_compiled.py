"""torch.compile of prepared models: no graph breaks, the numbers of eager."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng

# torch 2.13's own tracing of autograd functions warns so
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


class Mlp(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.gate = nn.LayerNorm(32), nn.Linear(32, 48), nn.Linear(32, 48)
        self.down, self.lm_head = nn.Linear(48, 32), nn.Linear(32, 24)
        self.recompute = recompute

    def block(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down(self.up(x) * nn.functional.silu(self.gate(x)))

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)
        return self.lm_head(x + y)


def train(recipe: str, managed: bool, recompute: bool, compiled: bool) -> list[Tensor]:
    torch._dynamo.reset()
    model = Mlp(recompute)
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


SLOW = [(name, True) for name in ng.recipe_names() if name != "fp8_delayed"] + [("fp8_delayed", False)]


@pytest.mark.parametrize(
    ("recipe", "managed"), [("fp8_delayed", True), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_compiled_training_is_eager_training(recipe: str, managed: bool) -> None:  # case 111
    for a, b in zip(train(recipe, managed, False, True), train(recipe, managed, False, False), strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "fp8_delayed"])
def test_compiled_training_with_checkpointing_is_eager_training(recipe: str) -> None:  # case 111
    for a, b in zip(train(recipe, True, True, True), train(recipe, True, True, False), strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=0, atol=1e-5)


class Broken(Mlp):
    def block(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        torch._dynamo.graph_break()
        return self.down(y)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, at the break
@pytest.mark.parametrize("recipe", ["bf16", pytest.param("fp8_delayed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_graph_break_changes_nothing(recipe: str, in_place: bool) -> None:
    torch._dynamo.reset()
    model = Broken(recompute=False)
    ng.prepare(model, None, recipe)
    x = torch.randn(8, 32)
    expected = model(x)
    if in_place:
        model.compile(backend="eager")
    run = model if in_place else torch.compile(model, backend="eager")
    assert torch.equal(run(x), expected)


@pytest.mark.parametrize("recipe", ["fp32", "fp8_current"])
def test_a_prepared_model_exports(recipe: str) -> None:
    model, x = Mlp(recompute=False).eval(), torch.randn(8, 32)
    ng.prepare(model, None, recipe)
    exported = torch.export.export(model, (x,))
    assert torch.equal(exported.module()(x), model(x))
