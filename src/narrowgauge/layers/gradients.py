"""Gradients in the recipe's `grad` format: cast as soon as they are accumulated, so that one wide one lives at a time.

Autograd adds to `p.grad` once for each parameter and backward, whatever the number of uses. Two hooks stand around
that: one on the parameter notices that there is a gradient already and widens it, so that the sum is one of wide
values; one after the accumulation casts the result. Both survive `model.to`, copies and pickles.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from narrowgauge.errors import ConversionError
from narrowgauge.layers.gradient_hooks import (
    Home,
    KeptGradient,
    Sink,
    WideWarning,
    connect,
    detach,
    is_cast,
    set_grad_dtype,
)
from narrowgauge.numerics.formats import FP32, of_dtype
from narrowgauge.recipes.spec import CastSpec, Recipe
from narrowgauge.tensors.cast import FLOATING

_ATTRIBUTE = "_narrowgauge_gradients"


def install(model: nn.Module, recipe: Recipe, sink: Sink | None = None) -> None:
    """Keep the gradients of the trainable parameters of `model` as `recipe.grad` says, in place of an earlier recipe.

    A narrow or scaled format: `p.grad` becomes a QuantizedTensor within backward. Not so for parameters with fewer than
    `recipe.min_state_size` values, embedding tables where the recipe leaves them out or they are sparse, sparse and
    complex gradients, and those of `backward(create_graph=True)`: they stay as autograd leaves them. Parameters in 16
    bits get float32 gradients (`p.grad_dtype`), so that none is rounded before its cast.

    A 16-bit format: gradients have that dtype, and `accumulate` sums them in float32. Float32: torch's own gradients.

    Tensor hooks (`p.register_hook`) see the wide gradient. Hooks after the accumulation see `p.grad` as it is kept.
    Call it again where parameter objects were replaced. sink: where the gradients of all trainable parameters go before
    they are kept so; a copy or a pickle of the model has none.
    """
    remove(model)
    gradients = Gradients(model, recipe, sink)
    setattr(model, _ATTRIBUTE, gradients)
    for p in trainable(model):
        gradients.attach(p)


def remove(model: nn.Module) -> None:
    """Undo `install`, also of parts of `model` that were prepared alone. The gradients that there are stay."""
    for module in model.modules():
        module.__dict__.pop(_ATTRIBUTE, None)
    for p in model.parameters():
        detach(p)


def renew(model: nn.Module) -> None:
    """After a move of the model: hook parameters that have come in the place of others, or have other contents now."""
    gradients: Gradients | None = model.__dict__.get(_ATTRIBUTE)
    if gradients is None:
        return
    there = {id(p) for p in model.parameters()}
    gradients.homes = [home for home in gradients.homes if id(home.parameter) in there]
    for p in trainable(model):
        if KeptGradient.of(p) is None:
            gradients.attach(p)
        else:
            connect(p)
            gradients.widen(p)


def recipe_of(model: nn.Module) -> Recipe | None:
    """The recipe by which `install` keeps gradients of `model`, or of a module in it; None where it was not called."""
    found = (module.__dict__.get(_ATTRIBUTE) for module in model.modules())
    return next((gradients.recipe for gradients in found if gradients is not None), None)


def casts_alone(model: nn.Module) -> bool:
    """True where this process casts the gradients of `model` itself: `install` has given them a narrow or scaled format
    and no sink."""
    found: Gradients | None = model.__dict__.get(_ATTRIBUTE)
    return found is not None and found.sink is None and found.is_cast


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
    is_outermost = all(owner.depth == 0 for _, owner in kept)
    sinks = list({id(owner.sink): owner.sink for _, owner in kept if owner.sink is not None and is_outermost}.values())
    for sink in sinks:
        sink.begin()
    for p, owner in kept:
        owner.begin(p)
    completes = False
    try:
        yield
        completes = True
    finally:
        # in about the order in which backward makes gradients, so that they need not wait for one another
        for p, owner in reversed(kept):
            owner.end(p, completes)
        for sink in sinks:
            sink.finish(completes)


class Gradients:
    """What `install` leaves on a model: a copy or a pickle of the model gets hooks of its own through it."""

    def __init__(self, model: nn.Module, recipe: Recipe, sink: Sink | None = None) -> None:
        self.model = model
        self.recipe = recipe
        self.sink = sink
        self.warning = WideWarning(recipe)
        self.homes: list[Home] = []

    def attach(self, p: nn.Parameter) -> None:
        """Hook a parameter, where the recipe concerns it."""
        self.widen(p)
        stays = self.is_cast and (p.numel() < self.recipe.min_state_size or self._is_left_out(p))
        if not stays and self.recipe.grad != CastSpec(FP32):
            self._hook(p, self.recipe.grad)
        elif self.sink is not None:
            self._hook(p, CastSpec(of_dtype(p.grad_dtype or p.dtype)))

    def _hook(self, p: nn.Parameter, spec: CastSpec) -> None:
        self.homes.append(Home(p))
        KeptGradient(self.homes[-1], self.recipe, self.warning, spec, self.sink).hook(p)

    @property
    def is_cast(self) -> bool:
        """As `gradient_hooks.is_cast`."""
        return is_cast(self.recipe.grad)

    def widen(self, p: nn.Parameter) -> None:
        """Let gradients of a parameter in 16 bits be as wide as the recipe's cast of them asks for."""
        if p.dtype in (torch.bfloat16, torch.float16):
            kept = torch.float32 if self.is_cast else self.recipe.grad.format.dtype
            set_grad_dtype(p, p.dtype if self.sink is not None and self.sink.in_parameter_dtype else kept)

    def _is_left_out(self, p: nn.Parameter) -> bool:
        tables = (m for m in self.model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.weight is p)
        return any(table.sparse or not self.recipe.embeddings for table in tables)

    def __deepcopy__(self, memo: dict[int, Any]) -> Gradients:
        # the copies that these give are those which the copy of the model will hold, by the memo
        hooked = [copy.deepcopy(p, memo) for p in trainable(self.model)]
        new = Gradients(copy.deepcopy(self.model, memo), self.recipe)
        new._attach_copies(self._places(), hooked)
        return new

    def __getstate__(self) -> dict[str, Any]:
        parameters = trainable(self.model)
        return {"model": self.model, "recipe": self.recipe, "places": self._places(), "parameters": parameters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.model, self.recipe, self.warning = state["model"], state["recipe"], WideWarning(state["recipe"])
        self.homes, self.sink = [], None
        self._attach_copies(state["places"], state["parameters"])

    def _places(self) -> list[int]:
        """Which of the trainable parameters are hooked for the recipe's sake."""
        found = enumerate(map(KeptGradient.of, trainable(self.model)))
        return [i for i, owner in found if owner is not None and owner.spec == self.recipe.grad != CastSpec(FP32)]

    def _attach_copies(self, places: list[int], parameters: list[nn.Parameter]) -> None:
        for p in parameters:
            self.widen(p)  # torch leaves grad_dtype out of a copy
        for i in places:
            self._hook(parameters[i], self.recipe.grad)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of `model` that get gradients of a floating dtype, in order, each once."""
    return [p for p in model.parameters() if p.requires_grad and p.dtype in FLOATING and not is_lazy(p)]
