"""Our optimizer in the place of torch's, with its groups, its state and its schedulers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from narrowgauge.errors import ConversionError, NarrowgaugeError, RecipeError
from narrowgauge.numerics.formats import FP16, FP32
from narrowgauge.optim.adam import Adam, AdamW
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.optim.formats import StateFormats
from narrowgauge.optim.guard import StepGuard
from narrowgauge.optim.muon import Muon
from narrowgauge.optim.sgd import SGD
from narrowgauge.recipes import library
from narrowgauge.recipes.spec import MOMENT_ROLES, CastSpec, Recipe

_REPLACED_BY = "_narrowgauge_replaced_by"
# torch's AdamW is an Adam
_OURS: tuple[tuple[type[Optimizer], type[LowPrecisionOptimizer]], ...] = (
    (torch.optim.AdamW, AdamW), (torch.optim.Adam, Adam), (torch.optim.SGD, SGD), (torch.optim.Muon, Muon),
)  # fmt: skip
OptimizerOrNone = TypeVar("OptimizerOrNone", bound=Optimizer | None)


def current(optimizer: OptimizerOrNone) -> OptimizerOrNone:
    """The optimizer that took the place of this one, else itself."""
    return getattr(optimizer, _REPLACED_BY, optimizer)


def inmost(optimizer: OptimizerOrNone) -> OptimizerOrNone:
    """The optimizer that takes the steps: of one that another library wraps, the one inside."""
    return current(getattr(optimizer, "optimizer", optimizer))


def needs_own(recipe: Recipe) -> bool:
    """True where the recipe keeps parameters, gradients or states as torch's optimizers do not by themselves."""
    if recipe.master is not None or recipe.param.format not in (FP32, FP16):
        return True
    return any(getattr(recipe, role).format is not FP32 for role in ("grad", *MOMENT_ROLES))


def replacement(
    optimizer: Optimizer, recipe: Recipe, names: Mapping[Tensor, str], offload: str | None = None
) -> LowPrecisionOptimizer:
    """The optimizer that takes the place of `optimizer`: the same groups (the very list), and its formats.

    One of ours takes up the recipe's formats and stays. names: of the parameters, for overrides and errors. The state
    is not moved yet: see `LowPrecisionOptimizer.take_state`. offload: where the state is kept. Raises RecipeError for a
    moment that the optimizer does not have, ConversionError for options and numbers that ours does not take.
    """
    formats = StateFormats.of(recipe)
    kind = _kind_of(optimizer)
    _check_moments(recipe, optimizer)
    if isinstance(optimizer, LowPrecisionOptimizer):
        optimizer.formats, optimizer.names, optimizer.offload = formats, dict(names), offload
        return optimizer
    ours = kind.__new__(kind)
    try:
        LowPrecisionOptimizer.__init__(
            ours, [dict(group) for group in optimizer.param_groups], dict(optimizer.defaults), formats, offload=offload,
            may_lose_updates=True,  # the parameters are stored by the recipe later
        )  # fmt: skip
    except NarrowgaugeError as error:
        raise ConversionError(f"optimizer, beside recipe '{recipe.name}': {error}") from error
    ours.names = dict(names)
    ours.param_groups = optimizer.param_groups
    _retire(optimizer, ours)
    return ours


def _kind_of(optimizer: Optimizer) -> type[LowPrecisionOptimizer]:
    if isinstance(optimizer, LowPrecisionOptimizer):
        return type(optimizer)
    return next(ours for theirs, ours in _OURS if isinstance(optimizer, theirs))


def unused_moments(recipe: Recipe, optimizer: Optimizer) -> list[str]:
    """The roles of moments that the recipe narrows and the optimizer does not keep."""
    kept = set(_kind_of(optimizer).moments.values())
    if "momentum" in optimizer.defaults and not any(group["momentum"] for group in optimizer.param_groups):
        kept.clear()
    return [role for role in MOMENT_ROLES if role not in kept and getattr(recipe, role) != CastSpec(FP32)]


def _check_moments(recipe: Recipe, optimizer: Optimizer) -> None:
    """Refuse a moment that was asked for beyond what a named recipe says, of an optimizer that does not keep it."""
    named = library.recipe(recipe.name) if recipe.name in library.recipe_names() else Recipe()
    for role in unused_moments(recipe, optimizer):
        spec = getattr(recipe, role)
        if spec != getattr(named, role):
            raise RecipeError(
                f"recipe '{recipe.name}': {role}=({spec}), and this {type(optimizer).__name__} keeps no such moment; "
                f"use recipe.replace({role}=CastSpec(formats.FP32)), or an optimizer that has it, e.g. AdamW"
            )


def _retire(optimizer: Optimizer, ours: LowPrecisionOptimizer) -> None:
    """Make the optimizer that was replaced another name of ours: for loops and schedulers that hold it."""
    guard = StepGuard.on(optimizer)
    if guard is not None:
        guard.detach()
    vars(optimizer).pop("step_was_skipped", None)

    def step(*args: Any, **kwargs: Any) -> Any:
        return ours.step(*args, **kwargs)  # type: ignore[attr-defined]

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # as a scheduler's own wrapper says
    methods = {name: getattr(ours, name) for name in ("state_dict", "load_state_dict", "add_param_group")}
    vars(optimizer).update(methods, step=step, state=ours.state, **{_REPLACED_BY: ours})
    optimizer.__class__ = _replaced_class(type(optimizer))
    replaced = weakref.ref(optimizer)

    def note(*args: Any) -> None:
        old = replaced()
        if old is not None:
            old._opt_called = True  # type: ignore[attr-defined]  # a scheduler built on it asks whether steps were taken

    ours.register_step_post_hook(note)


@functools.cache
def _replaced_class(kind: type[Optimizer]) -> type[Optimizer]:
    """`kind` for an optimizer that was replaced: what it does not have itself is that of the one in its place."""

    def look_up(self: Any, name: str) -> Any:
        ours = vars(self).get(_REPLACED_BY)
        if ours is None or name.startswith("__"):
            raise AttributeError(f"'{kind.__name__}' object has no attribute '{name}'")
        return getattr(ours, name)

    def copied(self: Any, protocol: Any) -> Any:
        return vars(self)[_REPLACED_BY].__reduce_ex__(protocol)

    return type(
        kind.__name__, (kind,), {"__getattr__": look_up, "__reduce_ex__": copied, "__module__": kind.__module__}
    )
