"""What a module is to the conversion: a linear layer, a norm, one that is skipped, or none of its business."""

from __future__ import annotations

import sys
from enum import Enum
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from narrowgauge.layers import foreign, norm
from narrowgauge.layers.foreign import Foreign
from narrowgauge.layers.grouped import GroupedLinear
from narrowgauge.layers.linear import Linear
from narrowgauge.layers.recipe_layer import RecipeLayer
from narrowgauge.ops import experts

LINEARS: dict[type[nn.Module], type[RecipeLayer]] = {nn.Linear: Linear, experts.GroupedLinear: GroupedLinear}
NORMS: dict[type[nn.Module], type[nn.Module]] = {
    getattr(nn, name): getattr(norm, name)
    for name in (
        "LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "InstanceNorm1d",
        "InstanceNorm2d", "InstanceNorm3d",
    )
}  # fmt: skip

NOTES = "_narrowgauge_notes"  # what `prepare` leaves on the module that it was given


class Kind(Enum):
    """LINEAR and NORM can be swapped; SKIPPED is a linear layer that cannot; OTHER runs as it is."""

    LINEAR = "linear"
    NORM = "norm"
    SKIPPED = "skipped"
    OTHER = "other"


def kind_of(module: nn.Module) -> Kind:
    """Decide by the exact class: a subclass may compute something else in its forward."""
    if skip_reason(module) is not None:
        return Kind.SKIPPED
    own = class_of(module)
    if own in LINEARS or own in LINEARS.values() or foreign_mixin(module) is not None:
        return Kind.LINEAR
    if own in NORMS or own in NORMS.values():
        return Kind.NORM
    return Kind.OTHER


def skip_reason(module: nn.Module) -> str | None:
    """Why a module that is a linear layer, or one of many experts, cannot be swapped, or None."""
    plain = next((plain for plain in LINEARS if isinstance(module, plain)), None)
    if plain is None:
        if foreign_mixin(module) is not None and parametrize.is_parametrized(module):
            return "parametrized: remove the parametrization to convert it"
        return foreign.why_not(module)
    if isinstance(module._parameters.get("weight"), UninitializedParameter):
        return "its size is not known yet: run one forward pass before converting"
    if parametrize.is_parametrized(module):
        names = ", ".join(module.parametrizations)  # type: ignore[arg-type]
        return f"parametrized ({names}): remove the parametrization to convert it"
    own = class_of(module)
    if own not in (plain, LINEARS[plain]):
        owner = "a forward of its own" if own.forward is not plain.forward else "a class of its own"
        name = "nn.Linear" if plain is nn.Linear else plain.__name__
        return f"{own.__name__} is a subclass of {name} with {owner}"
    if own is plain and "weight" not in module._parameters:
        return "its weight is computed by a hook (weight_norm, spectral_norm): remove it to convert the layer"
    return None


def foreign_mixin(module: nn.Module) -> type[Foreign] | None:
    """What makes a linear layer of another library run by a recipe, whether it does already or not; else None."""
    own = class_of(module)
    return foreign.mixin_for(own.plain if issubclass(own, Foreign) else own, module)


def converted_class(module: nn.Module) -> type[nn.Module]:
    """The class of a layer of Kind.LINEAR once it is converted."""
    own, mixin = class_of(module), foreign_mixin(module)
    return LINEARS[own] if mixin is None else foreign.class_for(own, mixin)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class that a converted layer had before."""
    own = class_of(module)
    if issubclass(own, Foreign):
        return own.plain
    return next(plain for plain, ours in LINEARS.items() if ours is own)


def root_of(model: nn.Module) -> nn.Module:
    """The module that was prepared, where torch.compile or DDP wraps it: its names are those of the layers."""
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, DistributedDataParallel) or NOTES in vars(model):
        return model
    inner = root_of(model.module)  # type: ignore[arg-type]
    return inner if NOTES in vars(inner) else model


def class_of(module: nn.Module) -> type[Any]:
    """The class of a module, without the one that torch's fully_shard puts in front of it."""
    return type(module).__bases__[-1] if _is_fully_sharded(module) else type(module)


def become(module: nn.Module, cls: type[nn.Module]) -> None:
    """Swap the class of a module in place; one that torch's fully_shard was called on keeps its part of it."""
    if _is_fully_sharded(module):
        before: Any = type(module)
        own = {"__deepcopy__": before.__deepcopy__}
        cls = type(f"FSDP{cls.__name__}", (before.__bases__[0], cls), own)
    module.__class__ = cls


def _is_fully_sharded(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where it is not loaded, nobody has called fully_shard
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)
