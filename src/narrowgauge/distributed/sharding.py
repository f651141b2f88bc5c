"""Sharded data parallelism: torch's FSDP2 with parameters gathered and gradients reduced in 8 bits.

`shard` is `fully_shard` on the blocks and the root of a model, with a layout's groups; a user's own calls do as well.
`install`, which `prepare` calls, then makes the parameters travel by a recipe.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from narrowgauge.distributed import codec
from narrowgauge.distributed.gathering import AsOperand, AsStored, InBlocks, Route, Scales, operand_spec
from narrowgauge.distributed.layout import Layout, attach, check_unprepared, layout_of
from narrowgauge.distributed.scattering import ModuleTraffic
from narrowgauge.errors import ConfigError, ConversionError, RecipeError
from narrowgauge.recipes.spec import CastSpec, Recipe
from narrowgauge.tensors.local import local
from narrowgauge.tensors.quantized import QuantizedTensor

if TYPE_CHECKING:
    from narrowgauge.distributed.sharded_parameter import ShardedParameter

_ATTRIBUTE = "_narrowgauge_sharding"


def shard(
    model: nn.Module, layout: Layout, *, reshard_after_forward: bool | None = None, offload: str | None = None
) -> nn.Module:
    """Part the parameters of `model` over `layout`'s dimension "shard" by torch's FSDP2, in place; returns it.

    Every member of its outermost module lists, such as a transformer's blocks, is gathered by itself; the root gathers
    what is left. Gradients are averaged over "shard" and "data". Call it before the optimizer is built, then `prepare`.

    reshard_after_forward: True frees gathered parameters after forward and gathers them again for backward (ZeRO-3);
    False keeps them until backward is over (ZeRO-2; with parameters in FP8 the layout of FP8-LM's third level: whole
    weights in 8 bits, sharded masters); None: True for the blocks, False for the root, which backward begins with.
    offload "cpu": parameters, gradients and states live on the host.

    Raises ConfigError where the layout has no shards, ConversionError for what is no module, or is sharded or prepared
    already.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    if not isinstance(model, nn.Module):
        raise ConversionError(f"expected a torch.nn.Module to shard, found {type(model).__name__}")
    check_unprepared(model, "shard")
    if is_sharded(model):
        raise ConversionError("the model is sharded already: call shard, or torch's fully_shard, once")
    if layout.size("shard") == 1:
        raise ConfigError("expected a layout with shard > 1, found shard 1: leave `shard` out, or give it ranks")
    if offload not in (None, "cpu"):
        raise ConfigError(f"offload={offload!r}: expected None or 'cpu'")
    on_host = CPUOffloadPolicy(pin_memory=layout.mesh.device_type == "cuda")
    options: dict[str, Any] = {
        "mesh": layout.mesh["shard"],
        "reshard_after_forward": reshard_after_forward,
        "offload_policy": on_host if offload else OffloadPolicy(),
    }
    for block in _blocks(model):
        fully_shard(block, **options)
    fully_shard(model, **options)
    attach(model, layout)
    return model


def is_sharded(model: nn.Module) -> bool:
    """True where fully_shard was called on the model or a part of it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not loaded: nobody has called it
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules())


def install(model: nn.Module, recipe: Recipe) -> None:
    """Let the parameters of a sharded, converted model travel by a resolved recipe; otherwise do nothing.

    `param_comm` in blocks: weights of quantized layers travel as operands, see `gathering`. A wide one: as torch does
    it. Raises ConversionError for a sharding, RecipeError for a recipe that cannot travel so.
    """
    earlier: Sharding | None = model.__dict__.pop(_ATTRIBUTE, None)
    if earlier is not None:
        earlier.remove()
    if is_sharded(model):
        setattr(model, _ATTRIBUTE, Sharding(model, recipe))


class Sharding:
    """What `install` leaves on a model: it renews the scales of weights before each forward."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        from narrowgauge.distributed.sharded_parameter import ShardedParameter, groups_of

        self.recipe = recipe
        self.param_spec = _travels(recipe, "param_comm")
        grad_spec, replicas = _travels(recipe, "grad_comm"), _replicas(model)
        self.parameters: list[ShardedParameter] = []
        for module, group in groups_of(model):
            traffic = ModuleTraffic(grad_spec, recipe.min_state_size, replicas)
            self.parameters += [ShardedParameter.take_over(each, traffic) for each in group.fsdp_params]
            group._init_mp_dtypes()
            module.set_custom_all_gather(traffic.gather)  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(traffic.reduce_scatter)  # type: ignore[arg-type]
            # divided after the float32 sum, by whatever factor FSDP2 was told
            module.set_force_sum_reduction_for_comms(True)
            if replicas is not None:
                module.set_all_reduce_hook(traffic.average_replicas)
        self._layers = [layer for p in self.parameters for layer, _ in p.users]
        self._choose_routes()
        self._handles = [
            model.register_forward_pre_hook(self.before_forward, prepend=True),
            model.register_forward_hook(self.after_forward),
        ]

    def remove(self) -> None:
        """Renew no scales any more."""
        for handle in self._handles:
            handle.remove()

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Free what was gathered for a backward that does not come, so that the parameters are the shards again."""
        if not torch.is_grad_enabled():
            _reshard(module)

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Renew the scales of all weights: they change with every step, and whenever a user writes to them."""
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint recomputes within backward: by the same scales
        if any(recipe is not now for recipe, now in zip(self._recipes, self._recipes_of_layers(), strict=True)):
            _reshard(module)
            self._choose_routes()  # a schedule has changed the recipe, and with it the casts of weights
        self.scales.renew()

    def _choose_routes(self) -> None:
        operands: list[tuple[AsOperand, ShardedParameter]] = []
        for parameter in self.parameters:
            route = self._route(parameter)
            parameter.take(route)
            if isinstance(route, AsOperand):
                operands.append((route, parameter))
        self.scales = Scales(operands)
        self._recipes = self._recipes_of_layers()

    def _recipes_of_layers(self) -> list[Recipe | None]:
        return [layer.__dict__.get("recipe") for layer in self._layers]

    def _route(self, parameter: ShardedParameter) -> Route:
        p, dtype = parameter.sharded_param, parameter.mp_policy.param_dtype  # what torch's own mixed precision asks for
        if not p.is_floating_point():
            return AsStored(p.dtype, p.dtype)
        part, kept = local(p), dtype or p.dtype
        stored = torch.float32 if isinstance(part, QuantizedTensor) else part.dtype
        spec = operand_spec(parameter.users) if self.param_spec.in_blocks else None
        if spec is not None:
            return AsOperand(spec, p.dtype)
        if p.numel() < self.recipe.min_state_size:
            return AsStored(dtype or stored, kept)
        if self.param_spec.in_blocks:
            return InBlocks(self.param_spec, kept)
        return AsStored(dtype or self.param_spec.format.dtype, kept)


def _travels(recipe: Recipe, role: str) -> CastSpec:
    spec = codec.spec_of(recipe, role)
    codec.check(role, spec)
    if spec.is_stochastic and role == "param_comm":
        raise RecipeError(
            f"{role}=({spec}): a parameter is gathered twice in a step, and both times must be the same: expected "
            "rounding to nearest"
        )
    return spec


def _reshard(model: nn.Module) -> None:
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _replicas(model: nn.Module) -> dist.ProcessGroup | None:
    layout = layout_of(model)
    return None if layout is None or layout.size("data") == 1 else layout.group("data")


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost module lists that have parameters."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from (block for block in child if next(block.parameters(), None) is not None)
        else:
            yield from _blocks(child)
