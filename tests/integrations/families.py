"""Tiny random models of the architectures that tests of transformers go through, and what of them is converted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from torch import Tensor

_WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_SHAPE = _WIDTHS | {"vocab_size": 64, "max_position_embeddings": 64, "initializer_range": 0.1, "num_key_value_heads": 2}
_NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
_GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16}
# normalised heads of 8 values: products of q and k reach sqrt(8), and their errors in the softmax with them
_QK_NORM = 2 * 2 * (8 - 1)
_LLAMA = tuple(f"self_attn.{x}_proj" for x in "qkvo") + ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True)
class Family:
    """One architecture.

    model: makes it. layers: names, with {} for the block, of what is converted. kept: the class of some that are not,
    and what the report says of why. is_tied: whether the head is the table. more_errors: independent errors of the size
    of one product's, beside one for each converted layer.
    """

    model: Callable[[], Any]
    layers: tuple[str, ...]
    kept: dict[str, tuple[str, str]] = field(default_factory=dict)
    is_tied: bool = False
    generates: bool = True
    more_errors: int = 0

    def make(self) -> Any:
        torch.manual_seed(0)
        return self.model()

    @property
    def converted(self) -> set[str]:
        return {name.format(block) for name in self.layers for block in range(2)}


def _decoder(model: type, config: type, norm: str, layers: tuple[str, ...] = _LLAMA, **options: Any) -> Family:
    kept = {
        "lm_head": ("Linear", "head: kept unless asked for"),
        "model.norm": (norm, "no torch.nn.Linear: runs as it is"),
        "model.embed_tokens": (options.pop("table", "Embedding"), "no torch.nn.Linear: runs as it is"),
        **options.pop("kept", {}),
    }
    is_tied, more_errors = options.get("tie_word_embeddings", False), options.pop("more_errors", 0)
    names = tuple(f"model.layers.{{}}.{name}" for name in layers)
    return Family(lambda: model(config(**{**_SHAPE, **_NO_ENDS, **options})), names, kept, is_tied, True, more_errors)


def _gpt2() -> Any:
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shape = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.1}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**shape, **no_dropout, **_NO_ENDS))


def _bert() -> Any:
    shape = {**_SHAPE, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}
    del shape["num_key_value_heads"]
    return hf.BertForSequenceClassification(hf.BertConfig(**shape))


def _t5() -> Any:
    shape = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return hf.T5ForConditionalGeneration(
        hf.T5Config(**shape, dropout_rate=0.0, decoder_start_token_id=0, eos_token_id=None)
    )


_T5_SIDES = (("encoder", ("SelfAttention",)), ("decoder", ("SelfAttention", "EncDecAttention")))
_T5_LAYERS = tuple(
    f"{side}.block.{{}}.layer.{at}.{kind}.{x}"
    for side, attentions in _T5_SIDES
    for at, kind in enumerate((*attentions, "DenseReluDense"))
    for x in (("wi", "wo") if kind == "DenseReluDense" else "qkvo")
)
_BERT_BLOCK = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
               "intermediate.dense", "output.dense")  # fmt: skip

FAMILIES: dict[str, Family] = {
    "llama": _decoder(hf.LlamaForCausalLM, hf.LlamaConfig, "LlamaRMSNorm"),
    "qwen2": _decoder(hf.Qwen2ForCausalLM, hf.Qwen2Config, "Qwen2RMSNorm", tie_word_embeddings=True),
    "qwen3": _decoder(hf.Qwen3ForCausalLM, hf.Qwen3Config, "Qwen3RMSNorm", head_dim=8, more_errors=_QK_NORM),
    "mistral": _decoder(hf.MistralForCausalLM, hf.MistralConfig, "MistralRMSNorm", sliding_window=16),
    "gpt2": Family(
        _gpt2,
        tuple(f"transformer.h.{{}}.{x}" for x in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
        {"lm_head": ("Linear", "head: kept unless asked for")},
        is_tied=True,
    ),
    "gemma2": _decoder(
        hf.Gemma2ForCausalLM, hf.Gemma2Config, "Gemma2RMSNorm", table="Gemma2TextScaledWordEmbedding",
        tie_word_embeddings=True, **_GEMMA,
    ),
    "gemma3": _decoder(
        hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, "Gemma3RMSNorm", table="Gemma3TextScaledWordEmbedding",
        tie_word_embeddings=True, more_errors=_QK_NORM, **_GEMMA,
    ),
    "bert": Family(
        _bert,
        (*(f"bert.encoder.layer.{{}}.{x}" for x in _BERT_BLOCK), "bert.pooler.dense"),
        {"classifier": ("Linear", "3 outputs: below min_size=16")},
        generates=False,
    ),
    "t5": Family(_t5, _T5_LAYERS, {"lm_head": ("Linear", "head: kept")}, is_tied=True),
    "mixtral": _decoder(
        hf.MixtralForCausalLM, hf.MixtralConfig, "MixtralRMSNorm", (*_LLAMA[:4], "mlp.experts"),
        num_local_experts=4, num_experts_per_tok=2, more_errors=2,
        kept={"model.layers.0.mlp.gate": ("MixtralTopKRouter", "no torch.nn.Linear: runs as it is")},
    ),
}  # fmt: skip

IDS = torch.randint(1, 64, (4, 16), generator=torch.Generator().manual_seed(1))


def batch(family: str) -> dict[str, Tensor]:
    """Inputs and labels."""
    return {"input_ids": IDS, "labels": torch.tensor([0, 1, 2, 1]) if family == "bert" else IDS}
