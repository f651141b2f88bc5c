"""What `narrowgauge plan` predicts, against what runs hold, save and take; and how long the whole answer takes.

    python benchmarks/plan.py [--shapes NAME ...] [--json]

Five GPT shapes by four recipes, each in a process of its own: one step of AdamW. State is what `ng.ledger` counts then,
activations what `SavedActivations` counts in the forward pass, both against the plan's bytes: the largest
|predicted / measured - 1| of all. Peak: the most resident memory of the process in two steps, its building included,
less what it had when it had imported, compiled and loaded all that steps of a tiny model need; against the plan's peak
without its allowance for fragmentation. It includes what the allocator keeps, and temporaries of kernels, which the
plan leaves out.

Seconds: of `narrowgauge plan --model gpt-175b --gpus 1024 --memory-gb 80` in a fresh process, start of Python and
import of torch included: on the wall clock, and of its processor time, which other processes do not lengthen.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import common
import torch
from memory import environment, resident_bytes, settle
from tables import goal, is_met

import narrowgauge as ng
from narrowgauge.models.config import GPTConfig
from narrowgauge.models.gpt import GPT
from narrowgauge.models.presets import preset
from narrowgauge.observe.ledger import SavedActivations
from narrowgauge.observe.planner import STATE, plan

RECIPES = ("fp32", "bf16", "fp8_lm_o2", "narrow8")
# name -> (preset, changes, batch, tokens): small enough for two cores, of all that presets differ in
SHAPES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "tiny": ("tiny", {}, 4, 256),
    "gpt, 2 x 256": ("gpt-125m", {"layers": 2, "width": 256, "heads": 4, "vocab_size": 8192}, 4, 256),
    "gpt, 6 x 384": ("gpt-125m", {"layers": 6, "width": 384, "heads": 6, "vocab_size": 4096}, 2, 512),
    "gpt-7b's kind, 4 x 512": ("gpt-7b", {"layers": 4, "width": 512, "heads": 4, "vocab_size": 16384}, 2, 256),
    "llama, 3 x 512": (
        "llama3-8b", {"layers": 3, "width": 512, "heads": 8, "kv_heads": 2, "ffn_width": 1408, "vocab_size": 8000},
        1, 512,
    ),
}  # fmt: skip
STATE_WITHIN, ACTIVATION_WITHIN, MOST_SECONDS = 0.03, 0.10, 5.0
COMMAND = ["plan", "--model", "gpt-175b", "--gpus", "1024", "--memory-gb", "80"]


def config_of(name: str) -> GPTConfig:
    """The model of a shape."""
    base, changes, _, _ = SHAPES[name]
    return preset(base, **changes)


def step(config: GPTConfig, recipe: str, batch: int, tokens: int, steps: int) -> dict[str, Any]:
    """Ledger and activations of so many steps of a real model."""
    torch.manual_seed(0)
    model = GPT(config)
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4), recipe)
    ids = torch.randint(0, config.vocab_size, (batch, tokens + 1))
    found: dict[str, Any] = {}
    for at in range(steps):
        with SavedActivations(model) as counter:
            _, loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        if at == 0:
            found = {"roles": dict(ng.ledger(model, optimizer).roles), "activation": counter.bytes}
        del loss
        optimizer.zero_grad()
    return found


def measure(name: str, recipe: str) -> dict[str, Any]:
    """In a process of its own: the two counts, and the peak of its memory."""
    _, _, batch, tokens = SHAPES[name]
    small = preset("tiny", layers=1, width=64, heads=2, kv_heads=2, vocab_size=256)
    step(small, recipe, 1, 32, steps=2)
    settle()
    before = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    found = step(config_of(name), recipe, batch, tokens, steps=2)
    return {**found, "peak_bytes": resident_bytes("VmHWM") - before}


def predict(name: str, recipe: str) -> dict[str, Any]:
    """What the plan says."""
    _, _, batch, tokens = SHAPES[name]
    found = plan(config_of(name), recipe, batch_size=batch, sequence_length=tokens)
    roles = {role: size for role, size in found.bytes.items() if role in STATE}
    return {
        "roles": roles,
        "activation": found.bytes["activation"],
        "peak_bytes": found.peak - found.bytes["fragmentation"],
    }


def in_fresh_process(name: str, recipe: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", name, recipe]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    if done.returncode:
        raise SystemExit(f"{name} by {recipe}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def seconds_of_the_answer() -> dict[str, float]:
    """Of the whole command, in a fresh process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    command = [sys.executable, "-m", "narrowgauge", *COMMAND]
    subprocess.run(command, capture_output=True, check=True)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"wall": wall, "processor": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def off(predicted: float, measured: float) -> float:
    """How far a prediction is from what was measured, as a share of that."""
    return abs(predicted / measured - 1)


def row_of(run: dict[str, Any]) -> list[str]:
    """Of the table."""
    both = [run[key] for key in ("predicted", "measured")]
    return [
        run["shape"],
        run["recipe"],
        *(f"{sum(each['roles'].values()):,}" for each in both),
        *(f"{each['activation']:,}" for each in both),
        f"{both[0]['peak_bytes'] / both[1]['peak_bytes']:.2f}",
    ]


def figures(runs: list[dict[str, Any]], seconds: dict[str, float]) -> dict[str, dict[str, float]]:
    """Goals and what was measured, as the README's table reads them."""
    state = [off(sum(r["predicted"]["roles"].values()), sum(r["measured"]["roles"].values())) for r in runs]
    saved = [off(r["predicted"]["activation"], r["measured"]["activation"]) for r in runs]
    what = f"plan, {len({r['shape'] for r in runs})} shapes x {len({r['recipe'] for r in runs})} recipes"
    return {
        f"{what}: state against ng.ledger, the largest share off": {"measured": max(state), "at_most": STATE_WITHIN},
        f"{what}: saved activations, the largest share off": {"measured": max(saved), "at_most": ACTIVATION_WITHIN},
        "plan of 175B on 1,024 GPUs, whole command: seconds": {"measured": seconds["wall"], "at_most": MOST_SECONDS},
        "plan of 175B on 1,024 GPUs, whole command: seconds of processor time": {
            "measured": seconds["processor"],
            "at_most": MOST_SECONDS,
        },
    }


def main() -> int:
    """Print the comparison, write the result file with --json; exit 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--json", action="store_true", help="write a file under benchmarks/results/")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*arguments.measure)))
        return 0
    seconds = seconds_of_the_answer()
    runs = []
    for name, recipe in itertools.product(arguments.shapes, RECIPES):
        predicted, measured = predict(name, recipe), in_fresh_process(name, recipe)
        runs.append({"shape": name, "recipe": recipe, "predicted": predicted, "measured": measured})
        print(" | ".join(row_of(runs[-1])), file=sys.stderr, flush=True)
    rows = [row_of(each) for each in runs]
    header = ["shape", "recipe", "state: plan", "ledger", "saved: plan", "SavedActivations", "peak: plan / process"]
    print(common.table(header, rows))
    found = figures(runs, seconds)
    for name, figure in found.items():
        print(f"{name}: {figure['measured']:.4f}, goal {goal(figure)}  {'ok' if is_met(figure) else 'MISSED'}")
    if arguments.json:
        print(common.write_result("plan", {"figures": found, "runs": runs, "seconds": seconds}))
    return int(not all(is_met(figure) for figure in found.values()))


if __name__ == "__main__":
    sys.exit(main())
