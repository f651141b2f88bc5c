"""A fine-tuned model as a Hugging Face directory of its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.integrations.huggingface import WeightFormat
from narrowgauge.integrations.pretrained import save_pretrained


def export_directory(
    source: Path,
    directory: Path | str,
    weight_format: WeightFormat | str,
    *,
    is_reward: bool = False,
    replace: bool = False,
) -> Path:
    """Write the model of `source`, a checkpoint's directory, and its tokenizer; return the new directory.

    weight_format: each weight is rounded once to it, see `pretrained.save_pretrained`. replace: what is in `directory`
    gives way. It appears whole or not at all.

    Raises ConfigError where the directory is not empty or the format unknown, ConversionError where the model does not
    go into FP8's blocks, CheckpointError where the disk refuses it.
    """
    directory = Path(directory)
    if not replace and directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory}: expected a new or empty directory, found something in it: choose another")
    kind = AutoModelForSequenceClassification if is_reward else AutoModelForCausalLM
    model = kind.from_pretrained(source, dtype=torch.float32)
    temporary = directory.with_name(f".writing-{directory.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        save_pretrained(model, temporary, weight_format=weight_format)
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
