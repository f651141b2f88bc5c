"""One call that makes a model and its optimizer run by a recipe."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from narrowgauge.errors import ConversionError, RecipeError
from narrowgauge.layers import delayed, wrapping
from narrowgauge.layers.convert import convert, device_of, doubts
from narrowgauge.layers.delayed import DelayedState
from narrowgauge.layers.parameters import store
from narrowgauge.layers.schedule import Schedule
from narrowgauge.numerics.formats import BF16, FP16, FP32
from narrowgauge.numerics.rounding import STOCHASTIC
from narrowgauge.optim import stochastic
from narrowgauge.optim.groups import check_optimizer, is_plain_sgd, match_state_dtypes, replace_parameters
from narrowgauge.optim.guard import MAX_SKIPS, StepGuard
from narrowgauge.recipes import library
from narrowgauge.recipes.spec import COMM_ROLES, CastSpec, Recipe
from narrowgauge.tensors.quantized import QuantizedTensor

Model = TypeVar("Model", bound=nn.Module)
OptimizerOrNone = TypeVar("OptimizerOrNone", bound=Optimizer | None)


def prepare(
    model: Model,
    optimizer: OptimizerOrNone,
    recipe: str | Recipe,
    autocast: bool = True,
    *,
    max_skips: int = MAX_SKIPS,
) -> tuple[Model, OptimizerOrNone]:
    """Make `model` and `optimizer` run by `recipe`, in place; returns both.

    - Linear layers and norms are converted (see `convert`; `report(model)` lists them).
    - Trainable parameters are brought into the recipe's `param` format. Where that replaces parameter objects, the
      optimizer's groups take the new ones in the same order, so schedulers built before go on working; references that
      the caller holds to the old objects do not.
    - optimizer.step() skips steps with non-finite gradients, and says so in `optimizer.step_was_skipped`; max_skips of
      them in a row raise DivergenceError. It also rolls the history of delayed scaling; with optimizer None each layer
      does that itself, at its first training forward after a backward.
    - A recipe with a schedule (`Recipe.switch_at`) changes by itself after so many steps of the optimizer. Their count
      is in the optimizer's state dict: load that before the model's, as narrowgauge.load does.
    - autocast True: the model's forward runs inside `autocast(recipe)`. False: place that yourself.
    - Floating buffers of the model keep their dtype under `.to(dtype)`, `.half()`, `.bfloat16()` and `.float()`.

    optimizer: torch's AdamW, Adam or SGD, built from the model's parameters, or None. A deep or pickled copy of it is a
    plain optimizer, which skips nothing: prepare copies of model and optimizer together.

    Preparing again, also by another recipe, replaces what was prepared before; but parameters stored in a scaled format
    stay so, and a recipe that stores them otherwise is refused.

    Raises RecipeError for a recipe that is unknown or asks for what this version cannot do, ConversionError for a model
    or an optimizer that cannot be prepared.
    """
    if not isinstance(model, nn.Module):
        raise ConversionError(f"expected a torch.nn.Module to prepare, found {type(model).__name__}")
    if hasattr(model, "_orig_mod"):
        raise ConversionError("the model is compiled already: call prepare first, then torch.compile")
    recipe = library.recipe(recipe).resolve(device_of(model))
    if optimizer is not None:
        check_optimizer(optimizer, model)
    (_, first), *later = recipe.phases
    if later and optimizer is None:
        raise RecipeError(
            f"recipe '{recipe.name}' has a schedule: expected the optimizer whose steps it counts, found None; pass "
            "it, or prepare by one of its recipes, recipe.at(steps)"
        )
    check_supported(recipe, optimizer)
    check_stored(model, recipe)
    stored = store(model, recipe)
    convert(model, first)
    for layer in model.modules():
        if isinstance(layer, DelayedState):
            layer.rolls_at_step = False
    forward = wrapping.install(model, first, autocast)
    if optimizer is not None:
        replace_parameters(optimizer, stored.replaced)
        if not recipe.param.is_stochastic:
            match_state_dtypes(optimizer)
        schedule = Schedule(model, recipe, forward)
        _guard(model, optimizer, schedule, max_skips, schedule.go_to if later else None)
        stochastic.install(optimizer, recipe.param.is_stochastic)
    unrounded = recipe.param.is_stochastic and optimizer is None
    notes = (*stored.warnings, stochastic.NO_OPTIMIZER) if unrounded else tuple(stored.warnings)
    model._narrowgauge_notes = notes  # type: ignore[assignment]
    for warning in (*stored.warnings, *(doubt for _, each in later for doubt in doubts(model, each))):
        warnings.warn(warning, stacklevel=2)
    return model, optimizer


def check_supported(recipe: Recipe, optimizer: Optimizer | None) -> None:
    """Raise RecipeError for the first role that this version cannot carry out with `optimizer`."""
    fp32, bf16, rounded = CastSpec(FP32), CastSpec(BF16), CastSpec(BF16, rounding=STOCHASTIC)
    param = recipe.param
    scaled = param.format is FP16 and param.is_scaled and not param.in_blocks and not param.is_stochastic
    if not (param in (fp32, bf16, rounded) or scaled):
        raise _unsupported(
            recipe,
            "param",
            "CastSpec(FP32), CastSpec(BF16), CastSpec(BF16, rounding=STOCHASTIC) or CastSpec(FP16, scale=TENSOR_POW2)",
        )
    if recipe.master is not None:
        raise _unsupported(recipe, "master", "None")
    # torch's optimizers keep moments, and but for plain SGD want gradients, in the dtype of a plain parameter
    in_half = param == bf16 and optimizer is not None and not is_plain_sgd(optimizer)
    grad, state = bf16 if in_half or param == rounded else fp32, bf16 if in_half else fp32
    if recipe.grad != grad and (recipe.grad != param or param == rounded):
        raise _unsupported(recipe, "grad", f"CastSpec({grad})")
    for role in ("exp_avg", "exp_avg_sq"):
        if getattr(recipe, role) != state:
            raise _unsupported(recipe, role, f"CastSpec({state})")
    for role in COMM_ROLES:
        if getattr(recipe, role) not in (None, fp32):
            raise _unsupported(recipe, role, "None")


def _unsupported(recipe: Recipe, role: str, expected: str) -> RecipeError:
    found = getattr(recipe, role)
    return RecipeError(
        f"recipe '{recipe.name}' with param=({recipe.param}): {role}=({found}) is not supported by this version; "
        f"expected {expected}"
    )


def check_stored(model: nn.Module, recipe: Recipe) -> None:
    """Raise ConversionError where parameters are stored in a scaled format that the recipe does not store."""
    for name, p in model.named_parameters():
        if isinstance(p.data, QuantizedTensor) and p.data.spec != recipe.param:
            raise ConversionError(
                f"parameter '{name}' is stored as ({p.data.spec}), and recipe '{recipe.name}' stores ({recipe.param}): "
                "build the model anew and load its weights, then prepare it"
            )


def _guard(
    model: nn.Module,
    optimizer: Optimizer,
    schedule: Schedule,
    max_skips: int,
    on_count: Callable[[int], None] | None,
) -> None:
    def name_of(parameter: Tensor) -> str:
        return next((name for name, p in model.named_parameters() if p is parameter), "a parameter not in the model")

    StepGuard(
        optimizer,
        name_of=name_of,
        on_step=lambda: delayed.roll(schedule.layers),
        on_skip=lambda: delayed.clear(schedule.layers),
        on_count=on_count,
        max_skips=max_skips,
    ).attach()
