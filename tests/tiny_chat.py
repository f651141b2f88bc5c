"""A Llama of a few thousand weights with a tokenizer of bytes and a chat template, as a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

END, START = "<|im_end|>", "<|im_start|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_model(directory: Path, **changes: Any) -> Path:
    """Write the model. changes: of its configuration; `chat_template`, `eos_token` or `pad_token` None: without it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: at for at, character in enumerate(alphabet)}
    bytes_ = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = decoders.ByteLevel()
    special = {"eos_token": END, "pad_token": "<|pad|>", "additional_special_tokens": [START]}
    special |= {key: changes.pop(key) for key in ("eos_token", "pad_token") if key in changes}
    given = {key: value for key, value in special.items() if value is not None}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_, **given)
    tokenizer.chat_template = changes.pop("chat_template", TEMPLATE)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "vocab_size": 260} | changes
    torch.manual_seed(0)
    config = LlamaConfig(**shape, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=None)
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    """Write JSON Lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def sums(count: int) -> list[tuple[str, str]]:
    """Questions and right answers."""
    return [(f"{n} + {n % 7}?", str(n + n % 7)) for n in range(count)]


def turn(role: str, content: str) -> dict[str, str]:
    """One message."""
    return {"role": role, "content": content}
