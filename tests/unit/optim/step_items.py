"""Parameters with their state in every storage that the fused step takes, for its tests."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from narrowgauge.numerics import residual
from narrowgauge.numerics.companding import SQUARE_ROOT
from narrowgauge.numerics.formats import BF16, E4M3FN, E5M2, FP16, FP32, INT8, UINT8
from narrowgauge.numerics.granularity import Block
from narrowgauge.numerics.rounding import NONZERO
from narrowgauge.numerics.scaling import TENSOR_POW2
from narrowgauge.optim import kernels, storage
from narrowgauge.optim.kernels import Plan
from narrowgauge.optim.rules import Adam, Hyper, Lion, Muon, Rule, Sgd
from narrowgauge.optim.update import Item, update
from narrowgauge.recipes.cast_spec import CastSpec
from narrowgauge.tensors.quantized import QuantizedTensor, quantize

KEY = torch.tensor(-0x123456789ABCDEF, dtype=torch.int64)
SIGNED, UNSIGNED = (
    CastSpec(INT8, Block(1, 128), companding=SQUARE_ROOT),
    CastSpec(UINT8, Block(1, 128), rounding=NONZERO, companding=SQUARE_ROOT),
)
PARAMS = ("fp32", "bf16", "stochastic", "residual", "remainder")
GRADS = ("fp32", "bf16", "e4m3", "e5m2", "fp16")
# with one scale for the whole tensor: FP8-LM's parameters, its parameter beside a master, and its moments
HALF, WHOLE_E4M3 = CastSpec(FP16, scale=TENSOR_POW2), CastSpec(E4M3FN, scale=TENSOR_POW2)
SCALED_PARAMS = ("scaled", "copied")
HALF_NONZERO = CastSpec(FP16, scale=TENSOR_POW2, rounding=NONZERO)
FIRST, SECOND = (CastSpec(FP32), CastSpec(BF16), SIGNED), (CastSpec(FP32), CastSpec(BF16), UNSIGNED)
ADAM = Adam.at(3, 1e-3, (0.9, 0.99), 1e-8, 0.1, decoupled=True)
HYPERS: list[tuple[Rule, Hyper, int]] = [
    (Rule.ADAM, ADAM, 2),
    (Rule.ADAM, Adam.at(1, 1e-2, (0.9, 0.999), 1e-8, 0.1, decoupled=False), 2),
    (Rule.SGD, Sgd(0.1, 0.0, 1.0, False, 0.0, True), 0),
    (Rule.SGD, Sgd(0.1, 0.9, 0.7, False, 0.01, True), 1),
    (Rule.SGD, Sgd(0.1, 0.9, 1.0, True, 0.01, False), 1),
    (Rule.LION, Lion.at(1e-4, (0.9, 0.99), 0.1), 1),
    (Rule.MUON, Muon(0.02, 0.95, 1 - 0.95, True, 0.99, (3.4445, -4.775, 2.0315), 5, 1e-7), 1),
    (Rule.MUON, Muon(0.02, 0.95, 1 - 0.95, False, 1.0, (3.4445, -4.775, 2.0315), 5, 1e-7), 1),
]


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if isinstance(a, QuantizedTensor):
        assert isinstance(b, QuantizedTensor) and a.spec == b.spec
        return all(same_bits(getattr(a, part), getattr(b, part)) for part in ("codes", "dequant_scale", "amax"))
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(bits), b.view(bits))


def values(shape: tuple[int, ...], scale: float, seed: int) -> Tensor:
    """Magnitudes over 20 powers of two, with runs of zeros, of subnormals and of large ones."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=draw) * torch.rand(shape, generator=draw).mul(-20).exp2() * scale
    flat = x.view(-1)
    flat[: len(flat) // 7] = 0.0
    flat[len(flat) // 7 : len(flat) // 5] *= 2.0**-130
    flat[len(flat) // 3 : len(flat) // 2] *= 1e4
    flat[-1] = -0.0
    return x


def make(param: str, grad: str, specs: tuple[CastSpec, ...], hyper: Hyper, shape: tuple[int, ...], seed: int) -> Item:
    """An item with a state as training leaves it."""
    p = values(shape, 1.0, seed)
    master: Tensor | None = None
    if param == "residual":
        p, master = residual.split(p)
    elif param == "remainder":
        p, master = residual.split_exactly(p)
    elif param in SCALED_PARAMS:
        master = quantize(p, HALF) if param == "copied" else None
        p = quantize(p, WHOLE_E4M3 if param == "copied" else HALF)
    elif param != "fp32":
        p = p.bfloat16()
    g = values(shape, 1e-2, seed + 1)
    narrow = {"e4m3": E4M3FN, "e5m2": E5M2}
    wide = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    g = quantize(g, CastSpec(narrow[grad])) if grad in narrow else g.to(wide[grad])
    roots = (values(shape, 1e-3, seed + 2), values(shape, 1e-3, seed + 3).square())
    moments = tuple(storage.encode(x, spec) for x, spec in zip(roots, specs, strict=False))
    return Item(p, master, g, moments, hyper, param == "stochastic", 7)


def moved(item: Item, device: str) -> Item:
    """The item on another device."""
    master = None if item.master is None else item.master.to(device)
    moments = tuple(moment.to(device) for moment in item.moments)
    return item._replace(param=item.param.to(device), master=master, grad=item.grad.to(device), moments=moments)


def check(rule: Rule, items: list[Item], steps: int = 1) -> None:
    """The kernels take the items, and leave the bits of their slow twin, step after step."""
    twins, plan = copy.deepcopy(items), Plan(rule)
    for _ in range(steps):
        assert all(kernels.takes(rule, item) for item in items)
        assert plan.run(items, KEY) == []
        for item, twin in zip(items, twins, strict=True):
            update(rule, twin, KEY)
            check_same(item, twin)


def check_same(item: Item, twin: Item) -> None:
    assert same_bits(item.param, twin.param), item
    assert same_bits(item.master, twin.master), item
    assert all(map(same_bits, item.moments, twin.moments)), item
