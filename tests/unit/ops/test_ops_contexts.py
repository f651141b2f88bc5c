"""The linear layer's function under inference mode, no_grad, autocast, checkpointing, hooks of memory, and threads."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from narrowgauge.numerics.formats import BF16, E4M3FN, E5M2, FP16, FP32, TF32
from narrowgauge.numerics.scaling import Delayed
from narrowgauge.ops.linear import DelayedSlots, LinearCasts, linear
from narrowgauge.ops.shared import SharedInputs
from narrowgauge.recipes.spec import CastSpec, Emulation

FP8 = LinearCasts(CastSpec(E4M3FN), CastSpec(E4M3FN), CastSpec(E5M2), BF16)
LATE = Delayed(history_length=4)
DELAYED = LinearCasts(CastSpec(E4M3FN, scale=LATE), CastSpec(E4M3FN, scale=LATE), CastSpec(E5M2, scale=LATE), BF16)
EXACT = LinearCasts(FP8.input, FP8.weight, FP8.grad_output, BF16, emulation=Emulation.EXACT)


def wide(fmt) -> LinearCasts:
    return LinearCasts(CastSpec(fmt), CastSpec(fmt), CastSpec(fmt), fmt)


class Layer:
    """Weight, bias and delayed state, as a converted module would hold them."""

    def __init__(self, casts: LinearCasts, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.casts = casts
        self.weight = torch.randn(40, 48, generator=generator).requires_grad_()
        self.bias = torch.randn(40, generator=generator).requires_grad_()
        self.slots = {r: DelayedSlots(torch.tensor(8.0), torch.zeros(4)) for r in ("input", "weight", "grad_output")}

    def __call__(self, x: Tensor, shared: SharedInputs | None = None) -> Tensor:
        return linear(
            x,
            self.weight,
            self.bias,
            self.casts,
            delayed=self.slots,
            record=torch.is_grad_enabled(),
            out_dtype=torch.bfloat16 if torch.is_autocast_enabled("cpu") else x.dtype,
            shared=shared,
        )

    def state(self) -> list[Tensor]:
        return [t.clone() for slots in self.slots.values() for t in slots if t is not None]


def batch(seed: int = 1) -> Tensor:
    return torch.randn(24, 48, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def train(layer: Layer, forward=None) -> list[Tensor]:
    x = batch()
    y = (forward or layer)(x)
    y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype))
    assert layer.weight.grad is not None and layer.bias.grad is not None and x.grad is not None
    return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad, *layer.state()]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.dtype is b.dtype
        assert torch.equal(a, b)


ALL_CASTS = pytest.mark.parametrize("casts", [FP8, DELAYED, wide(BF16)], ids=["current", "delayed", "bf16"])


# case 62
@ALL_CASTS
def test_inference_mode_equals_no_grad_and_leaves_no_trace(casts):
    layer, untouched = Layer(casts), Layer(casts)
    for shared in (None, SharedInputs()):
        with torch.inference_mode():
            inferred = layer(batch().detach(), shared)
        with torch.no_grad():
            assert torch.equal(inferred, layer(batch().detach(), shared))
    assert_same(train(layer), train(untouched))


# case 64
@ALL_CASTS
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_pass_without_gradients_in_the_same_region_takes_none_from_training(casts, order):
    layer, expected = Layer(casts), train(Layer(casts))
    shared: SharedInputs = SharedInputs()
    x = batch()
    if order == "before":
        with torch.no_grad():
            layer(x, shared)
    y = layer(x, shared)
    if order == "after":
        with torch.no_grad():
            layer(x, shared)
    y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape))
    assert_same([y.detach(), x.grad, layer.weight.grad, layer.bias.grad, *layer.state()], expected)  # type: ignore


# case 65
@pytest.mark.parametrize("casts", [FP8, wide(BF16)], ids=["fp8", "bf16"])
@pytest.mark.parametrize("change", ["fill_", "copy_", "data", "step"])
def test_a_changed_weight_is_read_anew(casts, change):
    weight, x = torch.nn.Parameter(torch.ones(1, 4)), torch.ones(1, 4)
    shared: SharedInputs = SharedInputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x, weight, None, casts, out_dtype=torch.float32, shared=shared).item() == 4.0
        if change == "step":
            weight.grad = torch.full_like(weight, -1.0)
            torch.optim.SGD([weight], lr=1.0).step()
        elif change == "data":
            weight.data = torch.full((1, 4), 2.0)
        else:
            with torch.no_grad():
                weight.fill_(2.0) if change == "fill_" else weight.copy_(torch.full((1, 4), 2.0))
        assert linear(x, weight, None, casts, out_dtype=torch.float32, shared=shared).item() == 8.0


# cases 11 and 67
@ALL_CASTS
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_with_backward_outside_the_region_changes_no_bit(casts, reentrant):
    outer = torch.randn(40, 40, generator=torch.Generator().manual_seed(5))

    def block(layer: Layer):
        return lambda x: F.linear(layer(x), outer)

    def forward(layer: Layer, recompute: bool):
        def run(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                inside = checkpoint(block(layer), x, use_reentrant=reentrant) if recompute else block(layer)(x)
                assert isinstance(inside, Tensor)
                return inside + layer(x).mean()  # the same layer outside the checkpoint

        return run

    plain, recomputed = Layer(casts), Layer(casts)
    expected = train(plain, forward(plain, recompute=False))
    found = train(recomputed, forward(recomputed, recompute=True))
    assert found[0].dtype is torch.bfloat16
    assert_same(found[:2] + found[4:], expected[:2] + expected[4:])
    for a, b in zip(found[2:4], expected[2:4], strict=True):
        # the layer's two uses may add their gradients in the other order, which is exact for two addends
        assert torch.equal(a, b)


# case 116
def test_threads_with_different_casts_do_not_touch_each_other():
    kinds = [FP8, EXACT, DELAYED, wide(BF16), wide(FP16), wide(TF32), wide(FP32)]
    expected = [train(Layer(casts)) for casts in kinds]
    found: dict[int, list[list[Tensor]]] = {i: [] for i in range(len(kinds))}
    start = threading.Barrier(len(kinds))

    def work(i: int) -> None:
        start.wait()
        for _ in range(5):
            found[i].append(train(Layer(kinds[i])))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(kinds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, runs in found.items():
        assert len(runs) == 5
        for run in runs:
            assert_same(run, expected[i])


# case 116
def test_backward_in_another_thread_is_the_same_backward():
    layer, x = Layer(DELAYED), batch()
    y = layer(x)
    grad = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
    thread = threading.Thread(target=lambda: y.backward(grad))
    thread.start()
    thread.join()
    found = [y.detach(), x.grad, layer.weight.grad, layer.bias.grad, *layer.state()]
    assert_same(found, train(Layer(DELAYED)))  # type: ignore[arg-type]


def test_float32_products_are_not_recast_by_an_autocast_region():
    layer = Layer(wide(FP32))
    x = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(x, layer.weight, layer.bias, layer.casts, out_dtype=torch.float32)
        y.sum().backward()
    assert torch.equal(y, F.linear(x, layer.weight, layer.bias))


def test_saved_tensors_may_be_moved_away_by_hooks():
    layer = Layer(FP8)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        found = train(layer)
    assert_same(found, train(Layer(FP8)))
