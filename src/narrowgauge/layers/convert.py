"""Conversion: linear layers and norms swap their class in place; every other object of the model stays what it was."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from narrowgauge.errors import RecipeError
from narrowgauge.layers import fused, sharing
from narrowgauge.layers.embedding import Embedding
from narrowgauge.layers.foreign import features_of
from narrowgauge.layers.kinds import NORMS, Kind, become, class_of, converted_class, kind_of, plain_class
from narrowgauge.layers.linear import Linear
from narrowgauge.layers.recipe_layer import RecipeLayer
from narrowgauge.layers.report import ConversionReport, report
from narrowgauge.numerics.formats import FP32
from narrowgauge.recipes import library
from narrowgauge.recipes.select import Candidate, Selection, select, unmatched_globs
from narrowgauge.recipes.spec import Recipe

# what also runs with parameters in 16 bits, where torch's own loses or refuses them
_IN_16_BITS: dict[type[nn.Module], type[nn.Module]] = {**NORMS, nn.Embedding: Embedding}

_WHOLE = "_narrowgauge_candidates"


def convert(model: nn.Module, recipe: str | Recipe) -> ConversionReport:
    """Make the linear layers and norms of `model` run by `recipe`, in place.

    Parameters, buffers, hooks, ties and `requires_grad` are not touched; a module that is registered twice is converted
    once. Only nn.Linear, ops.experts.GroupedLinear, transformers' Conv1D and experts of mixtures, and torch's norms
    themselves are swapped: subclasses, parametrized layers and layers whose weight a hook computes are skipped and
    reported. Converting again by the same recipe changes nothing; by another one, the layers take it up and forget the
    scaling state of the first.

    Returns what every layer runs in, and why. Raises RecipeError for an unknown recipe, and for one with a schedule.
    """
    recipe = library.recipe(recipe).resolve(device_of(model))
    if recipe.schedule:
        raise RecipeError(
            f"recipe '{recipe.name}' has a schedule, and there are no steps to count here: use "
            "prepare(model, optimizer, recipe), or convert by one of its recipes, recipe.at(steps)"
        )
    for doubt in doubts(model, recipe):
        warnings.warn(doubt, stacklevel=2)
    take_up(model, recipe)
    return report(model)


def doubts(model: nn.Module, recipe: Recipe) -> list[str]:
    """What is probably not meant: globs that match nothing, quantizing or smoothing that concerns no layer."""
    candidates = _candidates(model, _linears(model))
    found = [
        f"recipe '{recipe.name}': '{glob}' matches no linear layer; check its spelling"
        for glob in unmatched_globs(candidates, recipe)
    ]
    selections = select(candidates, recipe)
    if recipe.quantizes_gemms and not any(selection.quantized for selection in selections):
        found.append(
            f"recipe '{recipe.name}' quantizes the products of linear layers, and none of this model's is quantized: "
            f"{_why_none(selections)}; `narrowgauge.report(model)` has all reasons"
        )
    for glob in recipe.smooth:
        smoothed = [selection for selection in selections if fnmatchcase(selection.name, glob)]
        if smoothed and not any(selection.quantized for selection in smoothed):
            found.append(
                f"recipe '{recipe.name}': smooth='{glob}' does nothing, because none of its layers is quantized: "
                f"{_why_none(smoothed)}"
            )
    return found


def take_up(model: nn.Module, recipe: Recipe) -> None:
    """Convert by a resolved recipe, in silence."""
    linears = _linears(model)
    for selection in select(_candidates(model, linears), recipe):
        if selection.name in linears:
            _convert_linear(linears[selection.name], recipe, selection)
    for module in model.modules():
        if class_of(module) in _IN_16_BITS:
            become(module, _IN_16_BITS[class_of(module)])
        _share_inputs(module)
        fused.keep_layers_called(module)


def _linears(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if kind_of(module) is Kind.LINEAR}


def keep_candidates(whole: nn.Module, part: nn.Module) -> None:
    """Let the layers of `part` be chosen as those of `whole`, whose modules it has under the same names.

    What `first_last` counts are then the layers of the whole model.
    """
    setattr(part, _WHOLE, tuple(_candidates(whole, _linears(whole))))


def _candidates(model: nn.Module, linears: dict[str, nn.Module]) -> Sequence[Candidate]:
    whole: tuple[Candidate, ...] | None = model.__dict__.get(_WHOLE)
    if whole is not None:
        return whole
    return [Candidate(name, *features_of(m)) for name, m in linears.items()]


def _why_none(selections: Sequence[Selection]) -> str:
    if not selections:
        return "it has no torch.nn.Linear that can be converted"
    return f"'{selections[0].name}' is kept ({selections[0].reason})"


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter or buffer; the CPU where there is none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def _convert_linear(module: nn.Module, recipe: Recipe, selection: Selection) -> None:
    recipe = recipe.for_layer(selection.name)
    if not selection.quantized and recipe.compute is FP32 and not recipe.tf32:
        _restore(module)  # float32 products of float32 operands: torch's own
        return
    if not isinstance(module, RecipeLayer):
        become(module, converted_class(module))
    assert isinstance(module, RecipeLayer)
    smooth = selection.quantized and any(fnmatchcase(selection.name, glob) for glob in recipe.smooth)
    module.configure(recipe, selection.quantized, selection.reason, smooth)


def _restore(module: nn.Module) -> None:
    if isinstance(module, Linear) and module.parted is not None:  # torch's own knows nothing of parts
        module.forget_recipe()
    elif isinstance(module, RecipeLayer):
        module.forget_recipe()
        become(module, plain_class(module))


def _share_inputs(parent: nn.Module) -> None:
    """Let children of `parent` share the casts, or the rows, of what they read; in a sequence no two read the same."""
    sharers = [child for child in parent.children() if isinstance(child, Linear) and child.shares_input]
    if len(sharers) > 1 and not isinstance(parent, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        sharing.install(parent)
    else:
        sharing.remove(parent)
