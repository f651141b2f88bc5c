"""A LightningModule with weights, gradients and optimizer states in 8 bits. Needs `pip install 'lightning>=2.5'`.

    python examples/lightning_module.py [--recipe narrow8] [--steps 30] [--output runs/lightning]

One argument differs from a script for Lightning alone: `plugins=[Precision(recipe)]`.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import narrowgauge as ng
from narrowgauge.integrations.lightning import Precision

TEXT = b"the same numbers on a laptop as on a graphics processor. " * 80


class NextByte(pl.LightningModule):
    """Says the next byte from the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Embedding(256, 64), nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 256)
        )
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(recipe: str, steps: int, output: str, **options: Any) -> tuple[NextByte, pl.Trainer]:
    """The module and its trainer; options: of the trainer."""
    pl.seed_everything(0)
    module = NextByte()
    ids = torch.tensor(list(TEXT))
    pieces = [part for part in ids.split(33) if len(part) == 33]
    trainer = pl.Trainer(
        plugins=[Precision(recipe)], max_steps=steps, accumulate_grad_batches=2, gradient_clip_val=1.0,
        default_root_dir=output, **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(pieces, batch_size=8))  # type: ignore[arg-type]
    print(ng.report(module))
    print(ng.ledger(module, trainer.optimizers[0]))
    return module, trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="narrow8", help=f"one of {', '.join(ng.recipe_names())}")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", default="runs/lightning", help="a directory for checkpoints")
    arguments = parser.parse_args()
    train(arguments.recipe, arguments.steps, arguments.output)


if __name__ == "__main__":
    main()
