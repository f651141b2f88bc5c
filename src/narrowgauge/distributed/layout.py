"""Which process does what: one DeviceMesh of pipeline stages, replicas, shards and tensor-parallel ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from narrowgauge.distributed import wire
from narrowgauge.errors import ConfigError, ConversionError
from narrowgauge.layers.gradient_hooks import KeptGradient
from narrowgauge.ops import reduce

DIMENSIONS = ("pipeline", "data", "shard", "tensor")  # from the slowest link to the fastest: ranks of a node are near
_ATTRIBUTE = "_narrowgauge_layout"


class GroupReducer(reduce.GroupReducer):
    """`ops.reduce.Reducer` over a process group, counted on the wire; None: all processes."""

    def sent(self, collective: str, dtype: torch.dtype, size: int) -> None:
        wire.record(wire.CONTROL, collective, dtype, size)


@dataclass(frozen=True, eq=False)
class Layout:
    """The mesh [pipeline, data, shard, tensor] and its groups.

    data: replicas of the parameters; shard: ranks that part them (FSDP2); both read different sequences. tensor: ranks
    that part each layer and read the same sequences. pipeline: stages, each with its own layers.
    """

    mesh: DeviceMesh

    def size(self, name: str) -> int:
        """Ranks along a dimension."""
        return self.mesh.size(DIMENSIONS.index(name))

    def rank(self, name: str) -> int:
        """This process's place along a dimension."""
        return self.mesh.get_local_rank(name)

    def group(self, name: str) -> dist.ProcessGroup:
        """The processes that differ from this one along that dimension only."""
        return self.mesh.get_group(name)

    @property
    def batch_ranks(self) -> int:
        """Ranks that read different sequences."""
        return self.size("data") * self.size("shard")

    @property
    def batch_rank(self) -> int:
        """Which of them this one is."""
        return self.rank("data") * self.size("shard") + self.rank("shard")

    @property
    def everyone(self) -> dist.ProcessGroup | None:
        """All processes of the run."""
        return None

    def flat(self, *names: str) -> dist.ProcessGroup:
        """The processes that differ from this one along any of these dimensions: one group of them."""
        if len(names) == 1:
            return self.group(names[0])
        mesh = self.mesh[names]
        return mesh._flatten("_".join(names)).get_group()

    @property
    def batch(self) -> dist.ProcessGroup:
        """The processes with this one's part of the model that read other sequences."""
        return self.flat("data", "shard")

    @property
    def stage(self) -> dist.ProcessGroup:
        """The processes that hold this one's layers, or parts of them."""
        return self.flat("data", "shard", "tensor")

    def __str__(self) -> str:
        return " x ".join(f"{name} {self.size(name)}" for name in DIMENSIONS if self.size(name) > 1) or "one process"


def layout(
    *, data: int = 1, shard: int = 1, tensor: int = 1, pipeline: int = 1, device_type: str | None = None
) -> Layout:
    """The layout of an initialized process group, e.g. under torchrun: `layout(data=2, tensor=2)` for four processes.

    device_type: "cpu" or "cuda"; left out, that of the backend. Raises ConfigError where the product is not the number
    of processes.
    """
    sizes = {"pipeline": pipeline, "data": data, "shard": shard, "tensor": tensor}
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"parallel.{name}={size!r}: expected a whole number of at least 1")
    if not dist.is_initialized():
        raise ConfigError(
            "expected an initialized process group, found none: start the program with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    ranks, wanted = dist.get_world_size(), math.prod(sizes.values())
    if ranks != wanted:
        product = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(
            f"expected {wanted} processes for {product}, found {ranks}: start that many, or change the sizes"
        )
    kind = device_type or ("cuda" if "nccl" in dist.get_backend() else "cpu")
    return Layout(init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=DIMENSIONS))


def check_unprepared(model: nn.Module, call: str) -> None:
    """Raise ConversionError for a model that `prepare` has made ready: its optimizer would step what is replaced."""
    if any(KeptGradient.of(p) is not None for p in model.parameters()) or hasattr(model, "_narrowgauge_notes"):
        raise ConversionError(
            f"the model is prepared already: call {call} first, then build the optimizer, then narrowgauge.prepare"
        )


def attach(model: nn.Module, layout: Layout) -> None:
    """Let `prepare` and others know how a model is spread."""
    setattr(model, _ATTRIBUTE, layout)


def layout_of(model: nn.Module) -> Layout | None:
    """What `attach` left on the model, or on what DDP wraps; None for a model of one process."""
    found = model.__dict__.get(_ATTRIBUTE)
    inner = getattr(model, "module", None)
    return found if found is not None or not isinstance(inner, nn.Module) else layout_of(inner)
