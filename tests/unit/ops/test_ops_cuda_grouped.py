"""Experts on CUDA: which products are one call for all, what that call demands, and that it gives what others give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import narrowgauge as ng
from narrowgauge.layers.convert import convert
from narrowgauge.ops import backends
from narrowgauge.ops import casts as casts_module
from narrowgauge.ops.casts import LinearCasts
from narrowgauge.ops.cuda.grouped import grouped_product
from narrowgauge.ops.cuda.routes import Machine
from narrowgauge.ops.experts import GroupedLinear
from narrowgauge.ops.grouped import grouped_linear

ADA, HOPPER, BLACKWELL = (Machine(c, (12, 9)) for c in ((8, 9), (9, 0), (10, 0)))
COUNTS, K, N = [5, 0, 33, 2], 64, 48
EVERY = "a product for each expert"


class Kernel:
    """Stands for `torch._scaled_grouped_mm`: its demands, and its arithmetic in float64."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, a, b, scale_a, scale_b, *, offs, out_dtype, use_fast_accum) -> Tensor:
        assert a.dtype is b.dtype is torch.float8_e4m3fn and out_dtype is torch.bfloat16 and not use_fast_accum
        (rows, k), (groups, _, n) = a.shape, b.shape
        assert a.stride() == (k, 1) and b.stride() == (n * k, 1, k) and k % 16 == n % 16 == 0
        assert scale_a.shape == (rows,) and scale_b.shape == (groups, n)
        assert scale_a.is_contiguous() and scale_b.is_contiguous()
        assert scale_a.dtype is scale_b.dtype is torch.float32 and offs.dtype is torch.int32 and offs.shape == (groups,)
        self.calls += 1
        y, start = torch.full((rows, n), torch.nan, dtype=torch.float64), 0
        for group, stop in enumerate(offs.tolist()):
            left = a[start:stop].to(torch.float64) * scale_a[start:stop, None].double()
            y[start:stop] = left @ (b[group].to(torch.float64) * scale_b[group].double())
            start = stop
        assert start == rows
        return y.to(torch.bfloat16)


def run(casts: LinearCasts, out_dtype: torch.dtype = torch.bfloat16, bias: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(40, K, generator=generator) * torch.logspace(-2, 2, 40)[:, None]).to(out_dtype).requires_grad_()
    weight = torch.randn(4, N, K, generator=generator).requires_grad_()
    offset = torch.randn(4, N, generator=generator) if bias else None
    y = grouped_linear(x, torch.tensor(COUNTS), weight, offset, casts, out_dtype=out_dtype)
    y.backward(torch.randn(40, N, generator=generator).to(out_dtype))
    return {"output": y.detach(), "grad_input": x.grad, "grad_weight": weight.grad}


def casts_of(recipe: str) -> LinearCasts:
    return LinearCasts.of(ng.recipe(recipe, compute="BF16", emulation="exact"), quantized=True)


def on_machine(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> Kernel:
    """Let this CPU decide as that machine, with its kernel for one call written down here."""
    kernel, cuda = Kernel(), torch.device("cuda")
    monkeypatch.setattr(backends, "machine_of", lambda device: machine)
    monkeypatch.setattr(casts_module, "backend_of", lambda *given: backends.backend_of(*given[:2], cuda, given[3]))
    monkeypatch.setattr(torch, "_scaled_grouped_mm", kernel)
    monkeypatch.setattr(F, "scaled_mm", _by_rows)
    return kernel


def _by_rows(a, b, scale_a, recipe_a, scale_b, recipe_b, *, bias=None, output_dtype, **others: Any) -> Tensor:
    """`scaled_mm` with scales of rows, or of tensors, in float64; what it demands is tested elsewhere."""
    y = (a.to(torch.float64) * scale_a[0].double()) @ (b.to(torch.float64) * scale_b[0].double())
    return (y if bias is None else y + bias.double()).to(output_dtype)


@pytest.mark.parametrize(
    ("recipe", "machine", "dtype", "bias", "calls"),
    [
        ("fp8_rowwise", HOPPER, torch.bfloat16, False, 2),  # output and grad_input
        ("fp8_rowwise", HOPPER, torch.bfloat16, True, 1),  # grad_input
        ("fp8_rowwise", HOPPER, torch.float32, False, 0),
        ("fp8_rowwise", ADA, torch.bfloat16, False, 0),
        ("fp8_rowwise", BLACKWELL, torch.bfloat16, False, 0),
        ("fp8_rowwise_gw_hp", HOPPER, torch.bfloat16, False, 2),  # one scale of a weight serves all its columns
        ("fp8_current", HOPPER, torch.bfloat16, False, 0),
    ],
)
def test_one_call_gives_what_a_product_for_each_expert_gives(monkeypatch, recipe, machine, dtype, bias, calls):
    casts = casts_of(recipe)
    emulated = run(casts, dtype, bias)
    kernel = on_machine(monkeypatch, machine)
    casts = casts_of(recipe)  # anew: backends of a CPU are remembered
    found = run(casts, dtype, bias)
    assert kernel.calls == calls
    for name, value in emulated.items():
        # the same operands, summed in float32 or float64: a rounding to bf16 apart at most
        scale = value.float().abs().amax(dim=-1, keepdim=True)
        assert ((found[name].float() - value.float()).abs() <= 2**-7 * scale + 1e-30).all(), name


def test_the_reason_says_which_products_are_one_call(monkeypatch):
    monkeypatch.setattr(backends, "machine_of", lambda device: HOPPER)
    cases = {
        (
            "fp8_rowwise",
            64,
            False,
        ): f"output, grad_input: scaled_grouped_mm; grad_weight: {EVERY} (its rows",
        ("fp8_rowwise", 64, True): f"output: {EVERY} (scaled_grouped_mm adds no bias); grad_input: scaled_grouped_mm",
        ("fp8_rowwise", 40, False): f"{EVERY} (scaled_grouped_mm takes multiples of 16, not a weight of 48 by 40)",
        ("fp8_current", 64, False): f"output, grad_input: {EVERY} (scaled_grouped_mm is used with scales of rows)",
        ("mxfp8", 64, False): f"output, grad_input: {EVERY} (scaled_grouped_mm is used with scales of rows)",
    }
    for (recipe, inputs, bias), words in cases.items():
        with torch.device("meta"):
            layer = GroupedLinear(4, inputs, N, bias=bias)
        convert(layer, ng.recipe(recipe, compute="BF16"))
        assert words in layer.describe_products(torch.device("cuda")), (recipe, inputs, bias)
    monkeypatch.setattr(backends, "machine_of", lambda device: BLACKWELL)
    convert(layer, ng.recipe("fp8_rowwise", compute="BF16"))
    assert "runs on 9.0, not on compute capability 10.0" in layer.describe_products(torch.device("cuda"))


def test_the_shape_function_of_torch_takes_what_is_passed():
    with FakeTensorMode():
        rows = torch.empty(40, K, dtype=torch.float8_e4m3fn, device="cuda")
        weights = torch.empty(3, K, N, dtype=torch.float8_e4m3fn, device="cuda").transpose(1, 2)  # as grad_input has it
        scales = torch.empty(40, device="cuda"), torch.empty(3, N, device="cuda")
        ends = torch.empty(3, dtype=torch.int32, device="cuda")
        y = grouped_product(rows, scales[0], weights, scales[1], ends)
        assert (y.shape, y.dtype, y.device.type) == ((40, N), torch.bfloat16, "cuda")
        narrow = [torch.empty(shape, dtype=rows.dtype, device="cuda") for shape in ((40, 40), (3, N, 40))]
        with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
            grouped_product(narrow[0], scales[0], narrow[1], scales[1], ends)
        with pytest.raises(RuntimeError, match="E4M3"):
            grouped_product(rows.view(torch.float8_e5m2), scales[0], weights, scales[1], ends)
