"""Models of transformers as directories that transformers loads without this library."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from narrowgauge.errors import ConfigError, ConversionError, closest
from narrowgauge.integrations.huggingface import WeightFormat, full_values, new_directory
from narrowgauge.layers.delayed import DelayedState, state_names
from narrowgauge.layers.foreign import Experts
from narrowgauge.layers.kinds import Kind, class_of, kind_of
from narrowgauge.layers.linear import Linear
from narrowgauge.layers.recipe_layer import RecipeLayer
from narrowgauge.models.fp8_layout import layers_to_fp8

_DTYPES = {WeightFormat.BF16: torch.bfloat16, WeightFormat.FP32: torch.float32, WeightFormat.FP8: torch.bfloat16}
_INDEX = "model.safetensors.index.json"


def save_pretrained(
    model: nn.Module,
    directory: Path | str,
    optimizer: torch.optim.Optimizer | None = None,
    weight_format: WeightFormat | str = WeightFormat.BF16,
) -> Path:
    """Write a model of transformers, prepared or not, as `model.save_pretrained` would; returns the directory.

    The weights are the parameters' full values, each rounded once to `weight_format`; a tied one is stored once. FP8:
    weights of the linear layers that the recipe quantizes, or of all but the head where there is no recipe, are E4M3
    codes with a scale for each block of 128x128, as `models.fp8_layout` says; config.json names the layers that are
    not, and transformers' `from_pretrained` dequantizes on a CPU what it reads. No scaling state is in the files.

    optimizer: the one that holds the model's masters or residuals, if any; without it the parameters are taken as they
    are. The directory appears whole or not at all.

    Raises ConfigError for an unknown format, a model of another library, and where the directory is not empty;
    ConversionError for a model that has no layer for FP8's blocks; CheckpointError where the disk refuses it.
    """
    known = [str(each) for each in WeightFormat]
    if weight_format not in known:
        raise ConfigError(f"format {weight_format!r}: expected {', '.join(known)}{closest(str(weight_format), known)}")
    weight_format = WeightFormat(weight_format)
    inner = getattr(model, "_orig_mod", model)
    inner = inner.module if isinstance(inner, nn.parallel.DistributedDataParallel) else inner
    if not isinstance(inner, PreTrainedModel):
        raise ConfigError(
            f"expected a PreTrainedModel of transformers, found {type(inner).__name__}: save other models with "
            "narrowgauge.save"
        )
    with new_directory(directory) as temporary:
        values = plain_values(inner, optimizer)
        in_fp8, config = None, {}
        if weight_format == WeightFormat.FP8:
            tensors, config = layers_to_fp8(values, *fp8_layers(inner))
            in_fp8 = {name: t for name, t in tensors.items() if t.dtype is torch.float8_e4m3fn or "_scale_inv" in name}
        write_weights(inner, temporary, values, _DTYPES[weight_format])
        if in_fp8 is not None:
            _put_in(temporary, in_fp8)
            _add_to_config(temporary, {"quantization_config": config})
    return Path(directory)


def plain_values(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """`full_values` of the names that the model had before it was prepared: without scaling state."""
    ours = {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, layer in model.named_modules()
        if isinstance(layer, DelayedState)
        for name in state_names(layer)
    }
    return {name: value for name, value in full_values(model, optimizer).items() if name not in ours}


def write_weights(model: PreTrainedModel, directory: Path, values: dict[str, Tensor], dtype: torch.dtype) -> None:
    """transformers' own `save_pretrained` of these values, floating ones in `dtype`; ties stay ties."""
    cast: dict[int, Tensor] = {}
    state = {
        name: cast.setdefault(id(value), value.to(dtype) if value.is_floating_point() else value)
        for name, value in values.items()
    }
    before = model.config.dtype
    try:  # it empties what it is given
        model.save_pretrained(directory, state_dict=dict(state))
    finally:
        model.config.dtype = before
    name_dtype(directory, state)


def name_dtype(directory: Path, values: Mapping[str, Tensor]) -> None:
    """Let config.json name the dtype of the weights: transformers writes that of the parameters in training."""
    floating = next(value.dtype for value in values.values() if value.is_floating_point())
    _add_to_config(directory, {"dtype": str(floating).removeprefix("torch.")})


def fp8_layers(model: PreTrainedModel) -> tuple[list[list[str]], list[str]]:
    """(linear layers in groups that read the same tensor, modules that readers must not look for in FP8).

    Those of one parent with the same number of inputs are a group: vLLM joins q, k and v, and gate and up, to one.
    """
    fp32_names: Any = model._keep_in_fp32_modules or ()
    head: Any = model.get_output_embeddings()
    groups: dict[tuple[str, int], list[str]] = defaultdict(list)
    kept = []
    for name, module in model.named_modules():
        if isinstance(module, Experts) or name.endswith(".experts"):
            kept.append(name)  # transformers keeps them as matrices of other names in its files
        elif class_of(module) in (nn.Linear, Linear):
            stays = isinstance(module, RecipeLayer) and module.recipe is not None and not module.quantized
            stays = stays and module.recipe.quantizes_gemms  # type: ignore[union-attr]
            if stays or module is head or kind_of(module) is not Kind.LINEAR or set(name.split(".")) & set(fp32_names):
                kept.append(name)
            else:
                groups[name.rpartition(".")[0], module.in_features].append(name)  # type: ignore[arg-type]
    if not groups:
        raise ConversionError(
            f"{type(model).__name__} has no torch.nn.Linear beside its head, and transformers reads no other layer in "
            "FP8: save it in bf16"
        )
    return list(groups.values()), kept


def _put_in(directory: Path, in_fp8: dict[str, Tensor]) -> None:
    """Replace weights in the directory's safetensors by codes, and add the scales beside them."""
    placed: dict[str, str] = {}
    total = 0
    for file in sorted(directory.glob("*.safetensors")):
        tensors = load_file(file)
        for name in [name for name in tensors if name in in_fp8]:
            scale = f"{name}_scale_inv"
            tensors |= {name: in_fp8[name].contiguous(), scale: in_fp8[scale].contiguous()}
        save_file(tensors, file, metadata={"format": "pt"})
        placed |= dict.fromkeys(tensors, file.name)
        total += sum(t.nbytes for t in tensors.values())
    if missing := in_fp8.keys() - placed.keys():
        raise ConversionError(f"transformers saves '{min(missing)}' under another name: save the model in bf16")
    index = directory / _INDEX
    if index.is_file():
        told = json.loads(index.read_text(encoding="utf-8"))
        told["weight_map"], told["metadata"]["total_size"] = dict(sorted(placed.items())), total
        index.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def _add_to_config(directory: Path, entries: dict[str, Any]) -> None:
    config = directory / "config.json"
    told = json.loads(config.read_text(encoding="utf-8")) | entries
    config.write_text(json.dumps(told, indent=2, sort_keys=True) + "\n", encoding="utf-8")
