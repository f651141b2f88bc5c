"""What `accelerate launch` starts in test_accelerate_launch: the loop of accelerate's documentation, for some recipes.

    accelerate launch --config_file FILE accelerate_script.py FOLDER NAME ...

NAME: a recipe's, with "shard-" before it where FSDP2 is to part the model over the processes. Each process writes
FOLDER/NAME-RANK.json; the state lies in FOLDER/NAME/.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import narrowgauge as ng
from narrowgauge.distributed import wire
from narrowgauge.integrations.accelerate import Accelerator

STEPS, ACCUMULATION, SEQUENCES = 3, 2, 8


SHARD = "shard-"


def train(name: str, folder: Path) -> dict[str, Any]:
    """Mean losses and norms of the steps, a sum of the weights' bits, and the bytes that gradients sent, by dtype."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    recipe, is_sharded = name.removeprefix(SHARD), name.startswith(SHARD)
    accelerator = Accelerator(cpu=True, recipe=recipe, gradient_accumulation_steps=ACCUMULATION)
    # processes that start apart get the first one's weights, but for shards, which are cut from each one's own
    torch.manual_seed(0 if is_sharded else accelerator.process_index)
    model: Any = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 64))
    if is_sharded and accelerator.num_processes > 1:
        model = ng.distributed.shard(model, ng.distributed.layout(shard=accelerator.num_processes))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.randint(0, 64, (STEPS * ACCUMULATION * SEQUENCES, 4), generator=torch.Generator().manual_seed(0))
    loader: Any = DataLoader(data, batch_size=SEQUENCES // accelerator.num_processes)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: list[float] = []
    norms: list[float] = []
    with wire.counted() as count:
        for ids in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, ids)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    accelerator.save_state(str(folder / name))
    state = accelerator.get_state_dict(model)
    sent: dict[str, int] = {}
    for row in count.rows:
        if row.role == "grad_comm":
            sent[str(row.dtype)] = sent.get(str(row.dtype), 0) + row.bytes
    bits = [int(value.view(torch.int32).sum(dtype=torch.int64)) for value in state.values()]
    accelerator.load_state(str(folder / name))
    again = accelerator.get_state_dict(model)
    assert all(torch.equal(again[name], value) for name, value in state.items())
    return {"losses": losses, "norms": norms, "bits": bits, "sent": sent, "processes": accelerator.num_processes}


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).float().flatten(0, 1), (ids.flatten() + 1) % 64)


def main() -> None:
    folder, *names = sys.argv[1:]
    for name in names:
        found = train(name, Path(folder))
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        (Path(folder) / f"{name}-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
