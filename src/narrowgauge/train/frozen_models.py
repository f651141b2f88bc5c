"""The two models of preference training that are not trained: the reference, and the reward model."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from narrowgauge.layers import wrapping
from narrowgauge.layers.autocast import autocast
from narrowgauge.layers.convert import device_of
from narrowgauge.layers.delayed import DelayedState, state_names
from narrowgauge.layers.freeze import freeze, without_history
from narrowgauge.layers.recipe_layer import RecipeLayer
from narrowgauge.layers.wrapping import AutocastForward
from narrowgauge.preparation import prepare
from narrowgauge.recipes.spec import Recipe
from narrowgauge.tensors.cast import FLOATING
from narrowgauge.tensors.quantized import QuantizedTensor


@dataclass(frozen=True)
class Frozen:
    """A model that is only asked. matches: True where it computes bit for bit as the policy's recipe does."""

    model: nn.Module
    recipe: Recipe
    matches: bool

    def region(self) -> AbstractContextManager[object]:
        """Where its forward runs: one that was prepared places autocast itself."""
        if isinstance(self.model.__dict__.get("forward"), AutocastForward):
            return nullcontext()
        return autocast(self.recipe, device_of(self.model))


def is_converted(model: nn.Module) -> bool:
    """True for a model that was prepared, converted or frozen before."""
    return any(isinstance(module, RecipeLayer) and module.recipe is not None for module in model.modules())


def reference_of(reference: nn.Module, like: nn.Module, recipe: Recipe, policy_recipe: Recipe) -> Frozen:
    """Freeze a reference so that it computes as a policy under `recipe` does: equal weights give equal bits.

    Its parameters are brought into the format in which a policy stores them, and weights whose product casts them to
    FP8 anyway are kept as those codes: a byte a value. All else stays as wide as the policy has it. A model that is
    converted already stays as it is.

    reference: not yet converted, or frozen by the caller. like: the policy, not yet converted.
    """
    if is_converted(reference):
        return Frozen(_asked_only(reference), recipe, matches=False)
    matches = recipe == policy_recipe
    (freeze_reference if matches else _freeze_as)(reference, like, recipe)
    return Frozen(reference, recipe, matches)


def freeze_reference(reference: nn.Module, policy: nn.Module, recipe: Recipe, *, is_updated: bool = False) -> None:
    """Make `reference`, in place, compute what `policy` computes with the same weights, to the bit, and freeze it.

    Its parameters are first stored as those of the policy are; weights that products cast to FP8 are then kept as the
    very codes. So the KL between equal weights is 0, and no floor of rounding is added to the penalty. is_updated: the
    reference follows the policy later (TR-DPO): then nothing is stored in FP8, where small steps would be lost.

    policy: which trains by the recipe, prepared yet or not. Delayed scales are the policy's, in every forward.
    """
    _freeze_as(reference, policy, recipe, is_updated=is_updated)
    if without_history(first_of(recipe)) != first_of(recipe):
        reference.register_forward_pre_hook(lambda module, _: follow_scales(module, policy))


def _freeze_as(reference: nn.Module, policy: nn.Module, recipe: Recipe, *, is_updated: bool = False) -> None:
    trained = {name: p.requires_grad for name, p in policy.named_parameters()}
    for name, p in reference.named_parameters():  # prepare leaves alone what is frozen
        p.requires_grad_(p.dtype in FLOATING and trained.get(name, True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the recipe, which the policy's preparation gives, too
        held = [p for p in reference.parameters() if p.requires_grad]
        # an optimizer as the policy's, since a master that it keeps may round the values before they are stored
        prepare(reference, torch.optim.AdamW(held, lr=0.0) if held else None, first_of(recipe))
        if not is_updated:
            freeze(reference, first_of(recipe), exact=True)
    _asked_only(reference)


def freeze_scorer(model: nn.Module, recipe: Recipe) -> None:
    """Freeze a reward model in place, all that `freeze` can store in FP8, its forward inside the recipe's autocast."""
    if not is_frozen(model):
        freeze(model, first_of(recipe))
        wrapping.install(model, first_of(recipe).resolve(device_of(model)), autocast=True)
    _asked_only(model)


def is_frozen(model: nn.Module) -> bool:
    """True for a model that is not trained, with weights that are stored in 8 bits already."""
    parameters = list(model.parameters())
    in_8_bits = (isinstance(p.data, QuantizedTensor) and p.data.spec.format.bits == 8 for p in parameters)
    return not any(p.requires_grad for p in parameters) and any(in_8_bits)


def first_of(recipe: Recipe) -> Recipe:
    """A frozen model has no steps to count: of a recipe with a schedule, it takes the first."""
    return recipe.at(0) if recipe.schedule else recipe


def reward_model_of(reward: nn.Module, recipe: Recipe) -> Frozen:
    """Freeze a reward model: weights in FP8 where the recipe quantizes products, else as the recipe stores them."""
    recipe = without_history(recipe)
    if not is_converted(reward):
        if recipe.quantizes_gemms:
            freeze(reward, recipe)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they concern training
                prepare(reward, None, recipe)
                freeze(reward, recipe, exact=True)
    return Frozen(_asked_only(reward), recipe, matches=False)


@torch.no_grad()
def follow_scales(frozen: nn.Module, policy: nn.Module) -> None:
    """Give a reference the delayed scales that the policy has by now, so that it goes on to compute as the policy does.

    Nothing rolls those of a model that is only asked.
    """
    theirs = dict(policy.named_modules())
    for name, module in frozen.named_modules():
        followed = theirs.get(name)
        if isinstance(module, DelayedState) and isinstance(followed, DelayedState):
            for buffer in set(state_names(module)) & set(state_names(followed)):
                module.get_buffer(buffer).copy_(followed.get_buffer(buffer))


@torch.no_grad()
def fingerprint(model: nn.Module) -> float:
    """A number that follows from all of a model's stored values: equal for equal models, hardly for others."""
    total = 0.0
    for number, p in enumerate(model.parameters()):
        held = p.data.codes.view(torch.uint8) if isinstance(p.data, QuantizedTensor) else p.data
        total += float(held.double().sum()) * (1 + number % 7)
    return total


def _asked_only(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        p.requires_grad_(False)
    return model.eval()
