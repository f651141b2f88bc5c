"""Four bits for most of a run and bfloat16 at its end, in a loop of one's own, stopped and continued half way.

    python examples/precision_schedule.py [--recipe nvfp4] [--last bf16] [--steps 120]

The model switches by itself, in the optimizer's step. The checkpoint holds the number of steps, so that the run goes on
with the recipe in force, and the random state, from which stochastic rounding draws: the result is bit for bit that
of a run that was never stopped.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn

import narrowgauge as ng


class Block(nn.Module):
    """A gated feed-forward network beside the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, 2 * width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def make_run(recipe: ng.Recipe) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model and its optimizer, prepared at their beginning."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), *(Block(64) for _ in range(3)), nn.Linear(64, 16))
    return ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3), recipe)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Learn to sort 16 numbers; return the loss of every step."""
    losses = []
    for step in steps:
        x = torch.rand(128, 16, generator=torch.Generator().manual_seed(step))  # each step has numbers of its own
        loss = (model(x) - x.sort(dim=1).values).square().mean()
        loss.backward()
        ng.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"step {step:4}  loss {losses[-1]:.4f}  layer 1.down: {ng.report(model)['1.down'].status}")
    return losses


def train(first: str, last: str, steps: int, folder: Path | str) -> list[float]:
    """Train by `first`, and by `last` after 3/4 of the steps, stopping half way; return the loss of every step."""
    recipe = ng.recipe(first).switch_at(3 * steps // 4, last)
    model, optimizer = make_run(recipe)
    print(ng.report(model))
    half = steps // 2
    losses = learn(model, optimizer, range(half))
    ng.save(folder, model, optimizer, random=torch.get_rng_state())

    model, optimizer = make_run(recipe)  # as in another process
    extra = ng.load(folder, model, optimizer)
    torch.set_rng_state(extra["random"])
    return losses + learn(model, optimizer, range(half, steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="nvfp4", help=f"one of {', '.join(ng.recipe_names())}")
    parser.add_argument("--last", default="bf16", help="the recipe of the last quarter")
    parser.add_argument("--steps", type=int, default=120)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        train(arguments.recipe, arguments.last, arguments.steps, Path(folder) / "checkpoint")


if __name__ == "__main__":
    main()
