"""Forward and backward of one linear layer by every recipe, emulated on the CPU, against torch, torchao, bitsandbytes.

    python benchmarks/linear.py [--size 2048] [--tokens 2048] [--recipes fp8_block mxfp8] [--json]

Every contender gets the tensors that it would get in training: float32 runs in float32 throughout; bf16 in bf16
throughout; narrowgauge has float32 weights, and bf16 input and grad_output, as under its autocast; torchao's layers run
in bf16 throughout, as does bitsandbytes' (LLM.int8: its forward product in INT8, its backward products in bf16). Input,
weight and bias require gradients, which start as None (torchao's MXFP8 product knows no bias). Ratios are of medians of
one run; a layer of theirs that takes longer than a limit for one step is stopped, and its ratio is a bound.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import common
import torch
from torch import Tensor, nn

import narrowgauge as ng

# recipe -> peer -> most that ours may take of the peer's time
FAST_BF16_BOUNDS = {
    "fp8_current": {"fp32": 0.60, "bf16": 1.30, "torchao emulated": 0.50, "torchao native": 0.50},
    "fp8_block": {"fp32": 0.90, "torchao MXFP8 emulated": 0.50},
    "mxfp8": {"fp32": 0.90, "torchao MXFP8 emulated": 0.50},
    "nvfp4": {"fp32": 1.20, "torchao MXFP8 emulated": 0.50},
}
OTHER_BOUNDS = {"fp8_current": {"fp32": 1.30}}
RECIPES = tuple(name for name in ng.recipe_names() if ng.recipe(name).quantizes_gemms)
OURS = "narrowgauge "
READY = "ready"
LIBRARIES = ("torchao", "bitsandbytes")  # the first words of their layers' names


def step(layer: nn.Module, x: Tensor, grad_output: Tensor) -> Callable[[], None]:
    """One forward and backward, with all three gradients."""

    def run() -> None:
        for tensor in (x, *layer.parameters()):
            tensor.grad = None
        layer(x).backward(grad_output)

    return run


class TorchaoMXFP8(nn.Module):
    """torchao's emulated MXFP8 product, its casts in torch operations, as its layers call it; without the bias."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = layer.weight

    def forward(self, x: Tensor) -> Tensor:
        from torchao.prototype.moe_training.mxfp8_linear import mx_mm
        from torchao.prototype.mx_formats import config
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        fmt = torch.float8_e4m3fn
        kernels = (config.MXFP8Dim0CastKernelChoice.TORCH, config.MXFP8Dim1CastKernelChoice.TORCH)
        scales = config.ScaleCalculationMode.RCEIL
        return mx_mm.apply(x, self.weight, fmt, fmt, fmt, 32, KernelPreference.EMULATED, *kernels, scales, False)


def contenders(size: int, tokens: int, recipes: Sequence[str]) -> dict[str, Callable[[], Callable[[], None]]]:
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

    def ours(name: str) -> Callable[[], None]:
        recipe = ng.recipe(name, compute="bf16", exclude=(), first_last=0)
        layer = ng.prepare(copy_of(torch.float32), None, recipe)[0]
        assert ng.report(layer).rows[0].status == "converted", "the layer is not quantized: nothing to measure"
        return with_data(layer, torch.bfloat16)

    def torchao(emulate: bool) -> Callable[[], None]:
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear

        config = Float8LinearConfig(emulate=emulate)
        return with_data(Float8Linear.from_float(copy_of(torch.bfloat16), config), torch.bfloat16)

    def torchao_mxfp8() -> Callable[[], None]:
        return with_data(TorchaoMXFP8(copy_of(torch.bfloat16)), torch.bfloat16)

    def bitsandbytes() -> Callable[[], None]:
        import bitsandbytes as bnb  # type: ignore[import-not-found]

        layer = bnb.nn.Linear8bitLt(size, size, has_fp16_weights=True, threshold=0.0)
        layer.load_state_dict(base.state_dict())
        return with_data(layer.to(torch.bfloat16), torch.bfloat16)

    return {
        "fp32": lambda: with_data(copy_of(torch.float32), torch.float32),
        "bf16": lambda: with_data(copy_of(torch.bfloat16), torch.bfloat16),
        **{OURS + name: lambda name=name: ours(name) for name in recipes},
        "torchao emulated": lambda: torchao(emulate=True),
        "torchao native": lambda: torchao(emulate=False),
        "torchao MXFP8 emulated": torchao_mxfp8,
        "bitsandbytes LLM.int8": bitsandbytes,
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


def report(
    medians: dict[str, float], at_least: dict[str, float], bounds: dict[str, dict[str, float]]
) -> dict[str, dict[str, float]]:
    """Print the table; return for each recipe ours / each peer, at most, where the peer was stopped."""
    peers = {name: seconds for name, seconds in {**medians, **at_least}.items() if not name.startswith(OURS)}
    recipes = [name.removeprefix(OURS) for name in medians if name.startswith(OURS)]
    ratios = {r: {peer: medians[OURS + r] / seconds for peer, seconds in peers.items()} for r in recipes}
    rows = [[peer, f"{'> ' if peer in at_least else ''}{seconds * 1e3:.1f}", ""] for peer, seconds in peers.items()]
    for recipe, found in ratios.items():
        verdicts = [
            f"{found[peer]:.2f} x {peer} <= {most:.2f} {'ok' if found[peer] <= most else 'MISSED'}"
            for peer, most in bounds.get(recipe, {}).items()
            if peer in found
        ]
        against = "; ".join(verdicts) or f"{found['fp32']:.2f} x fp32"
        rows.append([OURS + recipe, f"{medians[OURS + recipe] * 1e3:.1f}", against])
    print(common.table(["forward + backward", "median ms", "ours / peer"], rows))
    return ratios


def comparison(medians: dict[str, float], at_least: dict[str, float], size: int, tokens: int) -> dict[str, Any]:
    """The table as bars."""
    milliseconds = {name: seconds * 1e3 for name, seconds in {**medians, **at_least}.items()}
    absent = {library: "not installed" for library in LIBRARIES if importlib.util.find_spec(library) is None}
    title = f"forward and backward of a linear layer, {tokens} tokens of {size} to {size} features"
    ours = [name for name in medians if name.startswith(OURS)]
    return common.bars(title, "ms, median", milliseconds, ours, at_least=at_least, absent=absent)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2048, help="input and output features")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--limit-s", type=float, default=20, help="stop another's layer whose one step takes longer")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--only", help="one step of this contender, untimed")
    parser.add_argument("--json", action="store_true", help="write a file under benchmarks/results/")
    arguments = parser.parse_args()

    warnings.filterwarnings("ignore", module="torchao|bitsandbytes")
    builders = contenders(arguments.size, arguments.tokens, arguments.recipes)
    if arguments.only:
        run = builders[arguments.only]()
        print(READY, flush=True)
        run()
        return 0
    at_least = {}
    for library in LIBRARIES:
        if importlib.util.find_spec(library) is None:
            print(f"{library} is not installed: its layers are left out")
            builders = {name: builder for name, builder in builders.items() if not name.startswith(library)}
    for name in [name for name in builders if name.startswith(LIBRARIES)]:
        if takes_longer_than(arguments.limit_s, name, arguments.size, arguments.tokens):
            at_least[name] = arguments.limit_s
            del builders[name]
    times = common.interleaved({name: build() for name, build in builders.items()}, arguments.repeats)
    medians = common.medians(times)
    bounds = FAST_BF16_BOUNDS if torch.cpu.get_capabilities().get("avx512_bf16") else OTHER_BOUNDS
    ratios = report(medians, at_least, bounds)
    checked = [
        (recipe, peer, most)
        for recipe, of_peer in bounds.items()
        for peer, most in of_peer.items()
        if peer in ratios.get(recipe, {})
    ]
    if arguments.json:
        result: dict[str, Any] = {
            "shape": {"tokens": arguments.tokens, "in_features": arguments.size, "out_features": arguments.size},
            "median_s": medians,
            "stopped_after_s": at_least,
            "ratio_of_ours": ratios,
            "figures": {
                f"time of a linear layer: {OURS}{recipe} / {peer}": {
                    "measured": ratios[recipe][peer],
                    "at_most": most,
                }
                for recipe, peer, most in checked
            },
            "repeats_s": times,
            "bars": [comparison(medians, at_least, arguments.size, arguments.tokens)],
        }
        print(common.write_result("linear", result))
    return int(any(ratios[recipe][peer] > most for recipe, peer, most in checked))


if __name__ == "__main__":
    raise SystemExit(main())
