"""A tokenizer of single characters, tiny Llamas, and data for TRL's trainers; nothing is downloaded."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from narrowgauge.tensors.quantized import QuantizedTensor

SPECIAL = ("<|pad|>", "<|end|>", "<|unk|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


def tokenizer(**changes: Any) -> PreTrainedTokenizerFast:
    """Printable ASCII, a character a token, and a chat template."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *string.printable[:-5]))}
    inner = Tokenizer(models.BPE(vocabulary, [], unk_token="<|unk|>"))
    inner.decoder = decoders.Fuse()
    known = {"pad_token": "<|pad|>", "eos_token": "<|end|>", "unk_token": "<|unk|>"} | changes
    made = PreTrainedTokenizerFast(tokenizer_object=inner, **known)
    made.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    made.chat_template = CHAT_TEMPLATE
    return made


def config(**changes: Any) -> LlamaConfig:
    values = {"vocab_size": 104, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    return LlamaConfig(**(values | SHAPE | changes))


def llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(config(**changes))


def scorer(seed: int = 0, **changes: Any) -> LlamaForSequenceClassification:
    """A reward model."""
    torch.manual_seed(seed)
    return LlamaForSequenceClassification(config(num_labels=1, **changes))


def arguments(kind: type[Any], folder: Path, **changes: Any) -> Any:
    """A configuration of TRL's for a few steps on the CPU."""
    values: dict[str, Any] = {
        "max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 3e-3, "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 1,
    }  # fmt: skip
    return kind(str(folder), **values | changes)


def completions(count: int = 8) -> Dataset:
    """Prompts and completions of equal lengths."""
    return Dataset.from_list([{"prompt": f"{n}+1=", "completion": f"{n + 1}."} for n in range(count)])


def preferences(count: int = 8) -> Dataset:
    return Dataset.from_list(
        [{"prompt": f"{n}+1=", "chosen": f"{n + 1}.", "rejected": f"no idea {n}"} for n in range(count)]
    )


def dialogues(count: int = 8) -> Dataset:
    return Dataset.from_list(
        [
            {"messages": [{"role": "user", "content": f"{n}+1"}, {"role": "assistant", "content": f"{n + 1}"}]}
            for n in range(count)
        ]
    )


def logged(trainer: Any, key: str) -> list[float]:
    """What was logged under `key`, a value a logged step."""
    return [row[key] for row in trainer.state.log_history if key in row]


def weights(model: Any) -> dict[str, Tensor]:
    found = model.state_dict()
    return {k: v.dequantize() if isinstance(v, QuantizedTensor) else v.clone() for k, v in found.items()}
