"""Gradients of parameters that every tensor-parallel rank has whole, and uses on a part of the activations.

Norms in sequence-parallel training, biases that are added to a part of a sequence, and the like: each rank's backward
gives a part of the gradient, and the ranks drift apart unless it is summed. The gradient is withheld from autograd
until all of a forward's have come, summed over the group in one collective, and only then accumulated: hooks, casts and
reducers of the parameter see it once, whole and in float32.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.function import once_differentiable

from narrowgauge.distributed import codec, collectives
from narrowgauge.layers.gradient_hooks import will_accumulate
from narrowgauge.numerics.formats import FP32
from narrowgauge.recipes.spec import CastSpec, Recipe

ROLE = "grad_comm"


class PartialGradients:
    """Sums of one model's partial gradients over `group`.

    recipe: what large ones travel in; None: float32. A round is one forward of the model: its gradients are summed when
    the last of a unit has come, and what is left at the end of backward. A unit is what torch's FSDP2 gathers at once,
    as that takes up gradients when the unit's backward ends; without it, the whole model.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.recipe: Recipe | None = None
        self._units: dict[nn.Module, int] = {}
        self._round = _Round()

    def begin(self, model: nn.Module) -> None:
        """A forward of the model begins."""
        self._round = _Round()
        if not self._units:
            self._units = _units_of(model)

    def of(self, p: Tensor, module: nn.Module, wide: bool = False) -> Tensor:
        """`p` of `module` for one use, whose gradient is this rank's part of it. wide: in float32."""
        if not torch.is_grad_enabled() or not p.requires_grad:
            return p.float() if wide else p
        unit = self._units.get(module, 0)
        counts = torch._C._current_graph_task_id() == -1  # what is recomputed in backward gets no gradient of its own
        if counts:
            self._round.expected[unit] += 1
        return _Part.apply(p, self, self._round, unit, wide)  # type: ignore[no-any-return]

    def take(self, p: Tensor, grad: Tensor, round_: _Round, unit: int) -> None:
        """Keep a part until its round is complete, or backward ends."""
        if not round_.waiting:
            Variable._execution_engine.queue_callback(lambda: self._sum(round_))  # type: ignore[attr-defined]
        round_.waiting[unit].append((p, grad))
        round_.expected[unit] -= 1
        if round_.expected[unit] == 0:
            self._sum(round_, unit)

    def summed(self, grads: list[Tensor]) -> list[Tensor]:
        """The sums over the group of gradients of any shapes: float32, in one collective."""
        small = [grad.numel() < self._least for grad in grads]
        found: dict[int, Tensor] = {}
        for chosen, spec in ((True, CastSpec(FP32)), (False, self._large)):
            places = [at for at, is_small in enumerate(small) if is_small is chosen]
            if not places:
                continue
            flat = torch.cat([grads[at].flatten().float() for at in places])
            total = collectives.all_reduce(flat, spec, self.group, ROLE, average=False).wait()
            parts = total.split([grads[at].numel() for at in places])
            found |= {at: part.view(grads[at].shape) for at, part in zip(places, parts, strict=True)}
        return [found[at] for at in range(len(grads))]

    @property
    def _large(self) -> CastSpec:
        return CastSpec(FP32) if self.recipe is None else codec.spec_of(self.recipe, ROLE)

    @property
    def _least(self) -> float:
        """Values from which on a gradient travels by the recipe."""
        return float("inf") if self.recipe is None else self.recipe.min_state_size

    def _sum(self, round_: _Round, unit: int | None = None) -> None:
        """Sum what has come, of one unit or of all, and let autograd accumulate it."""
        units = list(round_.waiting) if unit is None else [unit]
        taken = [entry for each in units for entry in round_.waiting.pop(each)]
        if not taken:
            return
        totals = self.summed([grad for _, grad in taken])
        parameters = [p for p, _ in taken]
        gradients = [t.to(p.grad_dtype or p.dtype) for t, p in zip(totals, parameters, strict=True)]
        torch.autograd.backward(parameters, gradients)


class _Round:
    """Gradients of one forward: by unit, how many are still to come, and those that have."""

    def __init__(self) -> None:
        self.expected: dict[int, int] = defaultdict(int)
        self.waiting: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: Tensor, sums: PartialGradients, round_: _Round, unit: int, wide: bool) -> Tensor:
        ctx.arguments = p, sums, round_, unit
        ctx.dtype = p.dtype
        return p.float() if wide and p.dtype is not torch.float32 else p.view_as(p)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        p, sums, round_, unit = ctx.arguments
        if not will_accumulate(p):  # torch.autograd.grad asks for the gradient itself
            return sums.summed([grad])[0].to(ctx.dtype), None, None, None, None
        sums.take(p, grad, round_, unit)
        return None, None, None, None, None


def _units_of(model: nn.Module) -> dict[nn.Module, int]:
    """By module, the number of the innermost FSDPModule that it is in; 0 where there is none."""
    from torch.distributed.fsdp import FSDPModule

    units: dict[nn.Module, int] = {}
    for number, module in enumerate(model.modules(), start=1):
        if isinstance(module, FSDPModule):  # inner ones come later
            units |= dict.fromkeys(module.modules(), number)
    return units or dict.fromkeys(model.modules(), 0)


class SummedParameters:
    """While `module` runs, its parameters are uses of which this rank sees the gradient of a part.

    Hooks of the module put them there and take them away. is_parted: whether they do so now.
    """

    def __init__(self, sums: PartialGradients, is_parted: Any) -> None:
        self.sums = sums
        self.is_parted = is_parted

    def install(self, module: nn.Module) -> None:
        """Let this stand around every forward of `module`."""
        module.register_forward_pre_hook(self.before, prepend=True)
        module.register_forward_hook(self.after, always_call=True)

    def before(self, module: nn.Module, args: Any) -> None:
        """Put uses in the place of the parameters."""
        if not self.is_parted() or not torch.is_grad_enabled():
            return
        for name, p in module._parameters.items():
            if p is not None:
                vars(module)[name] = self.sums.of(p, module)  # found before the parameter, which stays registered

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Take them away."""
        for name in module._parameters:
            vars(module).pop(name, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> SummedParameters:
        return self  # process groups cannot be copied
