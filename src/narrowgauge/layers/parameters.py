"""How the parameters of a model are stored: the recipe's `param` role."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from narrowgauge.errors import ConversionError
from narrowgauge.layers.foreign import weight_names
from narrowgauge.layers.kinds import Kind, kind_of
from narrowgauge.numerics.formats import BF16, FP32
from narrowgauge.recipes.spec import CastSpec, Recipe
from narrowgauge.tensors.cast import FLOATING, HALF
from narrowgauge.tensors.local import as_part_of, is_distributed, local
from narrowgauge.tensors.quantized import QuantizedTensor, quantize

# all digits of a parameter, as a float32 tensor of its shape; of a DTensor, those of the part that is here
FullValues = Callable[[nn.Parameter], Tensor]
# (the parameter as it was, as it is now, all of its digits as above)
OnStored = Callable[[nn.Parameter, nn.Parameter, Tensor], None]


@dataclass
class Stored:
    """What `store` did. replaced: (old, new) parameter objects. warnings: what the user should know."""

    replaced: list[tuple[nn.Parameter, nn.Parameter]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def store(
    model: nn.Module,
    recipe: Recipe,
    *,
    full_values: FullValues | None = None,
    held: Container[nn.Parameter] | None = None,
    on_stored: OnStored | None = None,
) -> Stored:
    """Bring the trainable parameters of `model` into the recipe's `param` format; frozen ones stay as they are.

    float32: parameters in 16 bits become float32 masters. bfloat16: all become bfloat16. A scaled format: weights of
    linear layers, and of embeddings where the recipe says so, become QuantizedTensor parameters, tied ones one; all
    others float32. A parameter object is replaced only where it becomes, or was, a QuantizedTensor of another spec, or
    is a DTensor of another dtype: the new one has its name, attributes, hooks and gradient. Of a DTensor the local part
    is stored so, as a tensor with scales of its own.

    full_values: reads all digits of a parameter, where a master completes it; left out, they are its own. held: the
    parameters whose masters it knows; None: all. on_stored: told of each parameter whose storage changed, one after the
    other, as soon as it has: the digits that the new storage has lost are in its last argument, and nowhere else
    afterwards.

    Raises ConversionError, before anything changes, for a parameter whose size is not known yet, and for one of at most
    8 bits that shall be stored otherwise while no `full_values` tell what its codes have lost.
    """
    _check(model, recipe, () if full_values is None else held)
    stored = Stored()
    quantized = set() if _is_plain(recipe.param) else {id(p) for p in quantized_by(model, recipe)}
    from_half: list[tuple[str, torch.dtype]] = []
    for name, p in list(model.named_parameters()):
        if not p.requires_grad or p.dtype not in FLOATING or is_lazy(p):
            continue
        if recipe.param.format is not BF16 and p.dtype in HALF and full_values is None:
            from_half.append((name, p.dtype))
        if id(p) in quantized:
            new = _as_quantized(model, p, recipe.param, full_values, on_stored)
        else:
            new = _as_plain(model, p, recipe, full_values, on_stored)
        if new is not p:
            stored.replaced.append((p, new))
    stored.warnings += _warnings(recipe, from_half)
    return stored


def quantized_by(model: nn.Module, recipe: Recipe) -> Iterator[nn.Parameter]:
    """The weights that take part where a recipe stores weights in a scaled format, each once.

    Those of linear layers, and of embeddings where the recipe says so. A weight that is tied to a table that does not
    take part is the table. Weights of a class of their own do not; DTensors do.
    """
    modules = list(model.modules())
    tables = [module for module in modules if isinstance(module, nn.Embedding)]
    seen = {id(table.weight) for table in tables if table.sparse or not recipe.embeddings}
    named = ((module, module._parameters.get(name)) for module in modules for name in weight_names(module))
    for module, weight in named:
        takes_part = kind_of(module) is Kind.LINEAR or isinstance(module, nn.Embedding)
        if weight is None or not takes_part or id(weight) in seen or weight.dtype not in FLOATING:
            continue
        if type(weight) is nn.Parameter or isinstance(weight, QuantizedTensor) or is_distributed(weight):
            seen.add(id(weight))
            yield weight


def replace(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put `new` wherever a module of `model` has `old`, with its attributes."""
    own = {name: value for name, value in vars(old).items() if name not in _PARTS and not hasattr(type(old), name)}
    vars(new).update(own)
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is old:
                module._parameters[name] = new


_PARTS = ("codes", "dequant_scale", "amax", "spec", "_whole", "_is_param")  # a QuantizedTensor's own


def _is_plain(spec: CastSpec) -> bool:
    return spec == CastSpec(FP32) or spec.format is BF16


def _check(model: nn.Module, recipe: Recipe, held: Container[nn.Parameter] | None) -> None:
    for name, p in model.named_parameters():
        if is_lazy(p):
            if recipe.param != CastSpec(FP32):
                raise ConversionError(
                    f"parameter '{name}' has no size yet, and recipe '{recipe.name}' stores parameters as "
                    f"({recipe.param}): run one forward pass first"
                )
        elif p.requires_grad and isinstance(q := local(p), QuantizedTensor) and held is not None and p not in held:
            if q.spec != recipe.param and q.spec.format.is_narrow:
                raise ConversionError(
                    f"parameter '{name}' is stored as ({q.spec}), and recipe '{recipe.name}' stores "
                    f"({recipe.param}): what its {q.spec.format.bits} bits have lost is in the optimizer that it "
                    "was trained by, so pass that one; or build the model anew and load its weights, then prepare it"
                )


def _as_plain(
    model: nn.Module, p: nn.Parameter, recipe: Recipe, full_values: FullValues | None, on_stored: OnStored | None
) -> nn.Parameter:
    """`p` in the recipe's plain dtype, with a gradient in the dtype that belongs to it."""
    in_bf16 = recipe.param.format is BF16
    dtype = torch.bfloat16 if in_bf16 else torch.float64 if p.dtype is torch.float64 else torch.float32
    grad_dtype = recipe.grad.format.dtype if in_bf16 and recipe.grad in (CastSpec(BF16), CastSpec(FP32)) else None
    grad_dtype = grad_dtype or (torch.float32 if in_bf16 else dtype)
    grad, p.grad = p.grad, None
    new = p
    is_quantized = isinstance(local(p), QuantizedTensor)
    if p.dtype is not dtype or is_quantized:
        source = _source(p, full_values)
        if is_quantized or is_distributed(p):
            new = nn.Parameter(as_part_of(p, source.to(dtype, copy=True)))
            replace(model, p, new)
            _move_hooks(p, new)
        else:
            p.data = source.to(dtype)
        if on_stored is not None:
            on_stored(p, new, source)
    if new.grad_dtype is not grad_dtype:
        new.grad_dtype = grad_dtype
    new.grad = None if grad is None else _gradient(grad, recipe, grad_dtype)
    return new


def _as_quantized(
    model: nn.Module, p: nn.Parameter, spec: CastSpec, full_values: FullValues | None, on_stored: OnStored | None
) -> nn.Parameter:
    """`p` as a QuantizedTensor of `spec`, which stands for float32, with its gradient and hooks."""
    grad, p.grad = p.grad, None
    new = p
    stored = local(p)
    if isinstance(stored, QuantizedTensor) and stored.spec == spec:
        if p.dtype is not torch.float32:
            p.data = p.data.to(torch.float32)
    else:
        source = _source(p, full_values)
        new = nn.Parameter(as_part_of(p, quantize(source, spec)))
        replace(model, p, new)
        _move_hooks(p, new)
        if on_stored is not None:
            on_stored(p, new, source)
    new.grad = None if grad is None else grad.to(torch.float32)
    return new


def _source(p: nn.Parameter, full_values: FullValues | None) -> Tensor:
    """All digits of a parameter: float32, maybe its own memory."""
    if full_values is not None:
        return local(full_values(p)).detach().float()
    values = local(p).detach()
    return values.dequantize(torch.float32) if isinstance(values, QuantizedTensor) else values.float()


def _gradient(grad: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """A gradient that was there before, wide where the recipe keeps gradients so."""
    held = local(grad)
    if isinstance(held, QuantizedTensor) and not recipe.grad.is_scaled:
        return as_part_of(grad, held.dequantize(dtype))
    return grad.to(dtype)


def _move_hooks(old: nn.Parameter, new: nn.Parameter) -> None:
    hooks: list[tuple[str, str]] = [
        ("_backward_hooks", "register_hook"),
        ("_post_accumulate_grad_hooks", "register_post_accumulate_grad_hook"),
    ]
    for held, register in hooks:
        for hook in (getattr(old, held, None) or {}).values():
            getattr(new, register)(hook)


def _warnings(recipe: Recipe, from_half: list[tuple[str, torch.dtype]]) -> list[str]:
    if recipe.param == CastSpec(BF16) and recipe.master is None:
        return [
            f"recipe '{recipe.name}' stores parameters in bfloat16 without a master copy: updates below half a "
            "unit in the last place are lost, and training may stall; use param=CastSpec(BF16, "
            "rounding=STOCHASTIC), CastSpec(FP32) for float32 masters, or master=CastSpec(INT8, scale=ULP)"
        ]
    if not from_half:
        return []
    kind = " and ".join(sorted({str(dtype).removeprefix("torch.") for _, dtype in from_half}))
    return [
        f"{len(from_half)} trainable parameters were {kind} (the first: '{from_half[0][0]}'): recipe '{recipe.name}' "
        "trains float32 parameters, so they were made float32 masters in place; load the model in float32 to keep the "
        "digits that 16 bits have lost"
    ]
