"""One call that makes a model and its optimizer run by a recipe."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from narrowgauge.distributed import (
    agreement,
    codec,
    counting,
    partition,
    pipeline,
    replicas,
    sharding,
    tensor_parallel,
    wire,
)
from narrowgauge.distributed.layout import GroupReducer
from narrowgauge.errors import ConversionError, RecipeError
from narrowgauge.layers import adapters, delayed, fp8_loading, wrapping
from narrowgauge.layers.convert import convert, device_of, doubts
from narrowgauge.layers.delayed import DelayedState
from narrowgauge.layers.kinds import NOTES
from narrowgauge.layers.parameters import Stored, store
from narrowgauge.layers.schedule import Schedule
from narrowgauge.numerics.formats import BF16, FP16, FP32
from narrowgauge.numerics.rounding import STOCHASTIC
from narrowgauge.ops.reduce import SINGLE_PROCESS, Reducer
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.optim.groups import check_optimizer, match_state_dtypes, replace_parameters
from narrowgauge.optim.guard import MAX_SKIPS, StepGuard, parameters_of
from narrowgauge.optim.replace import current, needs_own, replacement, unused_moments
from narrowgauge.recipes import library
from narrowgauge.recipes.spec import COMM_ROLES, CastSpec, Recipe

NO_OPTIMIZER = (
    "prepared without an optimizer: none rounds updates of the bfloat16 parameters stochastically, and those below "
    "half a unit in the last place are lost; to train, give prepare the optimizer, too"
)
Model = TypeVar("Model", bound=nn.Module)
OptimizerOrNone = TypeVar("OptimizerOrNone", bound=Optimizer | None)


def prepare(
    model: Model,
    optimizer: OptimizerOrNone,
    recipe: str | Recipe,
    autocast: bool = True,
    *,
    max_skips: int = MAX_SKIPS,
    offload: str | None = None,
) -> tuple[Model, OptimizerOrNone]:
    """Make `model` and `optimizer` run by `recipe`, in place; returns both.

    - Linear layers and norms are converted (see `convert`; `report(model)` lists them).
    - Trainable parameters are brought into the recipe's `param` format, also those that the optimizer does not hold,
      for which no master is kept. Where that replaces parameter objects, the optimizer's groups take the new ones in
      the same order, so schedulers built before go on working; references that the caller holds to the old objects do
      not.
    - Where the recipe keeps parameters, gradients or moments as torch's optimizers cannot, the optimizer is replaced by
      narrowgauge.optim's of the same name, with the same list of groups and the state that there is, cast anew. The
      one that was given goes on as another name of it, so loops and schedulers that hold it work.
    - Gradients of parameters with at least `recipe.min_state_size` values are cast by the recipe's `grad` as soon as
      backward has made them; see `accumulate`.
    - optimizer.step() skips steps with non-finite gradients, and says so in `optimizer.step_was_skipped`; max_skips of
      them in a row raise DivergenceError. It also rolls the history of delayed scaling; with optimizer None each layer
      does that itself, at its first training forward after a backward.
    - A recipe with a schedule (`Recipe.switch_at`) changes by itself after so many steps of the optimizer. Their count
      is in the optimizer's state dict: load that before the model's, as narrowgauge.load does.
    - offload "cpu": moments and masters live on the host, and the step is taken there.
    - autocast True: the model's forward runs inside `autocast(recipe)`. False: place that yourself.
    - Floating buffers of the model keep their dtype under `.to(dtype)`, `.half()`, `.bfloat16()` and `.float()`.
    - `model.load_state_dict` takes weights in FP8 with the scales beside them, see `load_weights`, and no bare codes.

    optimizer: torch's AdamW, Adam, SGD or Muon, or one of narrowgauge.optim, built from the model's parameters, or
    None. A deep or pickled copy of it skips nothing: prepare copies of model and optimizer together.

    Preparing again, also by another recipe, replaces what was prepared before. Give it the optimizer that was returned:
    it has the digits that narrow parameters have lost.

    Raises RecipeError for a recipe that is unknown or asks for what this version cannot do, ConversionError for a model
    or an optimizer that cannot be prepared.
    """
    if not isinstance(model, nn.Module):
        raise ConversionError(f"expected a torch.nn.Module to prepare, found {type(model).__name__}")
    if hasattr(model, "_orig_mod"):
        raise ConversionError("the model is compiled already: call prepare first, then torch.compile")
    recipe = library.recipe(recipe).resolve(device_of(model))
    optimizer = current(optimizer)
    if optimizer is not None:
        check_optimizer(optimizer, model)
    (_, first), *later = recipe.phases
    if later and optimizer is None:
        raise RecipeError(
            f"recipe '{recipe.name}' has a schedule: expected the optimizer whose steps it counts, found None; pass "
            "it, or prepare by one of its recipes, recipe.at(steps)"
        )
    check_supported(recipe)
    deciding = counting.deciding(model)
    if isinstance(deciding, GroupReducer):
        agreement.check_prepared(model, recipe, deciding.group)
    pipeline.adopt(model, recipe)
    tensor_parallel.take_up(model, recipe)
    stored, optimizer = _store(model, optimizer, recipe, offload)  # type: ignore[assignment]
    replicas.install(model, recipe)
    convert(model, first)
    sharding.install(model, recipe)
    for layer in model.modules():
        if isinstance(layer, DelayedState):
            layer.rolls_at_step = False
    forward = wrapping.install(model, first, autocast)
    fp8_loading.install(model)
    adapters.refuse_merging(model)
    if optimizer is not None:
        reducer = counting.deciding(model)
        counting.count_once(model, reducer)
        schedule = Schedule(model, recipe, forward)
        _guard(model, optimizer, schedule, max_skips, reducer, schedule.go_to if later else None)
        if isinstance(optimizer, LowPrecisionOptimizer) and reducer is not SINGLE_PROCESS:
            optimizer.share_randomness(reducer, device_of(model))
    notes = list(stored.warnings)
    if optimizer is None and recipe.param.is_stochastic:
        notes.append(NO_OPTIMIZER)
    if optimizer is not None and (unused := unused_moments(recipe, optimizer)):
        notes.append(f"{type(optimizer).__name__} keeps no {', '.join(unused)}: the recipe's format of it is not used")
    setattr(model, NOTES, tuple(notes))
    for warning in (*stored.warnings, *(doubt for _, each in later for doubt in doubts(model, each))):
        warnings.warn(warning, stacklevel=2)
    wire.SINCE_STEP.clear()  # what made the ranks alike is no part of the first step
    return model, optimizer  # type: ignore[return-value]


def _store(
    model: nn.Module, optimizer: Optimizer | None, recipe: Recipe, offload: str | None
) -> tuple[Stored, Optimizer | None]:
    """Store the parameters by the recipe, and give the digits that they lose to the optimizer that keeps them."""
    before = optimizer if isinstance(optimizer, LowPrecisionOptimizer) else None
    full_values = None if before is None else before.full_values
    is_parted = partition.is_requested(model)
    if optimizer is None or (before is None and offload is None and not is_parted and not needs_own(recipe)):
        stored = store(model, recipe)
        if optimizer is not None:
            replace_parameters(optimizer, stored.replaced)
            match_state_dtypes(optimizer)
        return stored, optimizer
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    theirs = {p: optimizer.state[p] for p in parameters_of(optimizer) if optimizer.state.get(p)}
    ours = replacement(optimizer, recipe, names, offload)
    was_parted = ours.partition is not None
    ours.partition = partition.partition_of(model, ours, recipe)
    held = set(parameters_of(optimizer))
    unheld: list[str] = []

    def take_over(old: nn.Parameter, new: nn.Parameter, values: Tensor) -> None:
        saved = theirs.pop(old, None)
        ours.state.pop(old, None)
        if new is not old:
            ours.hand_over(old, new)
        if old not in held:  # another optimizer's, or none's: a state of it would belong to no group
            unheld.append(ours.names.get(new, ""))
            return
        if saved is not None:
            ours.take_state(new, saved)
        ours.set_values(new, values)

    stored = store(model, recipe, full_values=full_values, held=held, on_stored=take_over)
    if unheld and recipe.master is not None:
        stored.warnings.append(
            f"{len(unheld)} trainable parameters are in no group of the optimizer (the first: '{unheld[0]}'): recipe "
            f"'{recipe.name}' stores them as ({recipe.param}) like all others, and none keeps the digits that this "
            "loses; add them to a group, or before prepare call requires_grad_(False) on what is not trained"
        )
    replace_parameters(ours, stored.replaced)
    for p, saved in theirs.items():  # of parameters that are stored as before
        values = p.detach() if before is None else before.full_values(p)
        ours.take_state(p, saved)
        ours.set_values(p, values)
    if was_parted and ours.partition is not None:
        ours.partition.exchange(ours)  # owners had more digits to store than the others
    return stored, ours


def check_supported(recipe: Recipe) -> None:
    """Raise RecipeError for the first role that this version cannot carry out."""
    fp32, bf16, rounded = CastSpec(FP32), CastSpec(BF16), CastSpec(BF16, rounding=STOCHASTIC)
    param, grad = recipe.param, recipe.grad
    scaled = param.is_scaled and not param.in_blocks and (param.format is FP16 or param.format.is_narrow)
    if not (param in (fp32, bf16, rounded) or (scaled and param.format.has_nan)):
        raise _unsupported(
            recipe,
            "param",
            "CastSpec(FP32), CastSpec(BF16), CastSpec(BF16, rounding=STOCHASTIC), CastSpec(FP16, scale=TENSOR_POW2) or "
            "CastSpec(E4M3FN)",
        )
    if not (grad in (fp32, bf16) or grad == param or (grad.format.has_nan and grad.is_scaled)):
        raise _unsupported(recipe, "grad", "CastSpec(FP32), CastSpec(BF16) or CastSpec(E4M3FN)")
    for role in COMM_ROLES:
        if getattr(recipe, role) is not None:
            codec.check(role, getattr(recipe, role))


def _unsupported(recipe: Recipe, role: str, expected: str) -> RecipeError:
    found = getattr(recipe, role)
    return RecipeError(
        f"recipe '{recipe.name}' with param=({recipe.param}): {role}=({found}) is not supported by this version; "
        f"expected {expected}"
    )


def _guard(
    model: nn.Module,
    optimizer: Optimizer,
    schedule: Schedule,
    max_skips: int,
    reducer: Reducer,
    on_count: Callable[[int], None] | None,
) -> None:
    scales = replicas.amax_reducer(model)

    def name_of(parameter: Tensor) -> str:
        return next((name for name, p in model.named_parameters() if p is parameter), "a parameter not in the model")

    StepGuard(
        optimizer,
        name_of=name_of,
        on_step=lambda: delayed.roll(schedule.layers, scales),
        on_skip=lambda: delayed.clear(schedule.layers),
        on_count=on_count,
        max_skips=max_skips,
        reducer=reducer,
    ).attach()
