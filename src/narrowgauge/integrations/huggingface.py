"""Writes a GPT as a directory that transformers' `AutoModelForCausalLM` loads. Needs no transformers itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from narrowgauge.data.tokenizer import END_OF_TEXT, Tokenizer
from narrowgauge.errors import CheckpointError, ConfigError, closest
from narrowgauge.models.fp8_layout import to_fp8
from narrowgauge.models.gpt import GPT
from narrowgauge.models.llama_layout import check_llama, to_llama
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.optim.replace import current
from narrowgauge.tensors.local import is_distributed, local
from narrowgauge.tensors.quantized import QuantizedTensor
from narrowgauge.train.folder import make_temporary, os_errors


class WeightFormat(StrEnum):
    """How exported weights are stored. FP8: see `models.fp8_layout`."""

    BF16 = "bf16"
    FP32 = "fp32"
    FP8 = "fp8"


def export_llama(
    model: GPT,
    tokenizer: Tokenizer,
    directory: Path | str,
    weight_format: WeightFormat | str = WeightFormat.BF16,
    optimizer: torch.optim.Optimizer | None = None,
) -> Path:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files; return the directory.

    The weights are the parameters' full values, each rounded once; the files need nothing of this library. optimizer:
    the one that holds the model's masters or residuals, if any; without it the parameters are taken as they are. The
    directory appears whole or not at all.

    Raises ConversionError for a model that Llama's layout or FP8's blocks cannot express, ConfigError for an unknown
    format and where the directory is there already and not empty, CheckpointError where the disk refuses it.
    """
    if weight_format not in list(WeightFormat):
        known = [str(each) for each in WeightFormat]
        raise ConfigError(f"format {weight_format!r}: expected {', '.join(known)}{closest(str(weight_format), known)}")
    check_llama(model.config)
    with new_directory(directory) as temporary:
        config, weights = to_llama(model.config, full_values(model, optimizer))
        if weight_format == WeightFormat.FP8:
            weights, config["quantization_config"] = to_fp8(weights)
        elif weight_format == WeightFormat.BF16:
            weights = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
        dtype = "float32" if weight_format == WeightFormat.FP32 else "bfloat16"
        config |= {"dtype": dtype, "torch_dtype": dtype}  # transformers 5, transformers 4
        config |= {"bos_token_id": None, "eos_token_id": tokenizer.end_id, "pad_token_id": None}
        contiguous = {name: weight.contiguous() for name, weight in weights.items()}
        save_file(contiguous, temporary / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save(temporary / "tokenizer.json")
        _write_json(temporary / "config.json", config)
        _write_json(temporary / "generation_config.json", {"eos_token_id": tokenizer.end_id, "do_sample": True})
        _write_json(temporary / "tokenizer_config.json", _tokenizer_config(model))
    return Path(directory)


@contextmanager
def new_directory(directory: Path | str, *, replace: bool = False) -> Iterator[Path]:
    """Yield a directory to fill, which becomes `directory` on leaving without an error: whole, or not at all.

    replace: what is in `directory` gives way then. Raises ConfigError where it is not empty, CheckpointError where the
    disk refuses it.
    """
    directory = Path(directory)
    if not replace and directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory}: expected a new or empty directory, found something in it: choose another")
    temporary: Path | None = None
    try:
        with os_errors():
            temporary = make_temporary(directory)
            yield temporary
            if directory.exists():
                shutil.rmtree(directory)
            temporary.rename(directory)
    except OSError as error:
        raise CheckpointError(
            f"{directory} was not written: {error.strerror}: make room, or choose another place"
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def full_values(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """The state dict on the CPU, parameters with all digits that the optimizer holds; floating values in float32.

    Tied parameters are one tensor. Of a sharded model whole tensors, on every process: all of them call it.
    """
    state = {name: _plain(value) for name, value in model.state_dict().items()}
    optimizer = current(optimizer)
    full = optimizer.full_values if isinstance(optimizer, LowPrecisionOptimizer) else _plain
    held = set(optimizer.parameters()) if isinstance(optimizer, LowPrecisionOptimizer) else set()
    found: dict[nn.Parameter, Tensor] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if p not in found:
            found[p] = _plain(full(p)) if p in held else _plain(p)
        state[name] = found[p]
    return state


def _plain(value: Tensor) -> Tensor:
    value = value.detach()
    if is_distributed(value):
        value = _gathered(value)
    if isinstance(value, QuantizedTensor):
        value = value.dequantize()
    return value.to("cpu", torch.float32) if value.is_floating_point() else value.cpu()


def _gathered(value: Any) -> Tensor:
    """The whole of a DTensor, its codes decoded before they travel."""
    part = local(value)
    if isinstance(part, QuantizedTensor):
        shape = {"shape": value.shape, "stride": value.stride()}  # parts may differ in size
        value = type(value).from_local(part.dequantize(), value.device_mesh, value.placements, run_check=False, **shape)
    return value.full_tensor()


def _tokenizer_config(model: GPT) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "model_max_length": model.config.context,
        "clean_up_tokenization_spaces": False,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
