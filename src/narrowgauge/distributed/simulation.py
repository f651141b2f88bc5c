"""One process in place of many: how a layout divides a model, and what travels, without the machines or the memory.

`simulated_ranks` makes a process group of torch's "fake" backend, which sends nothing and returns at once: this process
is one of its ranks. `without_values` lets a model's tensors have shapes and dtypes but no memory. Between them the real
code of this package runs: layouts, parallel layers, sharding, collectives with their counts, the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from narrowgauge.distributed.layout import Layout
from narrowgauge.distributed.meeting_point import SIMULATED
from narrowgauge.errors import ConfigError, NarrowgaugeError
from narrowgauge.tensors.local import is_distributed


@contextmanager
def simulated_ranks(ranks: int, rank: int = 0) -> Iterator[None]:
    """Inside, this process is rank `rank` of `ranks` that are not there.

    Give `layout` a device_type. One layout is simulated as one rank in a process: torch remembers its meshes. Raises
    ConfigError for a rank that is none of them, NarrowgaugeError inside a run of several processes, and where this
    version of torch has no fake backend.
    """
    if not 0 <= rank < ranks:
        raise ConfigError(f"rank={rank}: expected 0 to {ranks - 1}, of {ranks} simulated ranks")
    if dist.is_initialized():
        raise NarrowgaugeError(
            f"expected no process group, found one of {dist.get_world_size()}: simulate in a process of its own"
        )
    try:
        # private, and it registers the backend; torch has no public way to a group that sends nothing
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise NarrowgaugeError(
            f"torch {torch.__version__} has no fake process group: expected torch 2.11 to 2.14; install one of these"
        ) from error
    dist.init_process_group(SIMULATED, store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def without_values(model: nn.Module, layout: Layout | None = None) -> Iterator[None]:
    """Inside, tensors have shapes, dtypes and places but no memory, also those of `model`, which is on the meta device.

    Its parameters become such tensors on the layout's device type. A number read from a tensor is 0, a truth is True,
    but for constants and what follows from them, such as counts of steps: gradients are finite, nothing has overflowed.
    What depends on values otherwise, such as which experts tokens visit, cannot run so. Build, part and shard the model
    before, prepare and train it inside. layout None: one process, on the CPU.
    """
    # private, without another name in torch
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    class NoValues(FakeTensorMode):
        def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
            try:
                return super().__torch_dispatch__(func, types, args, kwargs)
            except DataDependentOutputException:
                if func is torch.ops.aten.equal.default:
                    return True
                if func is not torch.ops.aten._local_scalar_dense.default:
                    raise
                return _number(args[0].dtype)

    if layout is not None:
        _make_groups(model, layout)
    with NoValues(allow_non_fake_inputs=True):
        model.to_empty(device="cpu" if layout is None else layout.mesh.device_type)
        yield


def _number(dtype: torch.dtype) -> bool | float | int:
    if dtype is torch.bool:
        return True
    return 0.0 if dtype.is_floating_point else 0


def _make_groups(model: nn.Module, layout: Layout) -> None:
    """Make the groups that are made on first use: that reads the ranks of a mesh, which are values."""
    _ = layout.stage, layout.batch
    for p in model.parameters():
        if is_distributed(p) and p.device_mesh.ndim > 1:  # type: ignore[attr-defined]
            p.device_mesh._flatten()  # type: ignore[attr-defined]
