"""Frozen weights in FP8: reference, reward and teacher models, and the bases of adapters."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from narrowgauge.errors import ConversionError
from narrowgauge.layers.adapters import refuse_merging
from narrowgauge.layers.convert import convert, device_of
from narrowgauge.layers.linear import Linear
from narrowgauge.layers.parameters import quantized_by, replace
from narrowgauge.numerics.formats import E4M3FN
from narrowgauge.numerics.rounding import NEAREST_EVEN
from narrowgauge.numerics.scaling import CURRENT
from narrowgauge.ops.matmul import OUTPUT
from narrowgauge.recipes import library
from narrowgauge.recipes.spec import OPERAND_ROLES, CastSpec, Recipe
from narrowgauge.tensors.quantized import QuantizedTensor, quantize

Model = TypeVar("Model", bound=nn.Module)


def freeze(model: Model, recipe: str | Recipe, *, exact: bool = False) -> Model:
    """Freeze `model` in place, its weights stored in FP8: one byte a value and the scales. Returns it.

    - Weights of linear layers, and of embeddings where `recipe.embeddings` says so, become QuantizedTensors: cast by
      the recipe's `weight` where that is FP8, so that products multiply these codes as they are, else by E4M3FN with a
      scale per tensor. Tied ones stay one, and those that are stored in 8 bits already stay as they are.
    - All other parameters (biases, norms, layers that cannot be converted) stay as they are. No parameter requires a
      gradient afterwards, and there are none left; gradients of inputs flow to earlier layers, and to adapters.
    - Linear layers and norms are converted, as `convert` does: products run by the recipe, with current in the place of
      delayed scales, whose history nothing would roll. For the operations between them place `narrowgauge.autocast`
      yourself; a copy of a prepared model keeps its own. `train` and `eval` are not touched.

    exact True: only weights whose product would cast them to the very codes that are stored, so that every output stays
    what it was to the bit: those of quantized layers, where the recipe casts weights to FP8 by the nearest value with a
    scale of the tensor at hand. Embeddings, heads and other layers that are kept stay as they are, too, and so do
    delayed scales.

    A reference model is freeze(copy.deepcopy(model), recipe). An optimizer that holds the parameters should be built
    anew: those it holds may no longer be the model's. Adapters that are added later train under `prepare`, which leaves
    frozen parameters alone. `narrowgauge.report(model)` lists what is stored in FP8.

    Raises ConversionError for what is no model, one that is compiled, or a weight whose size is not known yet;
    RecipeError for an unknown recipe, and for one with a schedule: freeze by one of its recipes, recipe.at(steps).
    """
    if not isinstance(model, nn.Module):
        raise ConversionError(f"expected a torch.nn.Module to freeze, found {type(model).__name__}")
    if hasattr(model, "_orig_mod"):
        raise ConversionError("the model is compiled already: call freeze first, then torch.compile")
    for name, p in model.named_parameters():
        if is_lazy(p):
            raise ConversionError(f"parameter '{name}' has no size yet: run one forward pass first")
    recipe = library.recipe(recipe).resolve(device_of(model))
    if not exact:
        recipe = without_history(recipe)
    convert(model, recipe)
    spec = frozen_spec(recipe)
    for weight in list(_multiplied_as(spec, model) if exact else quantized_by(model, recipe)):
        _store_frozen(model, weight, spec)
    refuse_merging(model)
    for p in model.parameters():
        p.requires_grad_(False)
        p.grad = None
    notes: tuple[str, ...] = getattr(model, "_narrowgauge_notes", ())
    model._narrowgauge_notes = (*(n for n in notes if not n.startswith(_NOTE)), _note(model))  # type: ignore[assignment]
    return model


def frozen_spec(recipe: Recipe) -> CastSpec:
    """How `freeze` stores weights: the recipe's `weight` if FP8, with a scale of its own, else E4M3FN per tensor."""
    weight = recipe.weight
    if weight is None or weight.format.bits != 8 or not weight.format.has_nan or not weight.is_scaled:
        return CastSpec(E4M3FN)
    return dataclasses.replace(weight, scale=CURRENT if weight.is_delayed else weight.scale, rounding=NEAREST_EVEN)


def without_history(recipe: Recipe) -> Recipe:
    """The recipe with operands scaled by the tensor at hand where they have a history."""

    def current(value: Any) -> Any:
        is_delayed = isinstance(value, CastSpec) and value.is_delayed
        return dataclasses.replace(value, scale=CURRENT) if is_delayed else value

    layers = tuple((glob, tuple((field, current(value)) for field, value in own)) for glob, own in recipe.layers)
    return recipe.replace(layers=layers, **{role: current(getattr(recipe, role)) for role in OPERAND_ROLES})


def _multiplied_as(spec: CastSpec, model: nn.Module) -> Iterator[nn.Parameter]:
    """The weights that forward products cast by `spec`, and nothing else reads."""
    readers = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    for module in model.modules():
        if not isinstance(module, Linear) or not module.quantized or module.parted is not None:
            continue
        casts = module.training_casts
        if not casts.smooth and casts.spec(OUTPUT, "weight") == spec and readers[id(module.weight)] == 1:
            assert isinstance(module.weight, nn.Parameter)
            yield module.weight


def _store_frozen(model: nn.Module, weight: nn.Parameter, spec: CastSpec) -> None:
    held = weight.data
    if isinstance(held, QuantizedTensor) and held.spec.format.bits == 8:
        return
    # attributes and ties move along; hooks, which take gradients, do not
    replace(model, weight, nn.Parameter(quantize(held, spec), requires_grad=False))


_NOTE = "frozen:"


def _note(model: nn.Module) -> str:
    """How many parameters are stored in what, and in how many bytes."""
    parameters = list(model.parameters())
    stored = [p.data for p in parameters if isinstance(p.data, QuantizedTensor)]
    kinds = ", ".join(f"{n} as {spec.short}" for spec, n in Counter(q.spec for q in stored).items()) or "none"
    rest: Counter[torch.dtype] = Counter(p.dtype for p in parameters if not isinstance(p.data, QuantizedTensor))
    others = ", ".join(f"{n} stay {str(dtype).removeprefix('torch.')}" for dtype, n in rest.items()) or "no others"
    return (
        f"{_NOTE} {len(stored)} weights of {sum(q.numel() for q in stored):,} values in "
        f"{sum(q.nbytes for q in stored):,} bytes ({kinds}); {others}"
    )
