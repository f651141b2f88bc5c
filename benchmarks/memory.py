"""Bytes of training state a parameter, and the peak memory of a training step, each in a fresh process.

    python benchmarks/memory.py [--preset gpt-125m] [--peak-preset gpt-350m] [--no-peak] [--json]

State: parameters, masters, gradients and moments of a GPT, embeddings included, as `ng.ledger` counts their storages
after the backward of the second step (batch 1 x 64), and as the process holds them: its resident memory then, less that
after a step of a tiny model by the same recipe, which has loaded and compiled what there is to load.

Peak: the most resident memory that a process had from its beginning to the end of the second step, building of the
model and its preparation included, less what it had after its imports.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import common
import torch

import narrowgauge as ng
from narrowgauge.models.gpt import GPT
from narrowgauge.models.presets import preset

# name -> (recipe, its options, whether gradients are released)
CONTENDERS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "fp32": ("fp32", {}, False),
    "fp8_lm_o1": ("fp8_lm_o1", {}, False),
    "fp8_lm_o2": ("fp8_lm_o2", {}, False),
    "fp8_lm_o3": ("fp8_lm_o3", {}, False),
    "narrow8": ("narrow8", {}, False),
    "narrow8_sr": ("narrow8_sr", {}, False),
    "narrow8, gradients released": ("narrow8", {}, True),
    "narrow8_sr, gradients released": ("narrow8_sr", {}, True),
    "narrow8, moments in 4 bits": ("narrow8", {"moment_bits": 4}, False),
}
ALLOWED_BYTES = dict(zip(CONTENDERS, (16.0, 11.1, 6.1, 7.1, 6.15, 5.15, 5.2, 4.2, 5.2), strict=True))
ALLOWED_PEAK = 0.50
# what a process may hold beside: buffers that libraries keep, fragments
ALLOWED_BESIDE_LEDGER = 0.5
BATCH, TOKENS = 1, 64


def one_step(name: str, shape: str, *, end: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Build, prepare, step, and run the second step's backward; `end`: the second step, too."""
    recipe, options, released = CONTENDERS[name]
    torch.manual_seed(0)
    model = GPT(preset(shape))
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4), ng.recipe(recipe, **options))
    if released:
        ng.optim.release_gradients(optimizer)
    ids = torch.randint(0, model.config.vocab_size, (BATCH, TOKENS + 1))
    for step in range(2):
        _, loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        if step == 0 or end:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


def resident_bytes(field: str = "VmRSS") -> int:
    """Resident memory of this process now, or with VmHWM the most that it had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise SystemExit(f"/proc/self/status has no {field}: this benchmark needs Linux")


def settle() -> None:
    """Give freed memory back to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def measure_state(name: str, shape: str) -> dict[str, Any]:
    """The ledger, and resident bytes a parameter, with gradients and moments there."""
    one_step(name, "tiny", end=True)
    settle()
    before = resident_bytes()
    model, optimizer = one_step(name, shape, end=False)
    settle()
    counted = ng.ledger(model, optimizer)
    resident = resident_bytes() - before
    return {**counted.to_dict(), "resident_bytes_per_parameter": resident / counted.parameters}


def measure_peak(name: str, shape: str) -> dict[str, Any]:
    """The most resident bytes of a process that trains two steps, less those after its imports."""
    settle()
    before = resident_bytes()
    one_step(name, shape, end=True)
    return {"peak_bytes": resident_bytes("VmHWM") - before}


def environment() -> dict[str, str]:
    """Of a process whose memory is measured."""
    # glibc raises its threshold while a program runs, and then keeps what was freed: for all contenders it stays
    return {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


def in_fresh_process(kind: str, name: str, shape: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", kind, name, shape]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    if done.returncode:
        raise SystemExit(f"{kind} of {name}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def figures(states: dict[str, Any], peaks: dict[str, Any], shape: str, peak_shape: str) -> dict[str, dict[str, float]]:
    """Goals and what was measured, as the README's table reads them."""
    found = {
        f"bytes a parameter, {shape}: {name}": {
            "measured": round(state["bytes_per_parameter"]["total"], 3),  # below that are torch's step counters
            "at_most": ALLOWED_BYTES[name],
        }
        for name, state in states.items()
    }
    beside = {n: s["resident_bytes_per_parameter"] - s["bytes_per_parameter"]["total"] for n, s in states.items()}
    found[f"resident bytes a parameter beside the ledger's, {shape}: the most of all recipes"] = {
        "measured": max(map(abs, beside.values())),
        "at_most": ALLOWED_BESIDE_LEDGER,
    }
    if peaks:
        found[f"peak memory of a training step, {peak_shape}: narrow8 / fp32"] = {
            "measured": peaks["narrow8"]["peak_bytes"] / peaks["fp32"]["peak_bytes"],
            "at_most": ALLOWED_PEAK,
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt-125m")
    parser.add_argument("--peak-preset", default="gpt-350m")
    parser.add_argument("--recipes", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--no-peak", action="store_true")
    parser.add_argument("--json", action="store_true", help="write a file under benchmarks/results/")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        kind, name, shape = arguments.measure
        print(json.dumps({"state": measure_state, "peak": measure_peak}[kind](name, shape)))
        return 0
    states = {name: in_fresh_process("state", name, arguments.preset) for name in arguments.recipes}
    roles = list(dict.fromkeys(role for state in states.values() for role in state["bytes_per_parameter"]))
    header = [arguments.preset, *(role for role in roles if role != "total"), "total", "resident"]
    rows = [
        [name, *(f"{state['bytes_per_parameter'].get(role, 0):.3f}" for role in header[1:-1]),
         f"{state['resident_bytes_per_parameter']:.3f}"]
        for name, state in states.items()
    ]  # fmt: skip
    print(common.table(header, rows), flush=True)
    shape = arguments.peak_preset
    peaks = {} if arguments.no_peak else {name: in_fresh_process("peak", name, shape) for name in ("fp32", "narrow8")}
    for name, peak in peaks.items():
        print(f"{name:10} peak of {shape}: {peak['peak_bytes']:,} bytes")
    found = figures(states, peaks, arguments.preset, shape)
    for name, figure in found.items():
        outcome = "ok" if figure["measured"] <= figure["at_most"] else "MISSED"
        print(f"{name:90} {figure['measured']:.3f}  <= {figure['at_most']:g}  {outcome}")
    if arguments.json:
        print(common.write_result("memory", {"states": states, "peaks": peaks, "figures": found}))
    return int(any(figure["measured"] > figure["at_most"] for figure in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
