"""What torchrun starts in test_lightning_ddp: Lightning's Trainer with the DDP strategy, for some recipes.

    torchrun --nproc-per-node 2 lightning_script.py FOLDER RECIPE ...

Each process writes FOLDER/RECIPE-RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from narrowgauge.integrations.huggingface import full_values
from narrowgauge.tensors.quantized import QuantizedTensor

warnings.simplefilter("ignore")
import lightning.pytorch as pl  # noqa: E402

from narrowgauge.integrations.lightning import Precision  # noqa: E402

STEPS, ACCUMULATION, SEQUENCES = 3, 2, 8


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Embedding(64, 64), nn.Linear(64, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 64)
        )
        self.losses: list[float] = []
        self.casts: list[bool] = []

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        loss = F.cross_entropy(self.net(ids).flatten(0, 1), (ids.flatten() + 1) % 64)
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.casts.append(isinstance(self.net[1].weight.grad, QuantizedTensor))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(recipe: str, folder: Path, processes: int) -> dict[str, Any]:
    """Mean losses, whether gradients were cast before each step, and a sum of the weights' bits."""
    data = torch.randint(0, 64, (STEPS * ACCUMULATION * SEQUENCES, 4), generator=torch.Generator().manual_seed(0))
    mine = data[int(os.environ["RANK"]) :: processes] if processes > 1 else data
    loader: Any = DataLoader(mine, batch_size=SEQUENCES // processes)  # type: ignore[arg-type]
    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu", devices=processes, strategy="ddp" if processes > 1 else "auto", max_epochs=1,
        accumulate_grad_batches=ACCUMULATION, plugins=[Precision(recipe)], use_distributed_sampler=False, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, loader)
    state = full_values(module, trainer.optimizers[0])
    bits = [int(value.float().view(torch.int32).sum(dtype=torch.int64)) for value in state.values()]
    return {"losses": module.losses, "casts": module.casts, "bits": bits, "processes": trainer.world_size}


def main() -> None:
    folder, *recipes = sys.argv[1:]
    for recipe in recipes:
        found = train(recipe, Path(folder), int(os.environ["WORLD_SIZE"]))
        (Path(folder) / f"{recipe}-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
