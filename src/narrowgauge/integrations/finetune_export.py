"""A fine-tuned model as a Hugging Face directory of its own."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from narrowgauge.errors import CheckpointError, ConfigError, ConversionError, closest
from narrowgauge.integrations.huggingface import WeightFormat, full_values
from narrowgauge.models.fp8_layout import to_fp8
from narrowgauge.train.folder import os_errors

# whose layers are named as Llama's, which is what readers of FP8 blocks go by
_FP8_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")


def export_directory(
    source: Path,
    directory: Path | str,
    weight_format: WeightFormat | str,
    *,
    is_reward: bool = False,
    replace: bool = False,
) -> Path:
    """Write the model of `source`, a checkpoint's directory, each weight rounded once; return the new directory.

    replace: what is in `directory` gives way. It appears whole or not at all.

    Raises ConfigError where the directory is not empty or the format unknown, ConversionError where the model does not
    go into FP8's blocks, CheckpointError where the disk refuses it.
    """
    known = [str(each) for each in WeightFormat]
    if weight_format not in known:
        raise ConfigError(f"format {weight_format!r}: expected {', '.join(known)}{closest(str(weight_format), known)}")
    directory = Path(directory)
    if not replace and directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory}: expected a new or empty directory, found something in it: choose another")
    kind = AutoModelForSequenceClassification if is_reward else AutoModelForCausalLM
    dtype = torch.bfloat16 if weight_format == WeightFormat.BF16 else torch.float32
    model = kind.from_pretrained(source, dtype=dtype)
    if weight_format == WeightFormat.FP8 and (is_reward or model.config.model_type not in _FP8_FAMILIES):
        raise ConversionError(
            f"a {model.config.model_type} {'reward model' if is_reward else 'model'} in FP8: expected a language model "
            f"of {', '.join(_FP8_FAMILIES)}: export it in bf16"
        )
    temporary = directory.with_name(f".writing-{directory.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with os_errors():
            temporary.mkdir(parents=True)
            _write(model, temporary, weight_format)
            AutoTokenizer.from_pretrained(source).save_pretrained(temporary)
            if directory.exists():
                shutil.rmtree(directory)
            temporary.rename(directory)
    except OSError as error:
        raise CheckpointError(
            f"{directory} was not written: {error.strerror}: make room, or choose another place"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return directory


def _write(model: Any, directory: Path, weight_format: WeightFormat | str) -> None:
    if weight_format != WeightFormat.FP8:
        model.save_pretrained(directory)
        return
    tied = ("lm_head.weight",) if model.config.tie_word_embeddings else ()
    weights = {name: value for name, value in full_values(model, None).items() if name not in tied}
    tensors, quantization = to_fp8(weights)
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    save_file({name: t.contiguous() for name, t in tensors.items()}, directory / "model.safetensors", {"format": "pt"})
    path = directory / "config.json"
    told = json.loads(path.read_text(encoding="utf-8")) | {"dtype": "bfloat16", "quantization_config": quantization}
    path.write_text(json.dumps(told, indent=2, sort_keys=True) + "\n", encoding="utf-8")
