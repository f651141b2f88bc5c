"""A fine-tuned model as a Hugging Face directory of its own."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from narrowgauge.integrations.huggingface import WeightFormat, new_directory
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
    with new_directory(directory, replace=replace) as temporary:
        kind = AutoModelForSequenceClassification if is_reward else AutoModelForCausalLM
        model = kind.from_pretrained(source, dtype=torch.float32)
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = True  # transformers' Trainer turned it off, for training alone
        save_pretrained(model, temporary, weight_format=weight_format)
        AutoTokenizer.from_pretrained(source).save_pretrained(temporary)
    return Path(directory)
