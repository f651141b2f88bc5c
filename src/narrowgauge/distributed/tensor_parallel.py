"""Tensor and sequence parallelism: each rank has a part of every layer's heads, features and vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge.distributed import tensor_group, tensor_plan
from narrowgauge.distributed.layout import Layout, attach, check_unprepared
from narrowgauge.distributed.parallel_layers import Column, Head, PartedLinear, PartedParameters, Row
from narrowgauge.distributed.partial_gradients import SummedParameters
from narrowgauge.distributed.sections import Sections
from narrowgauge.distributed.tensor_group import TensorGroup
from narrowgauge.distributed.tensor_plan import Place, check_divides
from narrowgauge.distributed.vocabulary import SequencePositions, VocabularyEmbedding, VocabularyLoss, gather_logits
from narrowgauge.errors import ConversionError, DataError
from narrowgauge.layers import sharing
from narrowgauge.layers.embedding import Embedding
from narrowgauge.layers.linear import Linear
from narrowgauge.models.attention import Attention
from narrowgauge.models.gpt import GPT, IGNORED
from narrowgauge.recipes.spec import Recipe
from narrowgauge.tensors.local import is_distributed, local

_LINEARS: dict[str, type[PartedLinear]] = {
    tensor_plan.COLUMN: Column, tensor_plan.ROW: Row, tensor_plan.HEAD: Head,
}  # fmt: skip
_UNEVEN = (tensor_plan.EMBEDDING, tensor_plan.HEAD)


def parallelize_tensor(
    model: nn.Module, layout: Layout, plan: Mapping[str, str] | None = None, *, sequence: bool = False
) -> nn.Module:
    """Part the layers of `model` over the "tensor" ranks of `layout`, in place; returns the model.

    Call it before `shard`, `data_parallel`, the optimizer and `prepare`, with the same weights on all ranks, or on the
    meta device. Weights become DTensors: of a column-parallel layer by output features, of a row-parallel one by input
    features, of embedding and head by the vocabulary, which need not divide. State-dict keys stay; `sections` says
    which part of the whole each rank has, and `whole_parameter` gathers it. Ranks of one tensor-parallel group read the
    same sequences.

    plan: by glob of module names, "column", "row", "embedding", "head" (column, its outputs gathered), or "partial" (a
    module whose parameters all ranks have, and use on their own features). None: that of our GPT, or of models with the
    layer names of transformers' Llama, Qwen and Mistral.

    sequence: between the layers, training parts the sequences over the ranks, too. What the recipe casts to 8 bits is
    gathered in those codes; sums go by the recipe's `activation_comm`. Sequences must be a multiple of the ranks. A GPT
    takes and gives what it does on one process; a model by a plan without an embedding takes and gives parts of
    sequences [..., T / ranks, features]. In evaluation, a GPT parts the sequences that divide.

    A GPT's forward(ids, targets) returns this rank's part of the logits [B, T, part of the vocabulary] beside the loss;
    forward(ids) returns all of them, on every rank. An embedding and a head that are tied stay so.

    Raises ConversionError for heads or features that do not divide, for what cannot be parted, and for a model that is
    prepared already.
    """
    check_unprepared(model, "parallelize_tensor")
    ranks = layout.size("tensor")
    attach(model, layout)
    if ranks == 1:
        return model
    if tensor_group.group_of(model) is not None:
        raise ConversionError("the model's layers are parted already: call parallelize_tensor once")
    places = tensor_plan.plan_of(model, plan, ranks)
    if sequence and plan is None and not isinstance(model, GPT):
        raise ConversionError(
            f"{type(model).__name__}: sequence=True is not possible, as attention layers of transformers read whole "
            "sequences; leave it out"
        )
    modules = dict(model.named_modules())
    sections = {name: _sections(name, modules[name], place, ranks) for name, place in places.items()}
    group = TensorGroup(layout, sequence)
    known: dict[int, nn.Parameter] = {}
    for name, place in places.items():
        _part(modules[name], place, sections[name], group, known)
    _share_inputs(model)
    _sum_partial(model, group)
    tensor_group.attach(model, group)
    if isinstance(model, GPT):
        _take_over_gpt(model, group)
    else:
        model.register_forward_pre_hook(lambda module, args: group.begin(module, active=True), prepend=True)
    return model


def take_up(model: nn.Module, recipe: Recipe) -> None:
    """Let a parallelized model communicate by a resolved recipe; others are left alone: for `prepare`."""
    group = tensor_group.group_of(model)
    if group is not None:
        group.take_up(recipe)


def sections(model: nn.Module) -> dict[str, Sections]:
    """By the names of `model.named_parameters()`, tied ones under each: which part of the whole a rank has."""
    return {
        f"{name}.{key}" if name else key: found
        for name, module in model.named_modules()
        if isinstance(parted := getattr(module, "parted", None), PartedParameters)
        for key, found in parted.sections.items()
        if module._parameters.get(key) is not None
    }


def whole_parameter(model: nn.Module, name: str) -> Tensor:
    """The values of a parameter of all tensor-parallel ranks, in the order of the whole: on all of them, which call it.

    Plain, in the dtype that the parts stand for.
    """
    return _whole(model, name, model.get_parameter(name))


def whole_gradient(model: nn.Module, name: str) -> Tensor | None:
    """The gradient of a parameter, likewise; None where there is none."""
    grad = model.get_parameter(name).grad
    return None if grad is None else _whole(model, name, grad)


def _whole(model: nn.Module, name: str, value: Tensor) -> Tensor:
    held = local(value).detach()
    held = held.dequantize() if hasattr(held, "dequantize") and type(held) is not Tensor else held
    group, found = tensor_group.group_of(model), sections(model).get(name)
    if group is None or found is None:
        return held.clone()
    shapes = [list(held.shape) for _ in range(group.ranks)]
    for rank, shape in enumerate(shapes):
        shape[found.dim] = sum(end - begin for begin, end in found.ranges(rank))
    parts = [held.new_empty(shape) for shape in shapes]
    for rank, part in enumerate(parts):
        if rank == group.rank:
            part.copy_(held)
        dist.broadcast(part, group=group.group, group_src=rank)
    return found.join(parts)


def _sections(name: str, module: nn.Module, place: Place, ranks: int) -> dict[str, Sections]:
    """The parts of a module's parameters, once it is clear that they can be made."""
    if place.kind == tensor_plan.PARTIAL or place.kind == tensor_plan.POSITIONS:
        return {}
    if place.kind == tensor_plan.EMBEDDING:
        if type(module) not in (nn.Embedding, Embedding) or _is_unusual(module):  # type: ignore[arg-type]
            raise ConversionError(
                f"'{name}': expected a torch.nn.Embedding without max_norm, scale_grad_by_freq and sparse, found "
                f"{module}: leave it out of the plan"
            )
        return {"weight": Sections(0, (module.num_embeddings,), ranks)}  # type: ignore[arg-type]
    if type(module) not in (nn.Linear, Linear):
        raise ConversionError(f"'{name}': expected a torch.nn.Linear, found {type(module).__name__}: leave it out")
    dims = _LINEARS[place.kind].dims
    weight: Any = module.weight
    if is_distributed(weight):
        raise ConversionError(f"'{name}': its weight is a DTensor already: part the layers before they are sharded")
    features = (module.out_features, module.in_features)[dims["weight"]]
    sizes: tuple[int, ...] = place.sizes or (features,)  # type: ignore[assignment]
    if place.kind not in _UNEVEN and name != "lm_head":
        kind = ("out_features", "in_features")[dims["weight"]]
        for size in sizes:
            check_divides(size, ranks, f"'{name}': {kind}", "choose sizes that divide, or a smaller tensor size")
    return {key: Sections(dim, sizes, ranks) for key, dim in dims.items() if module._parameters.get(key) is not None}


def _is_unusual(table: nn.Embedding) -> bool:
    return table.max_norm is not None or table.scale_grad_by_freq or table.sparse


def _part(
    module: nn.Module, place: Place, sections: dict[str, Sections], group: TensorGroup, known: dict[int, nn.Parameter]
) -> None:
    """Part one module. known: by the identity of a whole parameter, what has become of it."""
    if place.kind == tensor_plan.PARTIAL:
        SummedParameters(group.sums, lambda: True).install(module)
        return
    for key, each in sections.items():
        p: Any = module._parameters[key]
        if id(p) not in known:
            known[id(p)] = _distributed(p, each, group)
            known[id(known[id(p)])] = known[id(p)]
        module._parameters[key] = known[id(p)]
    if place.kind in _LINEARS:
        module.__class__ = Linear
        module.parted = _LINEARS[place.kind](group, sections)  # type: ignore[assignment]
        return
    module.__class__ = Embedding
    positions = place.kind == tensor_plan.POSITIONS
    module.parted = (SequencePositions if positions else VocabularyEmbedding)(group, sections)  # type: ignore[assignment]


def _distributed(p: nn.Parameter, sections: Sections, group: TensorGroup) -> nn.Parameter:
    from torch.distributed.tensor import DTensor, Shard  # who has no such tensors need not wait for its import

    own = sections.take(p.detach(), group.rank)
    whole = DTensor.from_local(
        own,
        group.layout.mesh["tensor"],
        [Shard(sections.dim)],
        run_check=False,
        shape=p.shape,
        stride=torch.empty(p.shape, device="meta").stride(),
    )
    return nn.Parameter(whole, requires_grad=p.requires_grad)


def _share_inputs(model: nn.Module) -> None:
    """Let column-parallel siblings, such as q, k and v, sum the gradients of what they read together."""
    for parent in model.modules():
        columns = [child for child in parent.children() if isinstance(getattr(child, "parted", None), Column)]
        if len(columns) > 1 and not isinstance(parent, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            sharing.install(parent)


def _sum_partial(model: nn.Module, group: TensorGroup) -> None:
    """In sequence-parallel training, sum the gradients of all parameters that are not parted."""
    if not group.sequence:
        return
    for module in model.modules():
        if module._parameters and getattr(module, "parted", None) is None:
            SummedParameters(group.sums, lambda: group.parts_sequences).install(module)


def _take_over_gpt(model: GPT, group: TensorGroup) -> None:
    for module in model.modules():
        if isinstance(module, Attention):
            module.heads //= group.ranks
            module.kv_heads //= group.ranks
    model.loss = VocabularyLoss(group, model.config.vocab_size, IGNORED)  # type: ignore[method-assign]

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids: Tensor | None = args[0] if args else kwargs.get("ids")
        if ids is None:
            return  # the call fails by itself
        tokens = kwargs.get("tokens") or ids.shape[-1]
        divides = kwargs.get("cache") is None and tokens % group.ranks == 0
        if group.sequence and module.training and not divides:
            raise DataError(
                f"sequence parallel: expected sequences of a multiple of {group.ranks} tokens in training, found "
                f"{tokens}: change the sequence length, or leave sequence parallelism out"
            )
        group.begin(module, active=divides)

    def end(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, tuple) or output[1] is not None:
            return None
        return gather_logits(output[0], model.config.vocab_size, group), None

    model.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
    model.register_forward_hook(end)
