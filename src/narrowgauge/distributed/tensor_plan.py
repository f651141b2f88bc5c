"""Which layer is parted how: plans for our GPT, for models with the names of transformers' Llama, and given ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from narrowgauge.errors import ConversionError
from narrowgauge.models.attention import Attention
from narrowgauge.models.gpt import GPT
from narrowgauge.models.mlp import GELUMLP, MixtureOfExperts, SwiGLU
from narrowgauge.ops.experts import GroupedLinear

COLUMN, ROW, EMBEDDING, HEAD = "column", "row", "embedding", "head"  # what a given plan may say
POSITIONS = "positions"  # a table whose rows follow the sequence
PARTIAL = "partial"  # whole on every rank, used on a part of the heads or features: its gradient is summed
KINDS = (COLUMN, ROW, EMBEDDING, HEAD, PARTIAL)
EXPERTS = (
    "experts are not parted over tensor-parallel ranks: expert parallelism, which places whole experts, is left open; "
    "use tensor=1 with data and shard"
)

# modules of LlamaForCausalLM, of Qwen2 and 3, Mistral and others with their names
LLAMA = {
    "*embed_tokens": EMBEDDING,
    **dict.fromkeys(("*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj"), COLUMN),
    **dict.fromkeys(("*.o_proj", "*.down_proj"), ROW),
    **dict.fromkeys(("*.q_norm", "*.k_norm"), PARTIAL),
    "*lm_head": HEAD,
}


class Place(NamedTuple):
    """How a module is parted. sizes: of the sections of its features, as in `Sections`; empty: one section."""

    kind: str
    sizes: tuple[int, ...] = ()


def plan_of(model: nn.Module, given: Mapping[str, str] | None, ranks: int) -> dict[str, Place]:
    """By the name of a module, its place.

    Raises ConversionError for experts, for heads that do not divide, and for a model that there is no plan of.
    """
    for name, module in model.named_modules():
        if isinstance(module, (MixtureOfExperts, GroupedLinear)) or re.search(r"(^|\.)experts$", name):
            raise ConversionError(f"'{name}': {EXPERTS}")
    if given is not None:
        return _by_globs(model, given)
    if isinstance(model, GPT):
        return _of_gpt(model, ranks)
    if is_llama_like(model):
        _check_llama(model, ranks)
        return _by_globs(model, {glob: kind for glob, kind in LLAMA.items() if _matches(model, glob)})
    raise ConversionError(
        f"{type(model).__name__}: expected a GPT of narrowgauge or a model with the layer names of transformers' "
        f"Llama, Qwen or Mistral; give a plan of other models, e.g. {{'*.up': 'column', '*.down': 'row'}}"
    )


def is_llama_like(model: nn.Module) -> bool:
    """True where all that Llama's plan needs is there."""
    return all(_matches(model, glob) for glob in ("*embed_tokens", "*.q_proj", "*.o_proj", "*.down_proj"))


def check_divides(size: int, ranks: int, what: str, remedy: str) -> None:
    """Raise ConversionError where `size` is no multiple of `ranks`."""
    if size % ranks:
        raise ConversionError(f"{what}: {size} does not divide into {ranks} tensor-parallel ranks: {remedy}")


def _matches(model: nn.Module, glob: str) -> bool:
    return any(fnmatchcase(name, glob) for name, _ in model.named_modules())


def _by_globs(model: nn.Module, given: Mapping[str, str]) -> dict[str, Place]:
    for glob, kind in given.items():
        if kind not in KINDS:
            raise ConversionError(f"plan {{'{glob}': {kind!r}}}: expected one of {', '.join(map(repr, KINDS))}")
        if not _matches(model, glob):
            raise ConversionError(f"plan {{'{glob}': '{kind}'}}: no module of {type(model).__name__} has such a name")
    names = [name for name, _ in model.named_modules()]
    return {name: Place(kind) for glob, kind in given.items() for name in names if fnmatchcase(name, glob)}


def _of_gpt(model: GPT, ranks: int) -> dict[str, Place]:
    plan = {"embedding": Place(EMBEDDING), "positions": Place(POSITIONS), "lm_head": Place(COLUMN)}
    plan = {name: place for name, place in plan.items() if getattr(model, name, None) is not None}
    width = model.config.hidden_width
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            for kind, heads in (("heads", module.heads), ("kv_heads", module.kv_heads)):
                check_divides(heads, ranks, f"'{name}': {kind}", f"choose a tensor size that divides {heads}")
            sizes = tuple(heads * module.head_width for heads in (module.heads, module.kv_heads, module.kv_heads))
            plan |= {f"{name}.qkv": Place(COLUMN, sizes), f"{name}.out": Place(ROW)}
        elif isinstance(module, SwiGLU):
            plan |= {f"{name}.gate_up": Place(COLUMN, (width, width)), f"{name}.down": Place(ROW)}
        elif isinstance(module, GELUMLP):
            plan |= {f"{name}.up": Place(COLUMN), f"{name}.down": Place(ROW)}
    return plan


def _check_llama(model: Any, ranks: int) -> None:
    config = getattr(model, "config", None)
    for field, layer in (("num_attention_heads", "q_proj"), ("num_key_value_heads", "k_proj")):
        heads = getattr(config, field, None)
        if heads is not None:
            name = next((name for name, _ in model.named_modules() if name.endswith(f".{layer}")), layer)
            check_divides(heads, ranks, f"'{name}': {field}", f"choose a tensor size that divides {heads}")
