"""One plain PyTorch loop that runs every recipe, with the bytes that each of them keeps.

    python examples/every_recipe.py [--recipe narrow8 ...] [--steps 60]

The loop is in `train`. Its scaler is inert in all recipes but those of float16.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import narrowgauge as ng


def make_model() -> nn.Module:
    """A network that learns to sort 16 numbers; its matrices are large enough for 8-bit states."""
    return nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 16))


def batch(step: int) -> torch.Tensor:
    """128 rows of 16 numbers: each step has its own."""
    return torch.rand(128, 16, generator=torch.Generator().manual_seed(step))


def train(recipe: str, steps: int) -> tuple[list[float], ng.Ledger]:
    """Train by `recipe`; return the loss of every step, and the bytes of parameters, gradients and moments."""
    torch.manual_seed(0)
    losses = []

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer = ng.prepare(model, optimizer, recipe)
    scaler = ng.LossScaler(recipe)
    for step in range(steps):
        optimizer.zero_grad()
        loss = (model(batch(step)) - batch(step).sort().values).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())

    return losses, ng.ledger(model, optimizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", nargs="+", default=ng.recipe_names(), help="default: all of them")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    print(f"{'recipe':<20} {'first loss':>10} {'last loss':>10} {'bytes a parameter':>18}")
    for recipe in arguments.recipe:
        losses, ledger = train(recipe, arguments.steps)
        print(f"{recipe:<20} {losses[0]:>10.4f} {losses[-1]:>10.4f} {ledger.per_parameter:>18.2f}")


if __name__ == "__main__":
    main()
