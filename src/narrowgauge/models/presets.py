"""Named model shapes.

gpt-125m to gpt-175b: table 2.1 of GPT-3 (Brown et al. 2020, arXiv:2005.14165) with GPT-2's vocabulary; where its head
count times head width is not the width (1.3B) or its width is no multiple of the head width (13B: 5140), the numbers
that fit. gpt-7b: the 7B of FP8-LM (Peng et al. 2023, arXiv:2310.18313), with rotary positions; its 125M, 13B and 175B
have GPT-3's sizes. llama3-8b, llama3-70b: Llama 3 (arXiv:2407.21783, table 3).
"""

from __future__ import annotations

from typing import Any

from narrowgauge.errors import ConfigError, closest
from narrowgauge.models.config import GPTConfig

DEFAULT_PRESET = "tiny"


def _gpt3(layers: int, width: int, heads: int) -> dict[str, Any]:
    return {
        "vocab_size": 50257,
        "layers": layers,
        "width": width,
        "heads": heads,
        "context": 2048,
        "activation": "gelu",
        "norm": "layernorm",
        "norm_bias": True,
        "positions": "learned",
        "attention_bias": True,
        "mlp_bias": True,
        "tied_embeddings": True,
        "scaled_residual_init": True,
    }


def _llama3(layers: int, width: int, heads: int, ffn_width: int) -> dict[str, Any]:
    return {
        "vocab_size": 128256,
        "layers": layers,
        "width": width,
        "heads": heads,
        "kv_heads": 8,
        "ffn_width": ffn_width,
        "context": 8192,
        "rope_theta": 500000.0,
    }


_PRESETS: dict[str, dict[str, Any]] = {
    # trains in minutes on two CPU cores; its vocabulary is replaced by the tokenizer's
    "tiny": {"vocab_size": 4096, "layers": 4, "width": 256, "heads": 4, "kv_heads": 2, "context": 256},
    "gpt-125m": _gpt3(12, 768, 12),
    "gpt-350m": _gpt3(24, 1024, 16),
    "gpt-760m": _gpt3(24, 1536, 16),
    "gpt-1.3b": _gpt3(24, 2048, 16),
    "gpt-2.7b": _gpt3(32, 2560, 32),
    "gpt-6.7b": _gpt3(32, 4096, 32),
    "gpt-7b": {**_gpt3(32, 4096, 32), "positions": "rope"},
    "gpt-13b": _gpt3(40, 5120, 40),
    "gpt-175b": _gpt3(96, 12288, 96),
    "llama3-8b": _llama3(32, 4096, 32, 14336),
    "llama3-70b": _llama3(80, 8192, 64, 28672),
}


def preset_names() -> list[str]:
    """Names that `preset` takes, smallest shapes first."""
    return list(_PRESETS)


def preset(name: str, **fields: Any) -> GPTConfig:
    """The shape of that name, with other fields where given.

    Raises ConfigError for an unknown name or field, naming the closest.
    """
    key = name.lower()
    if key not in _PRESETS:
        raise ConfigError(f"unknown model '{name}'{closest(key, _PRESETS)}")
    return GPTConfig.from_dict({**_PRESETS[key], **fields})
