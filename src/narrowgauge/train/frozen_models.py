"""The two models of preference training that are not trained: the reference, and the reward model."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
    trained = {name for name, p in like.named_parameters() if p.requires_grad}
    known = {name for name, _ in like.named_parameters()}
    for name, p in reference.named_parameters():  # prepare leaves alone what is frozen
        p.requires_grad_(p.dtype in FLOATING and (name in trained or name not in known))
    _in_silence(reference, recipe)
    return Frozen(_asked_only(reference), recipe, matches=recipe == policy_recipe)


def reward_model_of(reward: nn.Module, recipe: Recipe) -> Frozen:
    """Freeze a reward model: weights in FP8 where the recipe quantizes products, else as the recipe stores them."""
    recipe = without_history(recipe)
    if not is_converted(reward):
        if recipe.quantizes_gemms:
            freeze(reward, recipe)
        else:
            _in_silence(reward, recipe)
    return Frozen(_asked_only(reward), recipe, matches=False)


def copy_equal(frozen: nn.Module, policy: nn.Module, equal: set[str]) -> None:
    """Let parameters that had the policy's values before have the bits that the policy stores now.

    They differ where the policy's are rounded by way of a master of its optimizer. equal: their names.
    """
    stored = dict(policy.named_parameters())
    for name, p in frozen.named_parameters():
        if name in equal and not same_bits(p, stored[name]) and type(p.data) is type(stored[name].data):
            p.data = stored[name].detach().clone()


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


def same_bits(a: Tensor, b: Tensor) -> bool:
    """True where both are stored alike, in the same bits."""
    a, b = a.detach(), b.detach()
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        alike = a.spec == b.spec and torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8))
        return alike and torch.equal(a.dequant_scale, b.dequant_scale)
    if isinstance(a, QuantizedTensor) or isinstance(b, QuantizedTensor):
        return False
    return a.dtype is b.dtype and torch.equal(a, b)


@torch.no_grad()
def fingerprint(model: nn.Module) -> float:
    """A number that follows from all of a model's stored values: equal for equal models, hardly for others."""
    total = 0.0
    for number, p in enumerate(model.parameters()):
        held = p.data.codes.view(torch.uint8) if isinstance(p.data, QuantizedTensor) else p.data
        total += float(held.double().sum()) * (1 + number % 7)
    return total


def _in_silence(model: nn.Module, recipe: Recipe) -> None:
    """Prepare and freeze; what that warns of concerns training, or was said of the policy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepare(model, None, recipe)
        freeze(model, recipe, exact=True)


def _asked_only(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        p.requires_grad_(False)
    return model.eval()
