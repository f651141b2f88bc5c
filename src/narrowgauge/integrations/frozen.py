"""Reference and reward models of preference training: frozen by the recipe that the policy trains by."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from narrowgauge.layers import wrapping
from narrowgauge.layers.convert import device_of
from narrowgauge.layers.freeze import freeze, without_history
from narrowgauge.preparation import prepare
from narrowgauge.recipes.spec import Recipe
from narrowgauge.tensors.quantized import QuantizedTensor
from narrowgauge.train.frozen_models import follow_scales


def freeze_reference(reference: nn.Module, policy: nn.Module, recipe: Recipe, *, is_updated: bool = False) -> None:
    """Make `reference`, in place, compute what `policy` computes with the same weights, to the bit, and freeze it.

    Its parameters are first stored as those of the policy are; weights that products cast to FP8 are then kept as the
    very codes. So the KL between equal weights is 0, and no floor of rounding is added to the penalty. Delayed scales
    are the policy's, in every forward. is_updated: the reference follows the policy later (TR-DPO): then nothing is
    stored in FP8, where small steps would be lost.
    """
    trained = {name: p.requires_grad for name, p in policy.named_parameters()}
    for name, p in reference.named_parameters():
        if p.is_floating_point():
            p.requires_grad_(trained.get(name, True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the recipe, which the policy's preparation gives, too
        held = [p for p in reference.parameters() if p.requires_grad]
        # an optimizer as the policy's, since a master that it keeps may round the values before they are stored
        prepare(reference, torch.optim.AdamW(held, lr=0.0) if held else None, first_of(recipe))
        if not is_updated:
            freeze(reference, first_of(recipe), exact=True)
    reference.requires_grad_(False)
    reference.eval()
    if without_history(first_of(recipe)) != first_of(recipe):
        reference.register_forward_pre_hook(lambda module, _: follow_scales(module, policy))


def freeze_scorer(model: nn.Module, recipe: Recipe) -> None:
    """Freeze a reward model in place, all that `freeze` can store in FP8, its forward inside the recipe's autocast."""
    if not is_frozen(model):
        freeze(model, first_of(recipe))
        wrapping.install(model, first_of(recipe).resolve(device_of(model)), autocast=True)
    model.requires_grad_(False)
    model.eval()


def is_frozen(model: nn.Module) -> bool:
    """True for a model that is not trained, with weights that are stored in 8 bits already."""
    parameters = list(model.parameters())
    in_8_bits = (isinstance(p.data, QuantizedTensor) and p.data.spec.format.bits == 8 for p in parameters)
    return not any(p.requires_grad for p in parameters) and any(in_8_bits)


def first_of(recipe: Recipe) -> Recipe:
    """A frozen model has no steps to count: of a recipe with a schedule, it takes the first."""
    return recipe.at(0) if recipe.schedule else recipe
