"""Holds a GPU against the emulation: codes and scales bit for bit, products within the order of summation.

    python benchmarks/gpu_check.py [--device cuda] [--json]

Every line says what was compared and how it came out; the exit code is 1 where one fails, 2 where there is no GPU.
`--device cpu` runs the same comparisons of the CPU's fast emulation against its exact one.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from typing import NamedTuple

import common
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.models.gpt import GPT
from narrowgauge.models.presets import preset

FORMATS = ("E4M3FN", "E5M2", "E3M2FN", "E2M3FN", "E2M1FN", "FP16", "BF16")
SCALES = {"current": ng.CURRENT, "current, power of two": ng.CURRENT_POW2, "tensor power of two": ng.TENSOR_POW2}
SIZES = ((64, 64, 64), (50, 33, 17), (128, 96, 160), (1, 16, 31), (7, 272, 144))  # rows, in, out; some are padded
RECIPES = ("fp32", "tf32", "bf16", "fp16", "fp8_current", "fp8_delayed")
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


def products(device: torch.device) -> Iterator[Finding]:
    """Output and the three gradients of one layer against the exact emulation on the CPU."""
    for recipe in RECIPES:
        for rows, inputs, outputs in SIZES:
            for dtype in (torch.float32,) if recipe in IN_FLOAT32 else (torch.float32, torch.bfloat16):
                layer = nn.Linear(inputs, outputs)
                x, grad_output = torch.randn(rows, inputs), torch.randn(rows, outputs)
                exact = _gradients(layer, x, grad_output, recipe, "exact", dtype, torch.device("cpu"))
                found = _gradients(layer, x, grad_output, recipe, "fast", dtype, device)
                worst = max(_relative_error(f, e) for f, e in zip(found, exact, strict=True))
                is_wide = dtype is torch.float32 and (recipe in IN_FLOAT32 or recipe.startswith("fp8"))
                # on a CPU the fast emulation rounds to bf16 once more
                limit = FLOAT32_RESULT if is_wide and device.type != "cpu" else HALF_RESULT
                what = f"{recipe} layer {rows} x {inputs} -> {outputs}, {dtype}"
                yield Finding(what, worst <= limit, f"relative error {worst:.1e}, allowed {limit:.0e}")


def backends(device: torch.device) -> Iterator[Finding]:
    """FP8 products run natively where the hardware has them."""
    layer, _ = ng.prepare(nn.Linear(64, 64, device=device), None, "fp8_current")
    row = next(iter(ng.report(layer)))
    has_fp8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    yield Finding("FP8 backend", has_fp8 == ("scaled_mm" in row.backend), f"{row.backend}: {row.reason}")


def training(device: torch.device) -> Iterator[Finding]:
    """A small GPT learns on the device as it does on the CPU."""
    for recipe in ("bf16", "fp8_current", "fp8_delayed"):
        here, there = (_final_loss(recipe, where) for where in (torch.device("cpu"), device))
        gap = abs(here - there)
        detail = f"loss {there:.4f}, on the CPU {here:.4f}, allowed gap {TRAINING_GAP}"
        yield Finding(f"{TRAINING_STEPS} steps of {recipe}", gap <= TRAINING_GAP, detail)


def _gradients(
    layer: nn.Linear,
    x: torch.Tensor,
    grad_output: torch.Tensor,
    recipe: str,
    emulation: str,
    dtype: torch.dtype,
    device: torch.device,
) -> list[torch.Tensor]:
    model, _ = ng.prepare(copy.deepcopy(layer).to(device), None, ng.recipe(recipe, emulation=emulation), autocast=False)
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
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def _relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm().clamp_min(1e-30))


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
    findings = [finding for check in (casts, products, backends, training) for finding in check(device)]
    for finding in findings:
        print(f"{'ok    ' if finding.passed else 'FAILED'} {finding.what}: {finding.detail}")
    failed = sum(not finding.passed for finding in findings)
    print(f"{len(findings) - failed} passed, {failed} failed")
    if arguments.json:
        print(common.write_result("gpu_check", {"findings": [finding._asdict() for finding in findings]}))
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
