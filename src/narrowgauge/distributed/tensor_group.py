"""What the tensor-parallel layers of a model share: their group, what travels, and whether sequences are parted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.distributed import codec
from narrowgauge.distributed.activations import ROLE, Exchange
from narrowgauge.distributed.layout import GroupReducer, Layout
from narrowgauge.distributed.partial_gradients import PartialGradients
from narrowgauge.layers.linear import Linear
from narrowgauge.ops.matmul import GRAD_INPUT, OUTPUT
from narrowgauge.ops.operands import plain
from narrowgauge.recipes.spec import CastSpec, Recipe
from narrowgauge.tensors.local import local
from narrowgauge.tensors.parted_amax import amax_of_part
from narrowgauge.tensors.quantized import QuantizedTensor

_ATTRIBUTE = "_narrowgauge_tensor_parallel"
Stamp = tuple[int, int, int]  # of a weight: which tensor, and at which versions


class TensorGroup:
    """The tensor-parallel ranks of one model. Its layers share this object; copies of the model do, too.

    sequence: whether training parts sequences over the ranks, between layers. parts_sequences: whether the forward
    under way does so. exchange: what moves activations. sums: of gradients of which each rank has a part.
    """

    def __init__(self, layout: Layout, sequence: bool) -> None:
        self.layout, self.sequence = layout, sequence
        self.group = layout.group("tensor")
        self.ranks, self.rank = layout.size("tensor"), layout.rank("tensor")
        self.reducer = GroupReducer(self.group)
        self.exchange = Exchange(self.group, self.ranks)
        self.sums = PartialGradients(self.group)
        self._active = sequence
        self._stamps: dict[Linear, tuple[Stamp, list[CastSpec]]] = {}  # of the weights that were reduced last
        self._known: dict[Linear, dict[CastSpec, Tensor]] = {}

    @property
    def parts_sequences(self) -> bool:
        # what backward recomputes belongs to a training forward, whatever ran since
        return self._active or (self.sequence and torch._C._current_graph_task_id() != -1)

    def begin(self, model: nn.Module, active: bool) -> None:
        """A forward of the model begins. active: whether it parts sequences."""
        self._active = self.sequence and active
        self.sums.begin(model)
        self.renew_weights(model)

    def take_up(self, recipe: Recipe) -> None:
        """Communicate by a resolved recipe from now on. Raises RecipeError for a cast that cannot travel."""
        spec = codec.spec_of(recipe, ROLE)
        codec.check(ROLE, spec)
        self.exchange = Exchange(self.group, self.ranks, spec)
        self.sums.recipe = recipe

    def renew_weights(self, model: nn.Module) -> None:
        """Reduce what the scales of all weights follow from, in one collective, where a weight has changed since."""
        layers = list(_parted_layers(model))
        stamps = {layer: (stamp_of(layer), _weight_specs(layer)) for layer, _ in layers}
        if stamps == self._stamps:
            return
        self._stamps = stamps
        found = [(layer, spec, amax) for layer, dim in layers for spec, amax in _amax_of_weight(layer, dim)]
        self._known = {}
        if not found:
            return
        reduced = self.reducer.max_(torch.cat([amax.flatten() for *_, amax in found]))
        for (layer, spec, amax), part in zip(found, reduced.split([a.numel() for *_, a in found]), strict=True):
            self._known.setdefault(layer, {})[spec] = part.view(amax.shape)

    def known(self, layer: Linear) -> dict[CastSpec, Tensor]:
        """What was reduced for the weight as it is now."""
        stamp, _ = self._stamps.get(layer, (None, []))
        return self._known.get(layer, {}) if stamp == stamp_of(layer) else {}

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorGroup:
        return self  # process groups cannot be copied


def attach(model: nn.Module, group: TensorGroup) -> None:
    """Let others know of a parallelized model's group."""
    setattr(model, _ATTRIBUTE, group)


def group_of(model: nn.Module) -> TensorGroup | None:
    """What `attach` left on the model, or on what it wraps."""
    return next((m.__dict__[_ATTRIBUTE] for m in model.modules() if _ATTRIBUTE in m.__dict__), None)


def stamp_of(layer: Linear) -> Stamp:
    """Changes with the weight."""
    held = local(layer.weight)
    values = held.codes if isinstance(held, QuantizedTensor) else held
    # torch's operations on a DTensor count on it alone, ours on the local part
    return id(held), layer.weight._version, values._version


def _parted_layers(model: nn.Module) -> Iterator[tuple[Linear, int]]:
    """The quantized layers whose weight is parted over tensor-parallel ranks alone, with the dimension.

    Weights that are sharded, too, are not here yet when a forward begins.
    """
    for module in model.modules():
        if isinstance(module, Linear) and module.parted is not None and module.quantized and not module.casts.smooth:
            weight: Any = module.weight
            if weight.device_mesh.ndim == 1:
                yield module, weight.placements[0].dim


def _weight_specs(layer: Linear) -> list[CastSpec]:
    """The casts of the weight, in forward and in backward."""
    return list(dict.fromkeys(layer.casts.spec(gemm, "weight") for gemm in (OUTPUT, GRAD_INPUT)))


def _amax_of_weight(layer: Linear, dim: int) -> Iterator[tuple[CastSpec, Tensor]]:
    """This rank's part of what decides the scales of the weight, for each of its casts that needs the others'."""
    held = local(layer.weight).detach()
    stored = held.spec.format if isinstance(held, QuantizedTensor) else None
    for spec in _weight_specs(layer):
        if spec.format is stored:  # multiplied as it is stored
            continue
        amax = amax_of_part(plain(held), spec, dim)
        if amax is not None:
            yield spec, amax
