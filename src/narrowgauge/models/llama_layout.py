"""Weights and config of a GPT in the layout of Hugging Face's Llama. Pure: needs no transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from narrowgauge.errors import ConversionError
from narrowgauge.models.config import Activation, GPTConfig, Norm, Positions

_TOP = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
_IN_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.out": "self_attn.o_proj",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.down": "mlp.down_proj",
}


def check_llama(config: GPTConfig) -> None:
    """Raise ConversionError where Llama has no place for what the config asks, naming every such field."""
    obstacles = []
    if config.activation is not Activation.SWIGLU:
        obstacles.append(f"activation={config.activation} (Llama: swiglu)")
    if config.norm is not Norm.RMSNORM:
        obstacles.append(f"norm={config.norm} (Llama: rmsnorm)")
    if config.positions is not Positions.ROPE:
        obstacles.append(f"positions={config.positions} (Llama: rope)")
    if config.swiglu_limit is not None:
        obstacles.append(f"swiglu_limit={config.swiglu_limit} (Llama: none)")
    if config.experts:
        obstacles.append(f"experts={config.experts} (Llama: 0, a dense model)")
    if obstacles:
        raise ConversionError(
            f"the Llama layout cannot express {'; '.join(obstacles)}: train a model with Llama's fields to export it"
        )


def llama_config(config: GPTConfig) -> dict[str, Any]:
    """The `config.json` of transformers' LlamaForCausalLM, without token ids and dtype, which the caller knows."""
    check_llama(config)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.hidden_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,  # transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},  # transformers 5
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "attention_dropout": 0.0,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tied_embeddings,
    }


def to_llama(config: GPTConfig, state_dict: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config.json of LlamaForCausalLM, its state dict) for a GPT's config and state dict.

    The fused projections are split into views of their rows; a tied head is left out, as transformers does. State that
    is no parameter of a GPT (scales and histories of a converted model) is left out. Raises ConversionError for a
    config that Llama cannot express, and for a state dict that does not fit the config.
    """
    hf_config = llama_config(config)
    hf_state: dict[str, Tensor] = {}
    for name in _parameter_names(config):
        if name not in state_dict:
            raise ConversionError(f"the state dict lacks '{name}': give the state dict of a GPT with this config")
        hf_state.update(_rename(name, state_dict[name], config))
    return hf_config, hf_state


def _parameter_names(config: GPTConfig) -> list[str]:
    names = ["embedding.weight"]
    for layer in range(config.layers):
        linears = {"attention.qkv": config.attention_bias, "attention.out": config.attention_bias}
        linears |= {"mlp.gate_up": config.mlp_bias, "mlp.down": config.mlp_bias}
        names += [f"blocks.{layer}.{norm}.weight" for norm in ("attention_norm", "mlp_norm")]
        names += [f"blocks.{layer}.{linear}.weight" for linear in linears]
        names += [f"blocks.{layer}.{linear}.bias" for linear, has_bias in linears.items() if has_bias]
    return [*names, "norm.weight"] + ([] if config.tied_embeddings else ["lm_head.weight"])


def _rename(name: str, value: Tensor, config: GPTConfig) -> dict[str, Tensor]:
    """One parameter of ours -> the parameters of Llama that its rows are."""
    if not name.startswith("blocks."):
        return {_TOP.get(name, name): value}
    _, layer, inner = name.split(".", 2)
    prefix = f"model.layers.{layer}."
    if inner in _IN_BLOCK:
        return {prefix + _IN_BLOCK[inner]: value}
    module, kind = inner.rsplit(".", 1)
    if module in _IN_BLOCK:
        return {f"{prefix}{_IN_BLOCK[module]}.{kind}": value}
    if module == "attention.qkv":
        kv_rows = config.key_value_heads * config.head_width
        targets, rows = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (config.width, kv_rows, kv_rows)
    else:
        targets, rows = ("mlp.gate_proj", "mlp.up_proj"), (config.hidden_width, config.hidden_width)
    if value.shape[0] != sum(rows):
        raise ConversionError(f"'{name}' has {value.shape[0]} rows, the config says {sum(rows)}: they do not belong")
    parts = value.split(rows, dim=0)
    return {f"{prefix}{target}.{kind}": part for target, part in zip(targets, parts, strict=True)}
