"""torch's FSDP2 parameter, taught to travel in 8 bits: the one place that knows FSDP2's private names.

FSDP2 gathers and reduces each parameter through an object of its own, whose class is swapped here, as layers' are.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState, alloc_storage, free_storage
from torch.distributed.tensor import DTensor

from narrowgauge.distributed.gathering import Route, User
from narrowgauge.errors import ConversionError
from narrowgauge.layers.gradient_hooks import KeptGradient
from narrowgauge.tensors.local import local
from narrowgauge.tensors.quantized import QuantizedTensor
from narrowgauge.tensors.shares import parted

_NEEDED = (
    "all_gather_inputs", "init_unsharded_param", "reset_sharded_param", "init_dtype_attrs", "_get_grad_inner_tensor",
)  # fmt: skip


class Traffic(Protocol):
    """Told of what a group of parameters sends and reduces, in the order in which it does.

    least: parameters with fewer values have gradients that are neither sent nor kept in 8 bits.
    """

    least: int

    def sends(self, sent: Tensor) -> None: ...

    def reduces(self, parameter: ShardedParameter) -> None: ...


class ShardedParameter(FSDPParam):
    """An FSDPParam that is gathered by a `Route`, and reduced in the dtype that its gradient is kept in.

    Its part may be a QuantizedTensor, or have another dtype than its gradient.
    """

    route: Route
    traffic: Traffic

    @classmethod
    def take_over(cls, parameter: FSDPParam, traffic: Traffic) -> ShardedParameter:
        """Make `parameter` one of these, in place, also anew. It is then to `take` a route."""
        parameter.__class__ = cls
        assert isinstance(parameter, cls)
        parameter.traffic = traffic
        parameter.reset_sharded_param()
        parameter.init_dtype_attrs(parameter.mp_policy)
        return parameter

    def take(self, route: Route) -> None:
        """Travel so from now on."""
        self._assert_in_states(ShardedState.SHARDED)
        self.route = route
        self.all_gather_outputs = []
        self.__dict__.pop("_unsharded_param", None)

    @property
    def users(self) -> list[User]:
        """The modules that have the parameter, and under which name."""
        info = self._module_info
        shared = zip(info.shared_modules, info.shared_param_names, strict=True)
        return [(info.module, info.param_name), *shared]

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups over which its values are parted."""
        return tuple(group for _, group in parted(self.sharded_param))

    @property
    def numel(self) -> int:
        """Values of all parts."""
        return self.sharded_param.numel()

    @property
    def part(self) -> Tensor:
        """Its values on this rank, plain or quantized."""
        return self._sharded_local_tensor

    @property
    def part_numel(self) -> int:
        """Values of a part, filled up to that of rank 0, which has the most."""
        return self.padded_sharded_param_size.numel()

    @property
    def all_gather_inputs(self) -> list[Tensor]:  # type: ignore[override]
        self._assert_in_states(ShardedState.SHARDED)
        part = self.part.to(self.device, non_blocking=True) if self.offload_to_cpu else self.part
        sent = self.route.send(part, self.part_numel)
        self.traffic.sends(sent)
        return [sent]

    def init_unsharded_param(self) -> None:
        received = self.all_gather_outputs[0]
        if hasattr(self, "_unsharded_param"):
            for memory in self._unsharded_inner_tensors:
                alloc_storage(memory)
            with torch.autograd._unsafe_preserve_version_counter(tuple(self._unsharded_inner_tensors)):
                is_done = self.route.refill(received, local(self._unsharded_param), self._unsharded_inner_tensors)
        else:
            whole, self._unsharded_inner_tensors = self.route.unpack(received, self._orig_size)
            is_done = bool(self._unsharded_inner_tensors)
            if (spec := self._unsharded_dtensor_spec) is not None:  # parted by tensor parallelism, too
                whole = DTensor.from_local(
                    whole, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
                )
            self._unsharded_param = nn.Parameter(whole, requires_grad=self.sharded_param.requires_grad)
        dtype = self.sharded_param.grad_dtype or self.sharded_param.dtype
        if self._unsharded_param.requires_grad and self._unsharded_param.grad_dtype is not dtype:
            self._unsharded_param.grad_dtype = dtype
        if is_done:
            free_storage(received)

    def init_dtype_attrs(self, mp_policy: Any) -> None:
        # gradients are reduced, and stay, in the dtype in which backward makes them
        self.orig_dtype = self.param_dtype = self.reduce_dtype = None  # type: ignore[assignment]

    def reset_sharded_param(self) -> None:
        found = getattr(self._module_info.module, self._module_info.param_name)
        if not isinstance(local(found), QuantizedTensor):
            super().reset_sharded_param()
            return
        # torch's own would fill the part up by a plain tensor
        self.sharded_param = found
        self._sharding_spec = found._spec
        self._sharded_param_data = local(found)

    def _get_grad_inner_tensor(self, grad: Tensor) -> Tensor:
        # asked once for each gradient that is about to be reduced, and added to the one that is there
        owner = KeptGradient.of(self.sharded_param)
        if owner is not None and owner.is_cast:
            owner.make_room(self.sharded_param)
        self.traffic.reduces(self)
        return super()._get_grad_inner_tensor(grad)

    def to_sharded_dtensor(self, tensor: Tensor) -> DTensor:
        # reduced gradients are views of one wide buffer, which small ones would keep when the others are cast
        return super().to_sharded_dtensor(tensor.clone() if self.numel < self.traffic.least else tensor)


def groups_of(model: nn.Module) -> list[tuple[FSDPModule, Any]]:
    """The FSDP modules of `model` that have parameters of their own, with the group of these.

    Raises ConversionError for a sharding whose parameters cannot travel in 8 bits.
    """
    missing = [name for name in _NEEDED if not hasattr(FSDPParam, name)]
    if missing:
        raise ConversionError(
            f"torch {torch.__version__} has no FSDPParam.{missing[0]}: expected torch 2.11 to 2.14, whose FSDP2 can be "
            "given other ways to communicate; install one of these"
        )
    found: list[tuple[FSDPModule, Any]] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch before 2.13: at most one
            groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
        if len(groups) > 1:
            raise ConversionError(
                f"'{name}' shards its parameters over {len(groups)} meshes: expected one; call fully_shard on the "
                "modules of each mesh by themselves"
            )
        for group in groups:
            if id(group) not in seen:  # one group may belong to several modules
                seen.add(id(group))
                _check(name, group)
                found.append((module, group))
    return found


def _check(name: str, group: Any) -> None:
    where = f"'{name}'" if name else "the model"
    if group._is_hsdp:
        raise ConversionError(
            f"{where} is sharded over a mesh of two dimensions, whose replicas torch reduces in 16 or 32 bits: "
            "expected one; use narrowgauge.distributed.shard(model, layout), which reduces over replicas itself"
        )
    if group._use_post_forward_mesh:
        raise ConversionError(
            f"{where} is resharded to fewer ranks after forward: expected reshard_after_forward True or False"
        )
    for parameter in group.fsdp_params:
        if parameter.fsdp_placement.dim != 0:
            raise ConversionError(
                f"{where}: '{parameter._module_info.param_name}' is sharded along dimension "
                f"{parameter.fsdp_placement.dim}: expected 0; leave shard_placement_fn out"
            )
    if not group.is_sharded:
        raise ConversionError(f"{where} is gathered: expected sharded parameters; call model.reshard() first")
