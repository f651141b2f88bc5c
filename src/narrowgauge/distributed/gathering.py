"""In what form the parameters of FSDP2 travel, and what they are once gathered.

Weights of quantized linear layers travel as the codes that they are multiplied in, cast by the scale that they would
have on one process: the gathered weight is a QuantizedTensor with the very codes of one process, and nothing is rounded
twice. Other large parameters travel in the blocks of the recipe's `param_comm`, small ones as they are stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from narrowgauge.distributed import codec, wire_watch
from narrowgauge.distributed.layout import GroupReducer
from narrowgauge.layers.linear import Linear
from narrowgauge.layers.recipe_layer import RecipeLayer
from narrowgauge.numerics import kernels, scaling
from narrowgauge.numerics.scaling import ScaleRule
from narrowgauge.ops.matmul import GRAD_INPUT, OUTPUT
from narrowgauge.recipes.spec import CastSpec
from narrowgauge.tensors.cast import saturates
from narrowgauge.tensors.quantized import QuantizedTensor

# a module, and the name under which it has a parameter
User = tuple[nn.Module, str]


class Route(ABC):
    """How one parameter travels. Every rank sends the same number of bytes, its part filled up with zeros."""

    @abstractmethod
    def send(self, part: Tensor, numel: int) -> Tensor:
        """What this rank sends of its `part` (plain or quantized), filled up to `numel` values: one-dimensional."""

    @abstractmethod
    def unpack(self, received: Tensor, shape: torch.Size) -> tuple[Tensor, list[Tensor]]:
        """The whole parameter, and the tensors beside `received` whose memory it keeps.

        received: what all ranks have sent, one after the other. Its memory, and that of the tensors returned, is freed
        and filled again behind the parameter's back.
        """

    @abstractmethod
    def refill(self, received: Tensor, whole: Tensor, memory: Sequence[Tensor]) -> bool:
        """Fill what `unpack` has returned anew. True where `received` is not needed any more."""


class AsStored(Route):
    """The values in a wide dtype.

    sent: on the wire. kept: of the whole parameter.
    """

    def __init__(self, sent: torch.dtype, kept: torch.dtype) -> None:
        self.sent, self.kept = sent, kept

    def send(self, part: Tensor, numel: int) -> Tensor:
        return _filled(_plain(part).to(self.sent), numel)

    def unpack(self, received: Tensor, shape: torch.Size) -> tuple[Tensor, list[Tensor]]:
        flat = received if self.sent is self.kept else received.to(self.kept)
        return flat[: shape.numel()].view(shape), [] if flat is received else [flat]

    def refill(self, received: Tensor, whole: Tensor, memory: Sequence[Tensor]) -> bool:
        for flat in memory:
            flat.copy_(received)
        return bool(memory)


class InBlocks(Route):
    """Codes and scales of `spec`, decoded to `dtype` on arrival."""

    def __init__(self, spec: CastSpec, dtype: torch.dtype) -> None:
        self.spec, self.dtype = spec, dtype
        self._numel = 0  # of a part, filled up

    def send(self, part: Tensor, numel: int) -> Tensor:
        self._numel = numel
        wire_watch.sends("param_comm")
        return codec.encode_flat(_plain(part), 1, numel, self.spec).flatten()

    def unpack(self, received: Tensor, shape: torch.Size) -> tuple[Tensor, list[Tensor]]:
        rows = len(received) // codec.wire_bytes(self._numel, self.spec)
        flat = torch.empty(rows * self._numel, dtype=self.dtype, device=received.device)
        self.refill(received, flat, [flat])
        return flat[: shape.numel()].view(shape), [flat]

    def refill(self, received: Tensor, whole: Tensor, memory: Sequence[Tensor]) -> bool:
        rows = received.view(-1, codec.wire_bytes(self._numel, self.spec))
        codec.decode(rows, self._numel, self.spec, out=memory[0].view(len(rows), -1))
        return True


class AsOperand(Route):
    """The codes of a linear layer's weight operand, in a cast per tensor.

    spec: the cast. dtype: what the whole weight stands for. amax, quant_scale: of all parts together, see `Scales`.
    """

    def __init__(self, spec: CastSpec, dtype: torch.dtype) -> None:
        self.spec, self.dtype = spec, dtype
        self.amax: Tensor | None = None
        self.quant_scale: Tensor | None = None

    def amax_of(self, part: Tensor) -> Tensor:
        """What a cast of this part alone would take its scale from: 0-dimensional float32."""
        if isinstance(part, QuantizedTensor) and part.spec == self.spec:
            return part.amax  # one process multiplies what is stored, whose scale followed from this
        return kernels.amax(_plain(part))

    def send(self, part: Tensor, numel: int) -> Tensor:
        assert self.quant_scale is not None
        values = _plain(part)
        cast = kernels.quantize(values, self.quant_scale, self.spec.format, saturating=saturates(self.spec))
        assert cast.codes is not None
        return _filled(cast.codes.view(torch.uint8), numel)

    def unpack(self, received: Tensor, shape: torch.Size) -> tuple[Tensor, list[Tensor]]:
        codes = received[: shape.numel()].view(self.spec.format.dtype).view(shape)
        dequant_scale, amax = self._scales()
        return QuantizedTensor(codes, dequant_scale.clone(), self.spec, self.dtype, amax.clone()), []

    def refill(self, received: Tensor, whole: Tensor, memory: Sequence[Tensor]) -> bool:
        assert isinstance(whole, QuantizedTensor)  # its codes are what was received
        for mine, new in zip((whole.dequant_scale, whole.amax), self._scales(), strict=True):
            with torch.autograd._unsafe_preserve_version_counter(mine):
                mine.copy_(new)
        return False

    def _scales(self) -> tuple[Tensor, Tensor]:
        assert self.quant_scale is not None and self.amax is not None
        return scaling.dequant_scale_of(self.quant_scale), self.amax


class Parted(Protocol):
    """A parameter of which each rank has a part.

    device: where it is gathered. part: its values here. groups: the process groups over which it is parted.
    """

    device: torch.device

    @property
    def part(self) -> Tensor: ...

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]: ...


class Scales:
    """The scales of all weights that travel as operands, renewed together before each forward of the model."""

    def __init__(self, members: Sequence[tuple[AsOperand, Parted]]) -> None:
        self.members = members

    def renew(self) -> None:
        """Reduce the amax values of all weights: one collective for each set of groups, which is one in most models."""
        by_groups: dict[tuple[dist.ProcessGroup, ...], list[tuple[AsOperand, Parted]]] = {}
        for route, weight in self.members:
            by_groups.setdefault(weight.groups, []).append((route, weight))
        for groups, members in by_groups.items():
            amax = torch.stack([route.amax_of(weight.part).to(weight.device) for route, weight in members])
            for group in groups:
                amax = GroupReducer(group).max_(amax)
            for (route, _), of_weight in zip(members, amax.unbind(), strict=True):
                route.amax, route.quant_scale = of_weight, _quant_scale(of_weight, route.spec)


def operand_spec(users: Iterable[User]) -> CastSpec | None:
    """The cast in which all users multiply a parameter, forward and backward, in training and evaluation; else None.

    Only casts per tensor that follow from the weight itself: with scales of tiles or of rows the two products of a
    weight take different codes, and two sets of codes are as long as 16 bits.
    """
    specs: set[CastSpec] = set()
    for module, name in users:
        if name != "weight" or not isinstance(module, Linear) or not _is_quantized(module):
            return None
        for casts in (module.training_casts, module.evaluation_casts):
            if casts.smooth:
                return None
            specs |= {casts.spec(gemm, "weight") for gemm in (OUTPUT, GRAD_INPUT)}
    if len(specs) != 1:
        return None
    (spec,) = specs
    is_byte = spec.format.is_narrow and spec.format.bits == 8
    follows = isinstance(spec.scale, ScaleRule) and spec.is_scaled and not spec.in_blocks and not spec.is_stochastic
    return spec if is_byte and follows else None


def _is_quantized(layer: RecipeLayer) -> bool:
    return layer.recipe is not None and layer.quantized


def _quant_scale(amax: Tensor, spec: CastSpec) -> Tensor:
    assert isinstance(spec.scale, ScaleRule)
    return scaling.quant_scale_of(amax, spec.format, spec.scale)


def _plain(part: Tensor) -> Tensor:
    part = part.detach()
    return part.dequantize(torch.float32) if isinstance(part, QuantizedTensor) else part


def _filled(values: Tensor, numel: int) -> Tensor:
    flat = values.reshape(-1)
    return F.pad(flat, (0, numel - flat.numel())) if flat.numel() < numel else flat
