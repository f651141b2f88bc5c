"""Bytes between the stages of a pipeline, on the loopback interface: in 8 bits against bf16, activations and gradients.

    python benchmarks/communication_pipeline.py [--steps 3] [--json]

Two gloo processes train a GPT of 8 blocks of width 512, four micro-batches of 4 x 128 tokens a step, by narrow8 and by
narrow8 with pipeline_comm=CastSpec(BF16). Counted are whole steps after a first one, in which shapes are learnt; ideal
are the bytes that the stages hand to the network.
"""

from __future__ import annotations

import argparse
import sys

import common
import loopback
import torch
import torch.distributed as dist
from tables import goal, is_met

import narrowgauge as ng
from narrowgauge.distributed import Pipeline, layout, split_pipeline
from narrowgauge.models.config import GPTConfig
from narrowgauge.models.gpt import GPT

RANKS = 2
MOST_RATIO = 0.55
CONFIG = GPTConfig(layers=8, width=512, heads=8, context=128, vocab_size=1024)
MICRO_BATCHES, SEQUENCES = 4, 4
SCHEDULES = ("1f1b", "interleaved", "zero_bubble", "zbv")
BF16 = ng.CastSpec(ng.formats.BF16)
RECIPES = {"narrow8": ng.recipe("narrow8"), "bf16": ng.recipe("narrow8").replace(pipeline_comm=BF16)}


def measure(steps: int) -> dict[str, dict[str, dict[str, float]]]:
    """Bytes of a step by schedule and recipe: one rank's part of all runs, one after the other."""
    found: dict[str, dict[str, dict[str, float]]] = {schedule: {} for schedule in SCHEDULES}
    batches = _batches()
    for schedule in SCHEDULES:
        for name, recipe in RECIPES.items():
            model = GPT(CONFIG, device="cpu", generator=torch.Generator().manual_seed(0))
            pipeline = split_pipeline(model, layout(pipeline=RANKS), schedule)
            ng.prepare(pipeline.model, torch.optim.AdamW(pipeline.model.parameters()), recipe)

            def step(pipeline: Pipeline = pipeline) -> None:
                pipeline.model.zero_grad()
                pipeline.step(batches)

            sent, counted = loopback.of_a_step(step, steps)
            mine = torch.tensor([counted.bytes_of("pipeline_comm") / steps], dtype=torch.float64)
            dist.all_reduce(mine)
            found[schedule][name] = {"loopback_bytes": sent, "ideal_bytes": float(mine)}
    return found


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shape = (MICRO_BATCHES, SEQUENCES, CONFIG.context + 1)
    ids = torch.randint(CONFIG.vocab_size, shape, generator=generator)
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in ids]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="steps that are counted")
    parser.add_argument("--json", action="store_true", help="write a file into benchmarks/results")
    arguments = parser.parse_args()
    loopback.run_alone()
    found = loopback.on_ranks(RANKS, measure, arguments.steps)
    rows, figures = [], {}
    for schedule, by_recipe in found.items():
        ours, wide = by_recipe["narrow8"], by_recipe["bf16"]
        ratio = ours["loopback_bytes"] / wide["loopback_bytes"]
        figure = {"measured": ratio, "at_most": MOST_RATIO}
        figures[f"bytes of a pipeline's step on loopback, {schedule}: 8 bits / bf16"] = figure
        megabytes = [f"{each[key] / 1e6:.3f}" for key in ("loopback_bytes", "ideal_bytes") for each in (ours, wide)]
        rows.append([schedule, *megabytes, f"{ratio:.3f}", goal(figure), "met" if is_met(figure) else "missed"])
    header = ["schedule", "loopback MB, 8 bits", "bf16", "ideal MB, 8 bits", "bf16", "8 bits / bf16", "goal", ""]
    print(common.table(header, rows))
    if arguments.json:
        result = {"figures": figures, "own_loopback": loopback.is_alone(), "bytes_of_a_step": found}
        print(common.write_result("communication_pipeline", result))
    return 0 if all(map(is_met, figures.values())) else 1


if __name__ == "__main__":
    sys.exit(main())
