"""Forward and backward of one linear layer: fp8_current emulated on the CPU, against torch and torchao.

    python benchmarks/linear.py [--size 2048] [--tokens 2048] [--json]

Every contender gets the tensors that it would get in training: float32 runs in float32 throughout; bf16 in bf16
throughout; narrowgauge has float32 weights, and bf16 input and grad_output, as under its autocast; torchao's layer runs
in bf16 throughout. Input, weight and bias require gradients, which start as None. Ratios are of medians of one run; a
layer of torchao that takes longer than a limit for one step is stopped, and its ratio is a bound.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import common
import torch
from torch import Tensor, nn

import narrowgauge as ng

FAST_BF16_BOUNDS = {"fp32": 0.60, "bf16": 1.30, "torchao emulated": 0.50, "torchao native": 0.50}
OTHER_BOUNDS = {"fp32": 1.30}
OURS = "narrowgauge fp8_current"
READY = "ready"


def step(layer: nn.Module, x: Tensor, grad_output: Tensor) -> Callable[[], None]:
    """One forward and backward, with all three gradients."""

    def run() -> None:
        for tensor in (x, *layer.parameters()):
            tensor.grad = None
        layer(x).backward(grad_output)

    return run


def contenders(size: int, tokens: int) -> dict[str, Callable[[], Callable[[], None]]]:
    """Name -> a function that builds the layer and its data, and returns the step to be timed."""
    torch.manual_seed(0)
    base = nn.Linear(size, size)
    x, grad_output = torch.randn(tokens, size), torch.randn(tokens, size)

    def copy_of(dtype: torch.dtype) -> nn.Linear:
        layer = nn.Linear(size, size)
        layer.load_state_dict(base.state_dict())
        return layer.to(dtype)

    def with_data(layer: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
        return step(layer, x.to(dtype).requires_grad_(), grad_output.to(dtype))

    def ours() -> Callable[[], None]:
        recipe = ng.recipe("fp8_current", compute="bf16", exclude=())
        return with_data(ng.prepare(copy_of(torch.float32), None, recipe)[0], torch.bfloat16)

    def torchao(emulate: bool) -> Callable[[], None]:
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear

        config = Float8LinearConfig(emulate=emulate)
        return with_data(Float8Linear.from_float(copy_of(torch.bfloat16), config), torch.bfloat16)

    return {
        "fp32": lambda: with_data(copy_of(torch.float32), torch.float32),
        "bf16": lambda: with_data(copy_of(torch.bfloat16), torch.bfloat16),
        OURS: ours,
        "torchao emulated": lambda: torchao(emulate=True),
        "torchao native": lambda: torchao(emulate=False),
    }


def takes_longer_than(limit_s: float, name: str, size: int, tokens: int) -> bool:
    """Run one step of a contender in a process of its own, and stop it after the limit.

    torch's FP8 product on a CPU with AMX is oneDNN's scalar reference: minutes a step.
    """
    command = [sys.executable, __file__, "--only", name, "--size", str(size), "--tokens", str(tokens)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        while child.stdout.readline().strip() not in (READY, ""):
            pass
        try:
            if child.wait(timeout=limit_s):
                raise SystemExit(f"{name}: its step failed with exit code {child.returncode}, see above")
        except subprocess.TimeoutExpired:
            child.kill()
            return True
    return False


def report(medians: dict[str, float], at_least: dict[str, float], bounds: dict[str, float]) -> dict[str, float]:
    """Print the table; return ours / each of the others, at most, where that one was stopped."""
    ratios = {name: medians[OURS] / seconds for name, seconds in {**medians, **at_least}.items() if name != OURS}
    rows = [[OURS, f"{medians[OURS] * 1e3:.1f}", "", ""]]
    for name, ratio in ratios.items():
        stopped = name in at_least
        time_ms = f"> {at_least[name] * 1e3:.0f}" if stopped else f"{medians[name] * 1e3:.1f}"
        bound = f"<= {bounds[name]:.2f} {'ok' if ratio <= bounds[name] else 'MISSED'}" if name in bounds else ""
        rows.append([name, time_ms, f"{'< ' if stopped else ''}{ratio:.2f}", bound])
    print(common.table(["forward + backward", "median ms", "ours / this", "bound"], rows))
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2048, help="input and output features")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--limit-s", type=float, default=20, help="stop a torchao layer whose one step takes longer")
    parser.add_argument("--only", help="one step of this contender, untimed")
    parser.add_argument("--json", action="store_true", help="write a file under benchmarks/results/")
    arguments = parser.parse_args()

    builders = contenders(arguments.size, arguments.tokens)
    if arguments.only:
        run = builders[arguments.only]()
        print(READY, flush=True)
        run()
        return 0
    at_least = {}
    if importlib.util.find_spec("torchao") is None:
        print("torchao is not installed: its layers are left out")
        builders = {name: builder for name, builder in builders.items() if not name.startswith("torchao")}
    for name in [name for name in builders if name.startswith("torchao")]:
        if takes_longer_than(arguments.limit_s, name, arguments.size, arguments.tokens):
            at_least[name] = arguments.limit_s
            del builders[name]
    times = common.interleaved({name: build() for name, build in builders.items()}, arguments.repeats)
    medians = common.medians(times)
    bounds = FAST_BF16_BOUNDS if torch.cpu.get_capabilities().get("avx512_bf16") else OTHER_BOUNDS
    ratios = report(medians, at_least, bounds)
    passed = all(ratios[name] <= bound for name, bound in bounds.items() if name in ratios)
    if arguments.json:
        result: dict[str, Any] = {
            "shape": {"tokens": arguments.tokens, "in_features": arguments.size, "out_features": arguments.size},
            "median_s": medians,
            "stopped_after_s": at_least,
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
