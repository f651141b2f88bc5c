"""What tests of data parallelism share: a model whose gradients are what they are told to be, and expected means."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.distributed import codec, data_parallel
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.numerics.formats import BF16, FP32
from narrowgauge.recipes.casts import WIRE
from narrowgauge.recipes.spec import CastSpec, Recipe

WIDE = Recipe(name="wide", compute=FP32)
NARROW = Recipe(name="narrow", compute=FP32, grad=ng.recipe("narrow8").grad, grad_comm=WIRE)
SIDE = 64  # a matrix of 4096 values, which recipes keep in 8 bits


class Given(nn.Module):
    """The gradient of `large` [64, 64] and `small` [3] is what forward gets: loss = sum of gradient * parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.ones(SIDE, SIDE))
        self.small = nn.Parameter(torch.ones(3))

    def forward(self, large: Tensor | float | None, small: Tensor | float | None = None) -> Tensor:
        loss = torch.zeros(())
        for p, grad in ((self.large, large), (self.small, small)):
            if grad is not None:
                values = p if isinstance(p, ng.QuantizedTensor) else p.float()
                loss = loss + (values * grad).sum()
        return loss


def prepared(
    recipe: str | Recipe, model: nn.Module | None = None, lr: float = 1.0
) -> tuple[nn.Module, torch.optim.SGD]:
    """A data-parallel model, by default a `Given`, with SGD."""
    model = data_parallel(Given() if model is None else model)
    return ng.prepare(model, torch.optim.SGD(model.parameters(), lr=lr), recipe, autocast=False)


def error_of(call: Callable[[], object]) -> str:
    """Kind and message of our error that a call raises; "" where it raises none."""
    try:
        call()
    except NarrowgaugeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def values(t: Tensor | None) -> Tensor:
    """float32 values of a parameter or gradient, a copy."""
    assert t is not None
    t = t.detach()
    return (t.dequantize() if isinstance(t, ng.QuantizedTensor) else t).float().clone()


def mean_by(spec: CastSpec, grads: list[Tensor]) -> Tensor:
    """Our reduction by its formula: a rounding before the sum in float32, one after the division; flat."""
    if spec == WIRE:

        def rounded(x: Tensor) -> Tensor:
            return ng.quantize(x.flatten().float(), WIRE).dequantize()

    else:

        def rounded(x: Tensor) -> Tensor:
            return x.flatten().to(spec.format.dtype).float()

    total = torch.zeros(grads[0].numel())
    for grad in grads:
        total = total + rounded(grad)
    return rounded(total / len(grads))


def expected_grad(recipe: Recipe, grads: list[Tensor]) -> Tensor:
    """What `p.grad` holds for these gradients of the ranks."""
    recipe = recipe.resolve("cpu")
    is_small = grads[0].numel() < recipe.min_state_size
    is_cast = recipe.grad.format.is_narrow
    spec = codec.spec_of(recipe, "grad_comm")
    if is_small:
        spec = CastSpec(BF16) if recipe.grad.format is BF16 else CastSpec(FP32)
    mean = mean_by(spec, grads).view(grads[0].shape)
    return ng.quantize(mean, recipe.grad).dequantize() if is_cast and not is_small else mean
