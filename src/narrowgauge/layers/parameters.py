"""How the parameters of a model are stored: the recipe's `param` role."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from narrowgauge.layers.kinds import Kind, kind_of
from narrowgauge.numerics.formats import BF16, FP32
from narrowgauge.recipes.spec import CastSpec, Recipe
from narrowgauge.tensors.quantized import quantize

HALF = (torch.float16, torch.bfloat16)


@dataclass
class Stored:
    """What `store` did. replaced: (old, new) parameter objects. warnings: what the user should know."""

    replaced: list[tuple[nn.Parameter, nn.Parameter]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def store(model: nn.Module, recipe: Recipe) -> Stored:
    """Bring the trainable parameters of `model` into the recipe's `param` format, in place; frozen ones stay.

    float32: parameters in 16 bits become float32 masters. bfloat16: all become bfloat16. A scaled format: weights of
    linear layers, and of embeddings where the recipe says so, become QuantizedTensor parameters, tied ones one; all
    others float32.
    """
    stored = Stored()
    if recipe.param.format is BF16:
        _cast(model, torch.bfloat16, (torch.float32, torch.float16))
        for p in model.parameters():
            if p.requires_grad and p.dtype is torch.bfloat16:
                p.grad_dtype = recipe.grad.format.dtype
        if not recipe.param.is_stochastic:
            stored.warnings.append(
                f"recipe '{recipe.name}' stores parameters in bfloat16 without a master copy: updates below half a "
                "unit in the last place are lost, and training may stall; use param=CastSpec(BF16, "
                "rounding=STOCHASTIC), or CastSpec(FP32) for float32 masters"
            )
        return stored
    made = _cast(model, torch.float32, HALF)
    if made:
        kind = " and ".join(sorted({str(dtype).removeprefix("torch.") for _, dtype in made}))
        stored.warnings.append(
            f"{len(made)} trainable parameters were {kind} (the first: '{made[0][0]}'): recipe '{recipe.name}' trains "
            "float32 parameters, so they were made float32 masters in place; load the model in float32 to keep the "
            "digits that 16 bits have lost"
        )
    if recipe.param != CastSpec(FP32):
        stored.replaced = _quantize(model, recipe)
    return stored


def _cast(model: nn.Module, dtype: torch.dtype, from_dtypes: tuple[torch.dtype, ...]) -> list[tuple[str, torch.dtype]]:
    """Cast trainable parameters, with their gradients, in place. Returns the names and former dtypes of those cast."""
    cast = []
    for name, p in model.named_parameters():
        if p.requires_grad and p.dtype in from_dtypes:
            cast.append((name, p.dtype))
            grad, p.grad = p.grad, None
            p.data = p.data.to(dtype)
            if p.grad_dtype is not dtype:  # an earlier recipe had set it
                p.grad_dtype = dtype
            p.grad = None if grad is None else grad.to(dtype)
    return cast


def _quantize(model: nn.Module, recipe: Recipe) -> list[tuple[nn.Parameter, nn.Parameter]]:
    new: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    kept: set[int] = set()  # a weight that is tied to a kept embedding table is the table
    for module in model.modules():
        weight = module._parameters.get("weight")
        if isinstance(module, nn.Embedding) and weight is not None and (module.sparse or not recipe.embeddings):
            kept.add(id(weight))
    for module in model.modules():
        weight = module._parameters.get("weight")
        takes_part = kind_of(module) is Kind.LINEAR or isinstance(module, nn.Embedding)
        if not takes_part or weight is None or not weight.requires_grad or id(weight) in (kept | new.keys()):
            continue
        if type(weight) is nn.Parameter:
            new[id(weight)] = (weight, _quantized(weight, recipe.param))
    for module in model.modules():
        for name, p in module._parameters.items():
            if id(p) in new:
                module._parameters[name] = new[id(p)][1]
    return list(new.values())


def _quantized(old: nn.Parameter, spec: CastSpec) -> nn.Parameter:
    """A parameter of quantized storage with the attributes, gradient and hooks of `old`."""
    new = nn.Parameter(quantize(old.detach(), spec))
    attributes = {name: value for name, value in old.__dict__.items() if not hasattr(type(old), name)}
    vars(new).update(attributes)
    new.grad = old.grad
    hooks: list[tuple[str, str]] = [
        ("_backward_hooks", "register_hook"),
        ("_post_accumulate_grad_hooks", "register_post_accumulate_grad_hook"),
    ]
    for held, register in hooks:
        for hook in (getattr(old, held, None) or {}).values():
            getattr(new, register)(hook)
    return new
