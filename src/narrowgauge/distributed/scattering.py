"""What one FSDP2 module sends and receives: all-gathers that are counted, gradients reduced in the recipe's format.

FSDP2 packs the gradients of a module's parameters into one flat buffer, a row for each rank. Here every parameter
starts a block of its own, so that no scale is shared by gradients of two magnitudes, and small ones travel as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from narrowgauge.distributed import codec, collectives, wire
from narrowgauge.errors import ConversionError
from narrowgauge.numerics.formats import FP32
from narrowgauge.recipes.spec import CastSpec


class Reduced(Protocol):
    """A parameter whose gradient is reduced: values of all parts, and of one, filled up to that of rank 0."""

    @property
    def numel(self) -> int: ...

    @property
    def part_numel(self) -> int: ...


class ModuleTraffic:
    """The communication of one FSDP2 module's own parameters.

    grad_spec: how gradients travel; those with fewer than `least` values travel in float32. replicas: the process
    group over which they are averaged after the reduction over shards, or None.
    """

    def __init__(self, grad_spec: CastSpec, least: int, replicas: dist.ProcessGroup | None) -> None:
        self.grad_spec = grad_spec
        self.least = least
        self.replicas = replicas
        self.gather = Gather(self)
        self.reduce_scatter = ReduceScatter(self)
        self._sent: dict[torch.dtype, int] = {}
        self._reduced: list[Reduced] = []

    def sends(self, sent: Tensor) -> None:
        """A parameter's part is to be gathered."""
        self._sent[sent.dtype] = self._sent.get(sent.dtype, 0) + sent.nbytes

    def reduces(self, parameter: Reduced) -> None:
        """A parameter's gradient is to be reduced; those that were announced before it stand before it."""
        if parameter in self._reduced:  # the reduction before did not come here: an error, or a group of one rank
            self._reduced.clear()
        self._reduced.append(parameter)

    def count_gather(self, ranks: int) -> None:
        """Count the all-gather of what was sent, by dtype."""
        for dtype, size in self._sent.items():
            wire.record("param_comm", "all_gather", dtype, size * (ranks - 1))
        self._sent.clear()

    def parts(self, numel: int) -> list[tuple[CastSpec, list[slice]]]:
        """Where the gradients of each kind stand in a row of `numel` values."""
        by_spec: dict[CastSpec, list[slice]] = {}
        at = 0
        for parameter in self._reduced:
            end = at + parameter.part_numel
            spec = self.grad_spec if parameter.numel >= self.least else CastSpec(FP32)
            by_spec.setdefault(spec, []).append(slice(at, end))
            at = end
        if at != numel:
            raise ConversionError(
                f"FSDP2 reduces {numel} values a rank, where {at} were expected: prepare the model after the last "
                "fully_shard, and again where parameters were replaced"
            )
        return list(by_spec.items())

    def average_replicas(self, reduced: Tensor) -> None:
        """FSDP2's all-reduce hook: average what the shards have reduced over `replicas`, in place."""
        pending = []
        for spec, slices in self.parts(reduced.numel()):
            values, widths = packed(reduced.view(1, -1), slices, codec.block_of(spec))
            done = collectives.all_reduce(values.flatten(), spec, self.replicas, "grad_comm")
            done.advance()
            pending.append((done, slices, widths))
        for done, slices, widths in pending:
            _unpack(done.wait(), slices, widths, reduced)
        self._reduced.clear()

    def ends(self) -> None:
        """The reduction over shards is over."""
        if self.replicas is None:
            self._reduced.clear()


class _Allocates:
    """Memory as torch's own collectives take it."""

    def __init__(self, traffic: ModuleTraffic) -> None:
        self.traffic = traffic

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of that size."""
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_Allocates):
    """FSDP2's all-gather, counted."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self.traffic.count_gather(group.size())
        return collectives.start_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class ReduceScatter(_Allocates):
    """FSDP2's reduce-scatter, of codes."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        average = op == dist.ReduceOp.AVG
        if not average and op != dist.ReduceOp.SUM:
            raise ConversionError(
                f"FSDP2 asks for a reduction by {op}: expected a sum or a mean; call "
                "model.set_force_sum_reduction_for_comms(True) before set_gradient_divide_factor"
            )
        rows = input_tensor.view(group.size(), -1)
        pending = []
        for spec, slices in self.traffic.parts(rows.shape[1]):
            values, widths = packed(rows, slices, codec.block_of(spec))
            pending.append(
                (collectives.reduce_scatter(values, spec, group, "grad_comm", average=average), slices, widths)
            )
        for done, slices, widths in pending:
            _unpack(done.wait(), slices, widths, output_tensor)
        self.traffic.ends()


def packed(rows: Tensor, slices: Sequence[slice], block: int) -> tuple[Tensor, list[int]]:
    """Those columns of `rows` side by side, each slice filled up to whole blocks; with the widths that this gives."""
    widths = [-(-(part.stop - part.start) // block) * block for part in slices]
    if sum(widths) == rows.shape[1]:  # all columns, in their order
        return rows, widths
    pieces = [rows[:, part] for part in slices]
    filled = [F.pad(piece, (0, width - piece.shape[1])) for piece, width in zip(pieces, widths, strict=True)]
    return (filled[0] if len(filled) == 1 else torch.cat(filled, dim=1)), widths


def _unpack(values: Tensor, slices: Sequence[slice], widths: Sequence[int], out: Tensor) -> None:
    for piece, part in zip(values.split(list(widths)), slices, strict=True):
        out[part].copy_(piece[: part.stop - part.start])
