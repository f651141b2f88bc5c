"""The hooks that keep a parameter's gradient in the recipe's format; `layers.gradients` puts them there."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from narrowgauge.numerics.rounding import STOCHASTIC
from narrowgauge.numerics.tally import Tally
from narrowgauge.recipes.fields import GradAccumulation
from narrowgauge.recipes.spec import CastSpec, Recipe
from narrowgauge.tensors.cast import FLOATING, HALF, cast_storage
from narrowgauge.tensors.local import as_part_of, is_plain, local
from narrowgauge.tensors.quantized import QuantizedTensor, quantize
from narrowgauge.tensors.tallies import add_storage
from narrowgauge.tensors.values import values_of

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class WideWarning:
    """Says once, for all parameters of a model, that a gradient stays wide."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._given = False

    def give(self) -> None:
        if not self._given:
            self._given = True
            warnings.warn(
                f"a second backward added to gradients that recipe '{self._recipe.name}' keeps as "
                f"({self._recipe.grad}): the sum stays wide, 4 bytes a value, until the step; put the backward calls "
                "into `with narrowgauge.accumulate(model):`, clear the gradients after each step, or choose "
                'grad_accumulation="stochastic"',
                stacklevel=3,
            )


class Sink(Protocol):
    """Where gradients go before they are kept: to the mean over data-parallel processes, which comes back later.

    sets_aside: whether a gradient that is there already is such a mean, and waits for the next one to be added to it.
    in_parameter_dtype: whether gradients come in the dtypes of their parameters, except in `accumulate`.
    """

    sets_aside: bool
    in_parameter_dtype: bool

    def begin(self) -> None:
        """An `accumulate` context begins: gradients stay with their parameters until its end."""
        ...

    def take(self, p: nn.Parameter) -> None:
        """Take what was accumulated into `p.grad`; the mean comes back through `KeptGradient.take_mean`."""
        ...

    def finish(self, completes: bool = True) -> None:
        """The context has ended and all was taken: see that the means come back. completes: False after an error."""
        ...


class Home:
    """Where the hooks of a parameter find it, by a weak reference: one to the parameter itself would keep torch from
    swapping its contents, as `model.to` does with QuantizedTensors."""

    def __init__(self, p: nn.Parameter) -> None:
        self.parameter = p


class KeptGradient:
    """The hooks of one parameter.

    They hold neither it nor the model: no garbage collector sees hooks, so that would keep them for ever.

    spec: how the gradient is kept. sink: where it goes before, if anywhere. depth: of the `accumulate` contexts that it
    is in. adds: whether the accumulation under way adds to a gradient. earlier: a mean over processes that waits for
    the next one. sums: whether the mean that comes is that of an `accumulate` context. tallies: take what casts do,
    on sampled steps.
    """

    def __init__(
        self, home: Home, recipe: Recipe, warning: WideWarning, spec: CastSpec, sink: Sink | None = None
    ) -> None:
        self.home = weakref.ref(home)
        self.warning = warning
        self.spec = spec
        self.sink = sink
        self.is_cast = is_cast(spec)
        self.is_stochastic = recipe.grad_accumulation is GradAccumulation.STOCHASTIC
        self.depth = 0
        self.adds = False
        self.earlier: Tensor | None = None
        self._dtype = torch.float32  # of gradients outside of contexts
        self.sums = False
        self.tallies: tuple[Tally, ...] = ()

    @staticmethod
    def of(p: Tensor) -> KeptGradient | None:
        """What is hooked to `p`, or None."""
        for hook in (getattr(p, _HOOKS[1], None) or {}).values():
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, KeptGradient):
                return owner
        return None

    def hook(self, p: nn.Parameter) -> None:
        """Stand around the accumulation of `p`, before the hooks of others that come after it."""
        if self.is_cast or self.sink is not None:
            p.register_hook(self.before)
        handle = p.register_post_accumulate_grad_hook(self.after)
        hooks = getattr(p, _HOOKS[1])
        others = {key: hook for key, hook in hooks.items() if key != handle.id}
        for key in others:  # autograd goes by the order of insertion, which move_to_end does not change
            del hooks[key]
        hooks.update(others)

    @unserializable_hook  # copies have hooks of their own, so torch need not warn
    def before(self, grad: Tensor | None) -> None:
        """Make room for an exact sum, where there is a gradient already. grad None: none is added."""
        if grad is None:
            return
        home = self.home()
        p = None if home is None else home.parameter
        self.adds = False
        if p is not None and p.grad is not None and will_accumulate(p):
            if self.sink is not None and self.sink.sets_aside and not self.depth:
                self.set_aside(p)
            elif self.is_cast:
                self.make_room(p)

    def make_room(self, p: nn.Parameter) -> None:
        """Widen the gradient that `p` has, as another is about to be added to it, by autograd or by torch's FSDP2."""
        self.adds = False
        if p.grad is None:
            return
        kept = local(p.grad)
        if not self.depth and _is_zero(kept):  # optimizer.zero_grad(set_to_none=False)
            p.grad = None
            return
        self.adds = True
        if isinstance(kept, QuantizedTensor):
            p.grad = as_part_of(p, values_of(kept))

    def set_aside(self, p: nn.Parameter) -> None:
        """Keep the mean that `p` has apart from what this process is about to accumulate."""
        if p.grad is not None:
            is_zero = type(p.grad) in (Tensor, QuantizedTensor) and _is_zero(p.grad)
            self.earlier, p.grad = (None if is_zero else p.grad), None

    @unserializable_hook
    def after(self, p: nn.Parameter) -> None:
        """Cast what was accumulated, or pass it on."""
        if self.depth:
            return
        if self.sink is not None:
            self.sink.take(p)
        else:
            self.keep(p)

    def keep(self, p: nn.Parameter) -> None:
        """Cast `p.grad`, a sum of one backward or of several."""
        if not self.is_cast or not _can_be_cast(p.grad):
            return
        if not self.adds:
            self.cast(p, self.spec)
        elif self.is_stochastic:
            self.cast(p, dataclasses.replace(self.spec, rounding=STOCHASTIC))
        else:
            self.warning.give()

    def cast(self, p: nn.Parameter, spec: CastSpec) -> None:
        """Cast `p.grad` by `spec`; random bits come from torch's default CPU generator."""
        assert p.grad is not None
        kept = quantize(local(p.grad), spec, torch.default_generator if spec.is_stochastic else None)
        self.count(local(p.grad), kept)
        p.grad = as_part_of(p, kept if spec is self.spec else _as_spec(kept, self.spec))

    def count(self, values: Tensor, kept: Tensor) -> None:
        """Tell whoever looks what the cast of `values` to `kept` did."""
        for tally in self.tallies:
            add_storage(tally, values, kept)

    def has_mean(self, p: nn.Parameter) -> bool:
        """Whether a mean is there to which the next one is added."""
        return self.earlier is not None or p.grad is not None

    def take_mean(self, p: nn.Parameter, mean: Tensor) -> None:
        """Keep a mean over processes: cast already where `has_mean` is False, else wide, to be added to that mean.

        Every process draws the same random bits: they follow from the mean.
        """
        earlier = p.grad if self.earlier is None else self.earlier
        self.earlier = p.grad = None
        if earlier is None:
            p.grad = as_part_of(p, mean)
        elif not self.is_cast:
            p.grad = as_part_of(p, (mean.float() + local(earlier).float()).to(mean.dtype))
        else:
            self._add_means(p, mean, local(earlier))
        self.sums = False

    def _add_means(self, p: nn.Parameter, mean: Tensor, earlier: Tensor) -> None:
        total = mean + (values_of(earlier) if isinstance(earlier, QuantizedTensor) else earlier)
        p.grad = as_part_of(p, total)
        if self.sums:
            self.cast(p, self.spec)
        elif self.is_stochastic:
            key = total.view(torch.int32).sum()
            rounded = dataclasses.replace(self.spec, rounding=STOCHASTIC)
            codes, dequant_scale, amax = cast_storage(total, rounded, key=key)
            p.grad = as_part_of(p, QuantizedTensor(codes, dequant_scale, self.spec, total.dtype, amax))
        else:
            self.warning.give()

    def no_mean(self, p: nn.Parameter) -> None:
        """No process has had a gradient: what there was stays."""
        if self.earlier is not None:
            p.grad, self.earlier = self.earlier, None
        self.sums = False

    def begin(self, p: nn.Parameter) -> None:
        """Enter an `accumulate` context."""
        self.depth += 1
        if self.depth > 1:
            return
        if self.sink is not None and self.sink.sets_aside:
            self.set_aside(p)
        self._dtype = p.grad_dtype or p.dtype
        if self._dtype in HALF:
            set_grad_dtype(p, torch.float32)

    def end(self, p: nn.Parameter, completes: bool = True) -> None:
        """Leave it; the outermost one casts, or passes on. completes: False where an error has ended the context."""
        self.depth -= 1
        if self.depth:
            return
        if self.sink is None:
            if self.is_cast and _can_be_cast(p.grad):
                self.cast(p, self.spec)
        elif completes:
            self.sums = True
            if p.grad is not None:
                self.sink.take(p)
        set_grad_dtype(p, self._dtype)


def _as_spec(q: QuantizedTensor, spec: CastSpec) -> QuantizedTensor:
    """The same codes as those of another rounding."""
    return QuantizedTensor(q.codes, q.dequant_scale, spec, q.dtype, q.amax)


def is_cast(spec: CastSpec) -> bool:
    """True where gradients become QuantizedTensors; else they have another dtype at most."""
    return spec.is_scaled or spec.format.is_narrow


def detach(p: Tensor) -> None:
    """Take our hooks off a parameter, also those that were moved to it from another."""
    for name in _HOOKS:
        hooks: dict[int, Callable[..., Any]] = getattr(p, name, None) or {}
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), KeptGradient):
                del hooks[key]


def connect(p: Tensor) -> None:
    """Tell autograd of the hooks that `p` lists, whosever they are: swapping a tensor's contents leaves them behind."""
    for name in _HOOKS:
        hooks = getattr(p, name, None)
        if hooks:
            setattr(p, name, hooks)


def set_grad_dtype(p: Tensor, dtype: torch.dtype) -> None:
    """Let autograd keep gradients of `p` in `dtype`, and bring the one that there is into it."""
    if p.grad_dtype is dtype:
        return
    grad, p.grad = p.grad, None
    p.grad_dtype = dtype
    p.grad = None if grad is None else grad.to(dtype)


def will_accumulate(p: Tensor) -> bool:
    """False where the backward under way is torch.autograd.grad, which leaves `.grad` alone."""
    node = torch.autograd.graph.get_gradient_edge(p).node
    try:
        return torch._C._will_engine_execute_node(node)  # type: ignore[attr-defined]
    except RuntimeError:  # torch refuses to answer for a leaf whose gradient is asked for
        return False


def _is_zero(grad: Tensor) -> bool:
    if isinstance(grad, QuantizedTensor):
        return bool(grad.amax == 0)
    return grad.layout is torch.strided and not bool(grad.any())


def _can_be_cast(grad: Tensor | None) -> bool:
    """False for what is cast already, sparse, of another class, or a part of a graph; DTensors go by their parts."""
    if grad is None or not is_plain(part := local(grad)) or part.layout is not torch.strided:
        return False
    return grad.dtype in FLOATING and not grad.requires_grad
