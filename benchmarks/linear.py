"""Forward and backward of one linear layer: fp8_current emulated on the CPU, against torch and torchao.

    python benchmarks/linear.py [--size 2048] [--tokens 2048] [--json]

Every contender gets the tensors that it would get in training: float32 runs in float32 throughout; bf16 in bf16
throughout; narrowgauge has float32 weights, and bf16 input and grad_output, as under its autocast; torchao's layer runs
in bf16 throughout. Input, weight and bias require gradients, which start as None. Ratios are of medians of one run.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import common
import torch
from torch import Tensor, nn

import narrowgauge as ng

FAST_BF16_BOUNDS = {"fp32": 0.60, "bf16": 1.30, "torchao emulated": 0.50, "torchao native": 0.50}
OTHER_BOUNDS = {"fp32": 1.30}
OURS = "narrowgauge fp8_current"


def step(layer: nn.Module, x: Tensor, grad_output: Tensor) -> Callable[[], None]:
    """One forward and backward, with all three gradients."""

    def run() -> None:
        for tensor in (x, *layer.parameters()):
            tensor.grad = None
        layer(x).backward(grad_output)

    return run


def contenders(size: int, tokens: int) -> dict[str, Callable[[], None]]:
    torch.manual_seed(0)
    base = nn.Linear(size, size)
    x, grad_output = torch.randn(tokens, size), torch.randn(tokens, size)

    def copy_of(dtype: torch.dtype) -> nn.Linear:
        layer = nn.Linear(size, size)
        layer.load_state_dict(base.state_dict())
        return layer.to(dtype)

    def with_data(layer: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
        return step(layer, x.to(dtype).requires_grad_(), grad_output.to(dtype))

    ours, _ = ng.prepare(copy_of(torch.float32), None, ng.recipe("fp8_current", compute="bf16", exclude=()))
    runs = {
        "fp32": with_data(copy_of(torch.float32), torch.float32),
        "bf16": with_data(copy_of(torch.bfloat16), torch.bfloat16),
        OURS: with_data(ours, torch.bfloat16),
    }
    for name, layer in torchao_layers(lambda: copy_of(torch.bfloat16)).items():
        runs[name] = with_data(layer, torch.bfloat16)
    return runs


def torchao_layers(make: Callable[[], nn.Linear]) -> dict[str, nn.Module]:
    """torchao's Float8Linear in both its modes, or none where it is not installed."""
    try:
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear
    except ImportError:
        warnings.warn("torchao is not installed: its layers are left out", stacklevel=2)
        return {}
    modes = {"torchao emulated": True, "torchao native": False}
    return {name: Float8Linear.from_float(make(), Float8LinearConfig(emulate=on)) for name, on in modes.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2048, help="input and output features")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="write a file under benchmarks/results/")
    arguments = parser.parse_args()

    runs = contenders(arguments.size, arguments.tokens)
    times = common.interleaved(runs, arguments.repeats)
    medians = common.medians(times)
    capabilities = torch.cpu.get_capabilities()
    bounds = FAST_BF16_BOUNDS if capabilities.get("avx512_bf16") else OTHER_BOUNDS
    ratios = {name: medians[OURS] / seconds for name, seconds in medians.items() if name != OURS}
    passed = all(ratios[name] <= bound for name, bound in bounds.items() if name in ratios)
    rows = [[OURS, f"{medians[OURS] * 1e3:.1f}", "", ""]]
    for name, ratio in ratios.items():
        bound = f"<= {bounds[name]:.2f} {'ok' if ratio <= bounds[name] else 'MISSED'}" if name in bounds else ""
        rows.append([name, f"{medians[name] * 1e3:.1f}", f"{ratio:.2f}", bound])
    print(common.table(["forward + backward", "median ms", "ours / this", "bound"], rows))
    if arguments.json:
        result: dict[str, Any] = {
            "shape": {"tokens": arguments.tokens, "in_features": arguments.size, "out_features": arguments.size},
            "median_s": medians,
            "ratio_of_ours": ratios,
            "figures": {
                f"time of a linear layer: {OURS} / {name}": {"measured": ratio, "at_most": bounds[name]}
                for name, ratio in ratios.items()
                if name in bounds
            },
            "repeats_s": times,
        }
        print(common.write_result("linear", result))
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
