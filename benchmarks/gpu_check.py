"""Holds a GPU against the emulation: codes and scales bit for bit, products within the order of summation.

    python benchmarks/gpu_check.py [--device cuda] [--json]

Every line says what was compared and how it came out; the exit code is 1 where one fails, 2 where there is no GPU.
`--device cpu` runs the same comparisons of the CPU's fast emulation against its exact one.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import common
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.models.gpt import GPT
from narrowgauge.models.presets import preset
from narrowgauge.numerics import kernels, scaling
from narrowgauge.numerics.hadamard import Hadamard
from narrowgauge.ops.casts import LinearCasts
from narrowgauge.ops.cuda.product import Side, scaled_product
from narrowgauge.ops.cuda.routes import Route, machine_of, native_of
from narrowgauge.ops.matmul import GEMMS

FORMATS = ("E4M3FN", "E5M2", "E3M2FN", "E2M3FN", "E2M1FN", "FP16", "BF16")
SCALES = {"current": ng.CURRENT, "current, power of two": ng.CURRENT_POW2, "tensor power of two": ng.TENSOR_POW2}
SIZES = ((64, 64, 64), (50, 33, 17), (128, 96, 160), (1, 16, 31), (7, 272, 144))  # rows, in, out; some are padded
TRAINED = ("bf16", "fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4")
# name -> recipe and options. Without stochastic rounding, whose keys each device draws for itself
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("fp32", "tf32", "bf16", "fp16", "fp8_current", "fp8_delayed", "fp8_rowwise")},
    "fp8_rowwise, float32 scales": ("fp8_rowwise", {"scale": "CURRENT"}),
    "fp8_rowwise_gw_hp": ("fp8_rowwise_gw_hp", {}),
    "fp8_block": ("fp8_block", {}),
    "fp8_block, float32 scales": ("fp8_block", {"scale": "CURRENT"}),
    "mxfp8": ("mxfp8", {}),
    "mxfp8, E5M2 gradients": ("mxfp8", {"fp8_format": "HYBRID"}),
    "mxfp6": ("mxfp6", {}),
    "mxfp6, E2M3": ("mxfp6", {"fp6_format": "E2M3"}),
    "mxfp4": ("mxfp4", {"stochastic": False}),
    "nvfp4": ("nvfp4", {"stochastic": False}),
}
IN_FLOAT32 = ("fp32", "tf32")  # whose layers take float32 only
# Products of equal operands differ by the order of a float32 sum (2^-24 a term, a few hundred terms) and by the
# rounding of a bf16 or fp16 result (2^-9); FP8 tensor cores may align a sum's terms to fewer bits than float32.
FLOAT32_RESULT, HALF_RESULT = 2e-4, 8e-3
TRAINING_STEPS, TRAINING_GAP = 30, 0.05


class Finding(NamedTuple):
    """One comparison: what was compared, and what came out."""

    what: str
    passed: bool
    detail: str


def casts(device: torch.device) -> Iterator[Finding]:
    """Codes and scales of random, tiny, huge and special values, bit for bit against the CPU's."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(257, 67, generator=generator) * torch.logspace(-30, 30, 67)
    x[0, :4] = torch.tensor([0.0, -0.0, 2.0**-149, 1e-40])
    for name in FORMATS:
        for label, rule in {"unscaled": ng.NONE, **SCALES}.items():
            if name == "BF16" and rule is not ng.NONE:  # has float32's range: scales are refused
                continue
            spec = ng.CastSpec(getattr(ng.formats, name), scale=rule)
            for dtype in (torch.float32, torch.bfloat16):
                here, there = ng.quantize(x.to(dtype), spec), ng.quantize(x.to(device, dtype), spec)
                same = _bits(here.codes).equal(_bits(there.codes.cpu()))
                same &= _bits(here.dequant_scale).equal(_bits(there.dequant_scale.cpu()))
                yield Finding(f"codes of {name}, {label}, from {dtype}", same, "bits equal" if same else "bits differ")


def tiles(device: torch.device) -> Iterator[Finding]:
    """Codes, scales and carriers of every cast in tiles that a recipe makes, to nearest and stochastically."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(131, 272, generator=generator) * torch.logspace(-20, 20, 272)
    x[:, :40] = 0.0
    x[3, 50], x[70, 100], x[100, 260] = torch.nan, torch.inf, -torch.inf
    key = torch.tensor(20250731)
    for spec in dict.fromkeys(spec for pair in _pairs() for spec in pair if spec.in_blocks):
        for what, values in (("", x), (", transposed", x.t()), (", bf16", x.bfloat16()), (", one row", x[:1])):
            for stochastic in (False, True):
                made = []
                for where in (torch.device("cpu"), device):
                    made.append(
                        kernels.quantize_blocks(
                            values.to(where),
                            spec.format,
                            spec.granularity,
                            spec.scale,
                            carrier=torch.float32,
                            count=True,
                            key=key.to(where) if stochastic else None,
                            stream=3,
                        )
                    )
                same = [_bits(here).equal(_bits(there.cpu())) for here, there in zip(*made, strict=True)]
                differ = [field for field, equal in zip(made[0]._fields, same, strict=True) if not equal]
                label = f"tiles of {spec}{what}{', stochastic' if stochastic else ''}"
                yield Finding(label, not differ, f"{', '.join(differ)} differ" if differ else "bits equal")
    here, there = (kernels.transform(x[:, :40].to(where) + 1, Hadamard().signs) for where in ("cpu", device))
    yield Finding("Hadamard transform", _bits(here).equal(_bits(there.cpu())), "bits compared")


def scaled_products(device: torch.device) -> Iterator[Finding]:
    """Every pair of operands that the hardware multiplies, against float64 products of what they stand for."""
    if device.type != "cuda":
        return
    machine = machine_of(device)
    generator = torch.Generator().manual_seed(1)
    for left_spec, right_spec in _pairs():
        if not (left_spec.format.is_narrow and right_spec.format.is_narrow):
            continue
        route = native_of(left_spec, right_spec, machine)
        if not isinstance(route, Route):
            yield Finding(f"{left_spec} by {right_spec}", True, f"emulated: {route}")
            continue
        for m, k, n in ((7, 17, 31), (130, 300, 150), (256, 1024, 512)):
            left, right = (
                _side(torch.randn(rows, k, generator=generator), spec, device)
                for rows, spec in ((m, left_spec), (n, right_spec))
            )
            exact = _values(left) @ _values(right).t()
            bias = torch.linspace(-1, 1, n, device=device)
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                plain, shifted = (scaled_product(left, right, route, dtype, b).double() for b in (None, bias))
                worst = max(_relative_error(plain, exact), _relative_error(shifted, exact + bias.to(dtype).double()))
                limit = FLOAT32_RESULT if dtype is torch.float32 else HALF_RESULT
                what = f"{left_spec} by {right_spec}, {m} x {k} x {n}, {dtype}"
                yield Finding(what, worst <= limit, f"relative error {worst:.1e}, allowed {limit:.0e}")


def products(device: torch.device) -> Iterator[Finding]:
    """Output and the three gradients of one layer against the exact emulation on the CPU."""
    for name, (recipe, options) in VARIANTS.items():
        for rows, inputs, outputs in SIZES:
            for dtype in (torch.float32,) if recipe in IN_FLOAT32 else (torch.float32, torch.bfloat16):
                layer = nn.Linear(inputs, outputs)
                x, grad_output = torch.randn(rows, inputs), torch.randn(rows, outputs)
                exact = _gradients(layer, x, grad_output, recipe, options, "exact", dtype, torch.device("cpu"))
                found = _gradients(layer, x, grad_output, recipe, options, "fast", dtype, device)
                worst = max(_relative_error(f, e) for f, e in zip(found, exact, strict=True))
                is_wide = dtype is torch.float32 and (recipe in IN_FLOAT32 or "fp8" in recipe)
                # on a CPU the fast emulation rounds to bf16 once more
                limit = FLOAT32_RESULT if is_wide and device.type != "cpu" else HALF_RESULT
                what = f"{name} layer {rows} x {inputs} -> {outputs}, {dtype}"
                yield Finding(what, worst <= limit, f"relative error {worst:.1e}, allowed {limit:.0e}")


def backends(device: torch.device) -> Iterator[Finding]:
    """The products of each recipe run natively where the hardware has them."""
    if device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device)
    has = {"fp8_current": (major, minor) >= (8, 9), "fp8_rowwise": (major, minor) >= (8, 9)}
    has |= {"fp8_block": major >= 9, "mxfp8": major >= 10, "nvfp4": major >= 10}
    for recipe, native in has.items():
        layer, _ = ng.prepare(nn.Linear(64, 64, device=device), None, ng.recipe(recipe, first_last=(0, 0)))
        row = next(iter(ng.report(layer)))
        yield Finding(f"backend of {recipe}", native == ("scaled_mm" in row.backend), f"{row.backend}: {row.reason}")


def training(device: torch.device) -> Iterator[Finding]:
    """A small GPT learns on the device as it does on the CPU."""
    for recipe in TRAINED:
        here, there = (_final_loss(recipe, where) for where in (torch.device("cpu"), device))
        gap = abs(here - there)
        detail = f"loss {there:.4f}, on the CPU {here:.4f}, allowed gap {TRAINING_GAP}"
        yield Finding(f"{TRAINING_STEPS} steps of {recipe}", gap <= TRAINING_GAP, detail)


def _pairs() -> list[tuple[ng.CastSpec, ng.CastSpec]]:
    """The operands of every product of the variants, as matrices whose columns are summed over."""
    every = [
        LinearCasts.of(ng.recipe(recipe, **options).resolve("cpu"), quantized=True)
        for recipe, options in VARIANTS.values()
    ]
    pairs = [casts.along_the_sum(gemm) for casts in every for gemm in GEMMS]
    return list(dict.fromkeys(pair for pair in pairs if not any(spec.is_delayed for spec in pair)))


def _side(x: torch.Tensor, spec: ng.CastSpec, device: torch.device) -> Side:
    q = x.to(device)
    if not spec.in_blocks:
        quant_scale = scaling.quant_scale_of(kernels.amax(q), spec.format, spec.scale)
        codes = kernels.quantize(q, quant_scale, spec.format).codes
        return Side(codes, spec.format, spec.granularity, None, scaling.dequant_scale_of(quant_scale))
    done = kernels.quantize_blocks(q, spec.format, spec.granularity, spec.scale)
    factor = scaling.nvfp4_tensor_factor(done.amax) if spec.scale is ng.NVFP4 else None
    return Side(done.codes, spec.format, spec.granularity, done.dequant_scale, factor)


def _values(side: Side) -> torch.Tensor:
    """What an operand stands for, in float64."""
    if side.block_scale is None:
        values = kernels.dequantize(side.codes, None, side.format).double()
    else:
        values = kernels.dequantize_blocks(side.codes, side.block_scale, side.format, side.block).double()
    return values if side.tensor_factor is None else values * side.tensor_factor.double()


def _gradients(
    layer: nn.Linear,
    x: torch.Tensor,
    grad_output: torch.Tensor,
    recipe: str,
    options: dict[str, Any],
    emulation: str,
    dtype: torch.dtype,
    device: torch.device,
) -> list[torch.Tensor]:
    fields = {**options, "emulation": emulation, "first_last": (0, 0)}
    model, _ = ng.prepare(copy.deepcopy(layer).to(device), None, ng.recipe(recipe, **fields), autocast=False)
    x = x.to(device, dtype).requires_grad_()
    y = model(x)
    y.backward(grad_output.to(device, dtype))
    found = (y, x.grad, model.weight.grad, model.bias.grad)
    return [tensor.detach().float().cpu() for tensor in found if tensor is not None]


def _final_loss(recipe: str, device: torch.device) -> float:
    config = preset("tiny", vocab_size=256, layers=2, width=64, heads=4, context=64)
    model = GPT(config, generator=torch.Generator().manual_seed(0)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = ng.prepare(model, optimizer, recipe)
    text = torch.arange(8 * 65).reshape(8, 65) * 7 % 256  # a pattern that can be learned
    ids, targets = text[:, :-1].to(device), text[:, 1:].to(device)
    loss = torch.zeros(())
    for _ in range(TRAINING_STEPS):
        _, loss = model(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    )


def _relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm().clamp_min(1e-30))


CHECKS = (casts, tiles, scaled_products, products, backends, training)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", action="store_true", help="write a file under benchmarks/results/")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: run this on a machine with one, or with --device cpu")
        return 2
    torch.manual_seed(0)
    findings = []
    for finding in itertools.chain.from_iterable(check(device) for check in CHECKS):
        findings.append(finding)
        print(f"{'ok    ' if finding.passed else 'FAILED'} {finding.what}: {finding.detail}", flush=True)
    failed = sum(not finding.passed for finding in findings)
    print(f"{len(findings) - failed} passed, {failed} failed")
    if arguments.json:
        print(common.write_result("gpu_check", {"findings": [finding._asdict() for finding in findings]}))
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
