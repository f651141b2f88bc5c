"""Gradients in the recipe's `grad` format: cast as soon as they are accumulated, so that one wide one lives at a time.

Autograd adds to `p.grad` once for each parameter and backward, whatever the number of uses. Two hooks stand around
that: one on the parameter notices that there is a gradient already and widens it, so that the sum is one of wide
values; one after the accumulation casts the result. Both survive `model.to`, copies and pickles.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin
from torch.utils.hooks import unserializable_hook

from narrowgauge.errors import ConversionError
from narrowgauge.numerics.formats import FP32
from narrowgauge.numerics.rounding import STOCHASTIC
from narrowgauge.recipes.fields import GradAccumulation
from narrowgauge.recipes.spec import CastSpec, Recipe
from narrowgauge.tensors.cast import FLOATING
from narrowgauge.tensors.quantized import QuantizedTensor, quantize
from narrowgauge.tensors.values import values_of

_ATTRIBUTE = "_narrowgauge_gradients"
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def install(model: nn.Module, recipe: Recipe) -> None:
    """Keep the gradients of the trainable parameters of `model` as `recipe.grad` says, in place of an earlier recipe.

    A narrow or scaled format: `p.grad` becomes a QuantizedTensor within backward. Not so for parameters with fewer than
    `recipe.min_state_size` values, embedding tables where the recipe leaves them out or they are sparse, sparse and
    complex gradients, and those of `backward(create_graph=True)`: they stay as autograd leaves them. Parameters in 16
    bits get float32 gradients (`p.grad_dtype`), so that none is rounded before its cast.

    A 16-bit format: gradients have that dtype, and `accumulate` sums them in float32. Float32: torch's own gradients.

    Tensor hooks (`p.register_hook`) see the wide gradient. Hooks after the accumulation see `p.grad` as it is kept.
    Call it again where parameter objects were replaced.
    """
    remove(model)
    gradients = Gradients(model, recipe)
    setattr(model, _ATTRIBUTE, gradients)
    for p in _trainable(model):
        gradients.attach(p)


def remove(model: nn.Module) -> None:
    """Undo `install`, also of parts of `model` that were prepared alone. The gradients that there are stay."""
    for module in model.modules():
        module.__dict__.pop(_ATTRIBUTE, None)
    for p in model.parameters():
        _detach(p)


def renew(model: nn.Module) -> None:
    """Hook parameter objects that have come in the place of others since `install`, as by `to_empty`."""
    gradients: Gradients | None = model.__dict__.get(_ATTRIBUTE)
    if gradients is not None:
        for p in _trainable(model):
            if KeptGradient.of(p) is None:
                gradients.attach(p)


@contextlib.contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Sum the gradients of several backward passes exactly: inside, `.grad` stays float32; at the end it is cast once.

        with narrowgauge.accumulate(model):
            for batch in batches:
                loss(model, batch).backward()

    Whatever the recipe's `grad_accumulation`. Inside it takes 4 bytes a value instead of the recipe's. Gradients that
    were there before are widened and added to. A model whose gradients are float32 anyway, or that is not prepared,
    adds them as torch does. May be nested: the outermost one casts. Raises ConversionError for anything but a module.
    """
    if not isinstance(model, nn.Module):
        raise ConversionError(f"expected the torch.nn.Module whose gradients add up, found {type(model).__name__}")
    kept = [(p, owner) for p in model.parameters() if (owner := KeptGradient.of(p)) is not None]
    for p, owner in kept:
        owner.begin(p)
    try:
        yield
    finally:
        for p, owner in kept:
            owner.end(p)


class Gradients:
    """What `install` leaves on a model: a copy or a pickle of the model gets hooks of its own through it."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.model = model
        self.recipe = recipe
        self.warning = _Warning(recipe)
        self.homes: list[_Home] = []

    def attach(self, p: nn.Parameter) -> None:
        """Hook a parameter, where the recipe concerns it."""
        self._widen(p)
        if self.is_cast and (p.numel() < self.recipe.min_state_size or self._is_left_out(p)):
            return
        if self.recipe.grad != CastSpec(FP32):
            self._hook(p)

    def _hook(self, p: nn.Parameter) -> None:
        self.homes.append(_Home(p))
        KeptGradient(self.homes[-1], self.recipe, self.warning).hook(p)

    @property
    def is_cast(self) -> bool:
        """True where gradients become QuantizedTensors; else they have another dtype at most."""
        return _is_cast(self.recipe)

    def _widen(self, p: nn.Parameter) -> None:
        if p.dtype in (torch.bfloat16, torch.float16):
            _set_grad_dtype(p, torch.float32 if self.is_cast else self.recipe.grad.format.dtype)

    def _is_left_out(self, p: nn.Parameter) -> bool:
        tables = (m for m in self.model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.weight is p)
        return any(table.sparse or not self.recipe.embeddings for table in tables)

    def __deepcopy__(self, memo: dict[int, Any]) -> Gradients:
        # the copies that these give are those which the copy of the model will hold, by the memo
        hooked = [copy.deepcopy(p, memo) for p in _trainable(self.model)]
        new = Gradients(copy.deepcopy(self.model, memo), self.recipe)
        new._attach_copies(self._places(), hooked)
        return new

    def __getstate__(self) -> dict[str, Any]:
        parameters = _trainable(self.model)
        return {"model": self.model, "recipe": self.recipe, "places": self._places(), "parameters": parameters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.model, self.recipe, self.warning = state["model"], state["recipe"], _Warning(state["recipe"])
        self.homes = []
        self._attach_copies(state["places"], state["parameters"])

    def _places(self) -> list[int]:
        """Which of the trainable parameters are hooked."""
        return [i for i, p in enumerate(_trainable(self.model)) if KeptGradient.of(p) is not None]

    def _attach_copies(self, places: list[int], parameters: list[nn.Parameter]) -> None:
        for p in parameters:
            self._widen(p)  # torch leaves grad_dtype out of a copy
        for i in places:
            self._hook(parameters[i])


class _Home:
    """Where the hooks of a parameter find it, by a weak reference: one to the parameter itself would keep torch from
    swapping its contents, as `model.to` does with QuantizedTensors."""

    def __init__(self, p: nn.Parameter) -> None:
        self.parameter = p


class _Warning:
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


class KeptGradient:
    """The hooks of one parameter.

    They hold neither it nor the model: no garbage collector sees hooks, so that would keep them for ever.

    depth: of the `accumulate` contexts that it is in. adds: whether the accumulation under way adds to a gradient.
    """

    def __init__(self, home: _Home, recipe: Recipe, warning: _Warning) -> None:
        self.home = weakref.ref(home)
        self.warning = warning
        self.spec = recipe.grad
        self.is_cast = _is_cast(recipe)
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
            _set_grad_dtype(p, torch.float32)

    def end(self, p: nn.Parameter) -> None:
        """Leave it; the outermost one casts."""
        self.depth -= 1
        if self.depth:
            return
        if not self.is_cast:
            _set_grad_dtype(p, self.spec.format.dtype)
        elif _can_be_cast(p.grad):
            self.cast(p, self.spec)


def _as_spec(q: QuantizedTensor, spec: CastSpec) -> QuantizedTensor:
    """The same codes as those of another rounding."""
    return QuantizedTensor(q.codes, q.dequant_scale, spec, q.dtype, q.amax)


def _is_cast(recipe: Recipe) -> bool:
    return recipe.grad.is_scaled or recipe.grad.format.is_narrow


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    parameters = (p for p in model.parameters() if not isinstance(p, UninitializedTensorMixin))
    return [p for p in parameters if p.requires_grad and p.dtype in FLOATING]


def _detach(p: Tensor) -> None:
    for name in _HOOKS:
        hooks: dict[int, Callable[..., Any]] = getattr(p, name, None) or {}
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), KeptGradient):
                del hooks[key]


def _set_grad_dtype(p: Tensor, dtype: torch.dtype) -> None:
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
    plain = type(grad) is Tensor and grad.layout is torch.strided
    return plain and grad.dtype in FLOATING and not grad.requires_grad
