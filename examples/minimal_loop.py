"""The smallest training loop of one's own in FP8: any torch model, any torch loop, one added line.

python examples/minimal_loop.py [--recipe fp8_delayed] [--steps 200]
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import narrowgauge as ng


def make_model() -> nn.Module:
    """A small classifier of points in the plane."""
    return nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))


def two_spirals(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on two interleaved spirals [count, 2], and which of the two each is on [count]."""
    labels = torch.randint(0, 2, (count,), generator=generator)
    radius = torch.rand(count, generator=generator)
    angle = 6.0 * radius + labels * torch.pi
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1), labels


def train(recipe: str, steps: int) -> float:
    """Train by `recipe`; return the share of points that are told right at the end."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    model, optimizer = ng.prepare(model, optimizer, recipe)  # the one added line
    print(ng.report(model))

    for step in range(steps):
        points, labels = two_spirals(256, generator)
        loss = nn.functional.cross_entropy(model(points), labels)
        loss.backward()
        ng.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % 50 == 0:
            print(f"step {step:4}  loss {loss.item():.4f}")

    model.eval()
    with torch.no_grad():
        points, labels = two_spirals(2000, generator)
        accuracy = (model(points).argmax(dim=1) == labels).float().mean().item()
    print(f"accuracy {accuracy:.3f}")
    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="fp8_delayed", help=f"one of {', '.join(ng.recipe_names())}")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    train(arguments.recipe, arguments.steps)


if __name__ == "__main__":
    main()
