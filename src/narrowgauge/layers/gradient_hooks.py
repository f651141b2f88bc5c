"""The hooks that keep a parameter's gradient in the recipe's format; `layers.gradients` puts them there."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from narrowgauge.numerics.rounding import STOCHASTIC
from narrowgauge.recipes.fields import GradAccumulation
from narrowgauge.recipes.spec import CastSpec, Recipe
from narrowgauge.tensors.cast import FLOATING
from narrowgauge.tensors.quantized import QuantizedTensor, quantize
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


class Home:
    """Where the hooks of a parameter find it, by a weak reference: one to the parameter itself would keep torch from
    swapping its contents, as `model.to` does with QuantizedTensors."""

    def __init__(self, p: nn.Parameter) -> None:
        self.parameter = p


class KeptGradient:
    """The hooks of one parameter.

    They hold neither it nor the model: no garbage collector sees hooks, so that would keep them for ever.

    depth: of the `accumulate` contexts that it is in. adds: whether the accumulation under way adds to a gradient.
    """

    def __init__(self, home: Home, recipe: Recipe, warning: WideWarning) -> None:
        self.home = weakref.ref(home)
        self.warning = warning
        self.spec = recipe.grad
        self.is_cast = is_cast(recipe)
        self.is_stochastic = recipe.grad_accumulation is GradAccumulation.STOCHASTIC
        self.depth = 0
        self.adds = False

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
        if self.is_cast:
            p.register_hook(self.before)
        handle = p.register_post_accumulate_grad_hook(self.after)
        hooks = getattr(p, _HOOKS[1])
        others = {key: hook for key, hook in hooks.items() if key != handle.id}
        for key in others:  # autograd goes by the order of insertion, which move_to_end does not change
            del hooks[key]
        hooks.update(others)

    @unserializable_hook  # copies have hooks of their own, so torch need not warn
    def before(self, grad: Tensor) -> None:
        """Make room for an exact sum, where there is a gradient already."""
        home = self.home()
        p = None if home is None else home.parameter
        self.adds = False
        if p is None or p.grad is None or not _will_accumulate(p):
            return
        if not self.depth and _is_zero(p.grad):  # optimizer.zero_grad(set_to_none=False)
            p.grad = None
            return
        self.adds = True
        if isinstance(p.grad, QuantizedTensor):
            p.grad = values_of(p.grad)

    @unserializable_hook
    def after(self, p: nn.Parameter) -> None:
        """Cast what was accumulated."""
        if self.depth or not self.is_cast or not _can_be_cast(p.grad):
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
        kept = quantize(p.grad, spec, torch.default_generator if spec.is_stochastic else None)
        p.grad = kept if spec is self.spec else _as_spec(kept, self.spec)

    def begin(self, p: nn.Parameter) -> None:
        """Enter an `accumulate` context."""
        self.depth += 1
        if not self.is_cast and self.depth == 1:
            set_grad_dtype(p, torch.float32)

    def end(self, p: nn.Parameter) -> None:
        """Leave it; the outermost one casts."""
        self.depth -= 1
        if self.depth:
            return
        if not self.is_cast:
            set_grad_dtype(p, self.spec.format.dtype)
        elif _can_be_cast(p.grad):
            self.cast(p, self.spec)


def _as_spec(q: QuantizedTensor, spec: CastSpec) -> QuantizedTensor:
    """The same codes as those of another rounding."""
    return QuantizedTensor(q.codes, q.dequant_scale, spec, q.dtype, q.amax)


def is_cast(recipe: Recipe) -> bool:
    """True where gradients become QuantizedTensors; else they have another dtype at most."""
    return recipe.grad.is_scaled or recipe.grad.format.is_narrow


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


def _will_accumulate(p: Tensor) -> bool:
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
    """False for what is cast already, sparse, of a distributed or other class, or a part of a graph."""
    if grad is None or type(grad) is not Tensor or grad.layout is not torch.strided:
        return False
    return grad.dtype in FLOATING and not grad.requires_grad
