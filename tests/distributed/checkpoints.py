"""Models spread in several ways, with optimizer states of every format, for tests of checkpoints.

No forward pass runs: parameters are cut as sharding and tensor parallelism cut them, and gradients are given, so that
what a checkpoint holds is known without either.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from models import tiny_gpt
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import narrowgauge as ng
from narrowgauge.tensors.local import is_distributed, local
from narrowgauge.tensors.packed import PackedTensor
from narrowgauge.tensors.quantized import QuantizedTensor

# sizes of (shards of rows, ranks that cut rows or columns by turns): the rest are replicas
LAYOUTS = {
    "one": (1, 1), "data 2": (1, 1), "shard 2": (2, 1), "shard 4": (4, 1), "tensor 2": (1, 2),
    "shard 2 x tensor 2": (2, 2), "data 2 x shard 2": (2, 1),
}  # fmt: skip
RANKS = {
    "one": 1,
    "data 2": 2,
    "shard 2": 2,
    "shard 4": 4,
    "tensor 2": 2,
    "shard 2 x tensor 2": 4,
    "data 2 x shard 2": 4,
}


def build(recipe: str | ng.Recipe, layout: str, seed: int = 0, **changes: Any) -> tuple[Any, Any]:
    """A tiny GPT, cut by a layout of LAYOUTS, and its AdamW, prepared."""
    model = tiny_gpt(seed, **changes)
    shards, tensor = LAYOUTS[layout]
    if dist.is_initialized():
        shards, tensor = min(shards, dist.get_world_size()), min(tensor, dist.get_world_size())
        mesh = init_device_mesh("cpu", (dist.get_world_size() // shards // tensor, shards, tensor))
        _cut(model, mesh, LAYOUTS[layout][1] > 1, LAYOUTS[layout][0] > 1)
    return ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe)


def in_columns(model: nn.Module) -> set[str]:
    """Names of the weights that tensor parallelism cuts into columns: rows of one layer and columns of the next."""
    found = set()
    for at, (path, module) in enumerate(model.named_modules()):
        found |= {f"{path}.{name}" for name, p in module.named_parameters(recurse=False) if p.ndim > 1 and at % 2}
    return found


def _cut(model: nn.Module, mesh: Any, by_tensor: bool, by_rows: bool) -> None:
    if not (by_tensor or by_rows):
        return
    made: dict[int, nn.Parameter] = {}
    columns = in_columns(model)
    for path, module in model.named_modules():
        for name, p in list(module._parameters.items()):
            if p is None:
                continue
            if id(p) not in made:
                # vectors are whole under tensor parallelism
                along = Replicate() if p.ndim < 2 or not by_tensor else Shard(int(f"{path}.{name}" in columns))
                rows = Shard(0) if by_rows else Replicate()
                if rows == along:  # cut twice along rows: first by tensor, then by shards, as FSDP2 does
                    from torch.distributed.tensor.placement_types import _StridedShard

                    rows = _StridedShard(0, split_factor=mesh.size(2))
                made[id(p)] = nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate(), rows, along]))
            module._parameters[name] = made[id(p)]


def train(model: nn.Module, optimizer: Any, steps: int, first: int = 0) -> None:
    """Steps by gradients that follow from names and numbers of steps, the same in every layout."""
    for number in range(first, first + steps):
        for name, p in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {number}".encode()))
            grad = torch.randn(p.shape, generator=generator) * torch.rand(p.shape, generator=generator).exp2()
            grad_dtype = p.grad_dtype or p.dtype
            whole: Any = p
            p.grad = (distribute_tensor(grad, whole.device_mesh, whole.placements) if is_distributed(p) else grad).to(
                grad_dtype
            )
        optimizer.step()
        optimizer.zero_grad()


def parts(t: Tensor) -> list[Tensor]:
    """The plain tensors that a local part is made of."""
    held = local(t).detach()
    names = ("packed",) if isinstance(held, PackedTensor) else ("codes",) if isinstance(held, QuantizedTensor) else ()
    return [getattr(held, name) for name in (*names, "dequant_scale", "amax")] if names else [held]


def bits(model: nn.Module, optimizer: Any) -> dict[str, list[Tensor]]:
    """All that a process keeps of model and optimizer, as bytes."""
    found = {name: parts(value) for name, value in model.state_dict().items()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            found[f"{name} {key}"] = parts(value) if isinstance(value, Tensor) else [torch.tensor(value)]
    return {name: [as_bytes(part) for part in held] for name, held in found.items()}


def as_bytes(t: Tensor) -> Tensor:
    """The bytes of a tensor, a copy."""
    return t.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def full(t: Tensor) -> Tensor:
    """The whole values that a tensor's parts stand for, float32."""
    held: Any = local(t).detach()
    values = held.dequantize(torch.float32) if isinstance(held, QuantizedTensor | PackedTensor) else held.float()
    if not is_distributed(t):
        return values
    whole: Any = t
    like = type(whole).from_local(values, whole.device_mesh, whole.placements, shape=whole.shape, stride=whole.stride())
    return like.full_tensor()
