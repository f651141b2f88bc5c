"""Bytes of activations between tensor-parallel ranks, on the loopback interface: in 8 bits against bf16.

    python benchmarks/communication_tensor.py [--steps 3] [--json]

Two gloo processes train a GPT of 4 blocks of width 512 on 4 sequences of 128 tokens, sequence-parallel and tensor
parallel alone. narrow8: codes of the layers' operands and blocks of 8 bits. bf16: the same layers by the recipe bf16,
which also keep parts of the sequences for backward and gather them again, as Megatron-LM does. bf16 kept: plain bf16
layers that keep the gathered inputs, and gather them once. Counted are whole steps without the optimizer's, amax
values, gradients of norms and the sums of the loss included. Sums are made by all-to-all, the ideal: gloo's own
reduce-scatter moves twice the bytes.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import common
import loopback
import torch
from tables import goal, is_met

import narrowgauge as ng
from narrowgauge.distributed import layout, parallelize_tensor
from narrowgauge.models.config import GPTConfig
from narrowgauge.models.gpt import GPT

RANKS = 2
MOST_RATIO = 0.55
CONFIG = GPTConfig(layers=4, width=512, heads=8, context=128, vocab_size=1024)
SEQUENCES = 4
NARROW, BF16, KEPT = "narrow8", "bf16", "bf16 kept"
KINDS = {"sequence parallel": True, "tensor parallel": False}
RUNS = [(kind, name) for kind in KINDS for name in (NARROW, BF16, KEPT)]


def build(name: str, sequence: bool) -> torch.nn.Module:
    """A parallelized model that trains by a recipe, or plainly in bfloat16."""
    model = GPT(CONFIG, device="cpu", generator=torch.Generator().manual_seed(0))
    if name == KEPT:
        model = model.to(torch.bfloat16)
    parallelize_tensor(model, layout(tensor=RANKS), sequence=sequence)
    return model if name == KEPT else ng.prepare(model, None, name)[0]


def measure(steps: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Bytes of a step by kind of parallelism and run: one rank's part of all runs, one after the other."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(CONFIG.vocab_size, (SEQUENCES, CONFIG.context + 1), generator=generator)
    found: dict[str, dict[str, dict[str, Any]]] = {kind: {} for kind in KINDS}
    for kind, name in RUNS:
        model = build(name, KINDS[kind])

        def step(model: torch.nn.Module = model) -> None:
            model.zero_grad()
            model(ids[:, :-1], ids[:, 1:])[1].backward()

        found[kind][name] = loopback.figures_of(*loopback.of_a_step(step, steps), steps)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="steps that are counted")
    parser.add_argument("--json", action="store_true", help="write a file into benchmarks/results")
    arguments = parser.parse_args()
    loopback.run_alone()
    found = loopback.on_ranks(RANKS, measure, arguments.steps)
    figures, rows = {}, []
    for kind, runs in found.items():
        ours = runs[NARROW]["loopback_bytes"]
        for name, figure in runs.items():
            sent = figure["loopback_bytes"]
            row = [kind, name, f"{sent / 1e6:.2f}", f"{ours / sent:.3f}", "", ""]
            if name == BF16:
                met = {"measured": ours / sent, "at_most": MOST_RATIO}
                figures[f"bytes of a {kind} step on loopback: {NARROW} / {name}"] = met
                row[-2:] = [goal(met), "met" if is_met(met) else "missed"]
            rows.append(row)
    print(common.table(["", "run", "loopback MB", "narrow8 / it", "goal", ""], rows))
    if arguments.json:
        result = {"figures": figures, "own_loopback": loopback.is_alone(), "of_a_step": found}
        print(common.write_result("communication_tensor", result))
    return 0 if all(map(is_met, figures.values())) else 1


if __name__ == "__main__":
    sys.exit(main())
