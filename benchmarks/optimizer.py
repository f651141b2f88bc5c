"""AdamW's step in 8 bits against torch's in float32, torchao's AdamWFp8 and bitsandbytes' AdamW8bit, on the CPU.

    python benchmarks/optimizer.py [--matrices 1 8] [--size 4096] [--small 4000] [--json]

The state is the recipe narrow8's: bfloat16 parameters with 8-bit residuals, E4M3 gradients, both moments in 8 bits.
Beside it, with no goal of its own, fp8_lm_o2's: scaled float16 parameters, E4M3 gradients, moments in E4M3 and float16,
each with one scale for the tensor, which takes a second pass over memory.
torch has everything in float32: fused=True for the large matrices, its default (foreach) for the many small tensors.
The peers with 8-bit moments have float32 parameters and gradients. torchao compiles its step, which needs a C++
compiler; each of them runs in a process of its own, which is stopped after a limit: its ratio is then a bound. Ratios
are of medians of one run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import common
import torch
from torch import nn

import narrowgauge as ng

OURS, FP8_LM = "narrowgauge narrow8", "narrowgauge fp8_lm_o2"
FUSED, FOREACH = "torch fused fp32", "torch foreach fp32"
PEERS = ("torchao AdamWFp8", "bitsandbytes AdamW8bit")
MATRICES = (1, 8)  # of 4096 x 4096: 16.8M and 134M parameters
# at most, ours / the peer's time
BOUNDS = {FUSED: 1.6, FOREACH: 1.5, "torchao AdamWFp8": 1 / 6, "bitsandbytes AdamW8bit": 1 / 15}
SMALL_SIDE = 100  # rows and columns of a small tensor: 10k parameters
Step = Callable[[], object]


def parameters(count: int, side: int) -> list[nn.Parameter]:
    """Matrices with float32 gradients, as a model would start."""
    draw = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(side, side, generator=draw) * 0.02) for _ in range(count)]
    for p in made:
        p.grad = torch.randn(side, side, generator=draw) * 1e-3
    return made


def ours(name: str, count: int, side: int) -> Step:
    recipe = ng.recipe(name.removeprefix("narrowgauge "))
    made = [nn.Parameter(stored(p.detach(), recipe.param)) for p in parameters(count, side)]
    for p, wide in zip(made, parameters(count, side), strict=True):
        assert wide.grad is not None
        p.grad_dtype = torch.float32
        p.grad = ng.quantize(wide.grad, recipe.grad)
    moments = {"exp_avg": recipe.exp_avg, "exp_avg_sq": recipe.exp_avg_sq, "master": recipe.master}
    return ng.optim.AdamW(made, lr=1e-4, min_state_size=recipe.min_state_size, **moments).step


def stored(values: torch.Tensor, spec: ng.CastSpec) -> torch.Tensor:
    return ng.quantize(values, spec) if spec.is_scaled else values.bfloat16()


def fused(count: int, side: int) -> Step:
    return torch.optim.AdamW(parameters(count, side), lr=1e-4, fused=True).step


def foreach(count: int, side: int) -> Step:
    return torch.optim.AdamW(parameters(count, side), lr=1e-4, foreach=True).step


def peer(name: str, count: int, side: int) -> Step:
    made = parameters(count, side)
    if name == "torchao AdamWFp8":
        from torchao.optim import AdamWFp8

        return AdamWFp8(made, lr=1e-4).step
    import bitsandbytes  # type: ignore[import-not-found]

    return bitsandbytes.optim.AdamW8bit(made, lr=1e-4).step


def is_absent(name: str) -> str | None:
    """Why a peer cannot run here, or None."""
    module = name.split()[0]
    if importlib.util.find_spec(module) is None:
        return "not installed"
    if module == "torchao" and not any(map(shutil.which, ("g++", "c++", "clang++"))):
        return "its step is compiled, and there is no C++ compiler"
    return None


def time_peer(name: str, count: int, side: int, repeats: int, limit_s: float) -> dict[str, Any]:
    """The seconds of a peer's steps, in a process of its own: {"repeats_s"}, {"at_least_s"} or {"absent"}.

    limit_s: for the first step, which may compile, and again for all others.
    """
    absent = is_absent(name)
    if absent is not None:
        return {"absent": absent}
    shape = ["--matrices", str(count), "--size", str(side), "--repeats", str(repeats)]
    command = [sys.executable, __file__, "--only", name, *shape]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        assert child.stdout is not None
        start = time.perf_counter()
        with killed_after(child, limit_s):
            first = child.stdout.readline()
        if not first:
            stopped = time.perf_counter() - start >= limit_s
            why = f"no step within {limit_s:g} s" if stopped else f'its step failed, see --only "{name}"'
            return {"absent": why}
        with killed_after(child, limit_s):
            seconds = [json.loads(line) for line in child.stdout]
    return {"repeats_s": seconds} if seconds else {"at_least_s": limit_s}


@contextmanager
def killed_after(child: subprocess.Popen[str], limit_s: float) -> Iterator[None]:
    """Ends the process where the body takes longer."""
    timer = threading.Timer(limit_s, child.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def run_peer(name: str, count: int, side: int, repeats: int) -> int:
    """Write the seconds of each step as a line; the first includes what is made once, such as compilation."""
    step = peer(name, count, side)
    for _ in range(1 + repeats):
        start = time.perf_counter()
        step()
        print(json.dumps(time.perf_counter() - start), flush=True)
    return 0


def measure(count: int, side: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Times of one size, and ours / each peer's: {"median_s", "repeats_s", "ratio_of_ours", "left_out"}."""
    base = FUSED if side == arguments.size else FOREACH
    runs = {name: ours(name, count, side) for name in (OURS, FP8_LM)}
    runs[base] = (fused if base == FUSED else foreach)(count, side)
    times = common.interleaved(runs, arguments.repeats)
    medians, left_out, at_least = common.medians(times), {}, {}
    if base == FUSED and count == min(arguments.matrices):
        for name in PEERS:
            found = time_peer(name, count, side, arguments.repeats, arguments.limit_s)
            if "repeats_s" in found:
                times[name], medians[name] = found["repeats_s"], statistics.median(found["repeats_s"])
            elif "at_least_s" in found:
                medians[name] = at_least[name] = found["at_least_s"]
            else:
                left_out[name] = found["absent"]
    ratios = {name: medians[OURS] / seconds for name, seconds in medians.items() if name in BOUNDS}
    return {
        "parameters": count * side**2, "tensors": count, "median_s": medians, "ratio_of_ours": ratios,
        "stopped_after_s": at_least, "left_out": left_out, "repeats_s": times,
    }  # fmt: skip


def report(results: dict[str, dict[str, Any]]) -> None:
    rows = []
    for size, found in results.items():
        for name, seconds in found["median_s"].items():
            ratio = found["ratio_of_ours"].get(name)
            verdict = ""
            if ratio is not None:
                verdict = f"{ratio:.3f} x <= {BOUNDS[name]:.3f} {'ok' if ratio <= BOUNDS[name] else 'MISSED'}"
            rows.append([size, name, f"{'> ' if name in found['stopped_after_s'] else ''}{seconds * 1e3:.2f}", verdict])
        rows += [[size, name, "-", why] for name, why in found["left_out"].items()]
    print(common.table(["parameters", "AdamW step", "median ms", "ours / peer"], rows))


def comparison(size: str, found: dict[str, Any]) -> dict[str, Any]:
    """One size as bars."""
    milliseconds = {name: seconds * 1e3 for name, seconds in found["median_s"].items()}
    return common.bars(
        f"AdamW step of {size} parameters", "ms, median", milliseconds, (OURS, FP8_LM),
        at_least=found["stopped_after_s"], absent=found["left_out"],
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrices", type=int, nargs="+", default=list(MATRICES), help="how many large matrices")
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of a large matrix")
    parser.add_argument("--small", type=int, default=4000, help="how many small tensors")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--limit-s",
        type=float,
        default=300,
        help="stop a peer whose first step takes longer, or whose others together do",
    )
    parser.add_argument("--only", choices=PEERS, help="time this peer alone, and print the seconds of each step")
    parser.add_argument("--json", action="store_true", help="write a file under benchmarks/results/")
    arguments = parser.parse_args()

    warnings.filterwarnings("ignore", module="torchao|bitsandbytes")
    if arguments.only:
        return run_peer(arguments.only, arguments.matrices[0], arguments.size, arguments.repeats)
    shapes = {f"{count * arguments.size**2 / 1e6:.1f}M": (count, arguments.size) for count in arguments.matrices}
    if arguments.small:
        shapes[f"{arguments.small} x {SMALL_SIDE**2 // 1000}k"] = (arguments.small, SMALL_SIDE)
    results = {size: measure(count, side, arguments) for size, (count, side) in shapes.items()}
    print(f"{torch.get_num_threads()} threads")
    report(results)
    figures = {
        f"AdamW step of {size} parameters: ours / {name}": {"measured": ratio, "at_most": BOUNDS[name]}
        for size, found in results.items()
        for name, ratio in found["ratio_of_ours"].items()
    }
    if arguments.json:
        bars = [comparison(size, found) for size, found in results.items()]
        print(common.write_result("optimizer", {"figures": figures, "sizes": results, "bars": bars}))
    return int(any(figure["measured"] > figure["at_most"] for figure in figures.values()))


if __name__ == "__main__":
    raise SystemExit(main())
