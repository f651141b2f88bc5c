"""Writes a GPT as a directory that transformers' `AutoModelForCausalLM` loads. Needs no transformers itself."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from narrowgauge.data.tokenizer import END_OF_TEXT, Tokenizer
from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.models.gpt import GPT
from narrowgauge.models.llama_layout import check_llama, to_llama
from narrowgauge.tensors.quantized import QuantizedTensor
from narrowgauge.train.folder import os_errors


def export_llama(model: GPT, tokenizer: Tokenizer, directory: Path | str) -> Path:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files; return the directory.

    Weights are written in float32, so a plain float32 model gives the same logits. The directory appears whole or not
    at all. Raises ConversionError for a model that Llama's layout cannot express, ConfigError where the directory is
    there already and not empty, CheckpointError where the disk refuses it.
    """
    check_llama(model.config)
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory}: expected a new or empty directory, found something in it: choose another")
    state = {name: _plain(value) for name, value in model.state_dict().items()}
    config, weights = to_llama(model.config, state)
    config |= {"dtype": "float32", "torch_dtype": "float32"}  # transformers 5, transformers 4
    config |= {"bos_token_id": None, "eos_token_id": tokenizer.end_id, "pad_token_id": None}
    temporary = directory.with_name(f".writing-{directory.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with os_errors():
            temporary.mkdir(parents=True)
            contiguous = {name: weight.contiguous() for name, weight in weights.items()}
            save_file(contiguous, temporary / "model.safetensors", metadata={"format": "pt"})
            tokenizer.save(temporary / "tokenizer.json")
            _write_json(temporary / "config.json", config)
            _write_json(temporary / "generation_config.json", {"eos_token_id": tokenizer.end_id, "do_sample": True})
            _write_json(temporary / "tokenizer_config.json", _tokenizer_config(model))
        if directory.exists():
            directory.rmdir()  # empty, as was checked
        temporary.rename(directory)
    except OSError as error:
        raise CheckpointError(
            f"{directory} was not written: {error.strerror}: make room, or choose another place"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return directory


def _plain(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    if isinstance(value, QuantizedTensor):
        value = value.dequantize()
    return value.to("cpu", torch.float32)


def _tokenizer_config(model: GPT) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "model_max_length": model.config.context,
        "clean_up_tokenization_spaces": False,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
