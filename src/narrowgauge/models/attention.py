"""Causal self-attention with grouped queries, and the cache of keys and values that generation uses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.models.config import GPTConfig
from narrowgauge.models.rope import rotate


class KVCache:
    """Keys and values of the tokens seen so far, one pair per layer, each [B, kv_heads, context, head_width].

    Storage is made at the first use, in the dtype that attention computes in. `length` tokens are valid.
    """

    def __init__(self, layers: int, context: int) -> None:
        self.context = context
        self.length = 0
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * layers

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [B, kv_heads, T, head_width] of the next T tokens; return those of all tokens so far.

        `length` is unchanged: call `advance(T)` once all layers have stored theirs.
        """
        stored = self._layers[layer]
        if stored is None:
            shape = (*keys.shape[:2], self.context, keys.shape[-1])
            stored = self._layers[layer] = (keys.new_empty(shape), values.new_empty(shape))
        end = self.length + keys.shape[2]
        for whole, part in zip(stored, (keys, values), strict=True):
            whole[:, :, self.length : end] = part
        return stored[0][:, :, :end], stored[1][:, :, :end]

    def advance(self, tokens: int) -> None:
        """Count `tokens` more as valid."""
        self.length += tokens


class Attention(nn.Module):
    """y = out(softmax(q k^T / sqrt(head_width), causal) v), with q, k, v from one fused projection `qkv`.

    Rows of `qkv.weight`: all query heads, then key heads, then value heads. Query head h reads key head
    h // (heads / kv_heads), as Llama's does. heads, kv_heads: those of this process, where they are parted over many.
    """

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.head_width = config.heads, config.key_value_heads, config.head_width
        qkv_width = (self.heads + 2 * self.kv_heads) * self.head_width
        self.qkv = nn.Linear(config.width, qkv_width, bias=config.attention_bias)
        self.out = nn.Linear(config.width, config.width, bias=config.attention_bias)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, cache: KVCache | None = None) -> Tensor:
        """x [B, T, width] -> [B, T, width]. rope: cos and sin of these T positions, or None (learned positions)."""
        projected = self.qkv(x)
        batch, tokens, _ = projected.shape  # of whole sequences, also where x is a part of them
        heads = projected.view(batch, tokens, self.heads + 2 * self.kv_heads, self.head_width).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        past = 0
        if cache is not None:
            past = cache.length
            k, v = cache.extend(self.layer, k, v)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=_mask(past, tokens, x.device),
            is_causal=past == 0 and tokens > 1,
            enable_gqa=self.kv_heads != self.heads,
        )
        return self.out(y.transpose(1, 2).flatten(2))


def _mask(past: int, tokens: int, device: torch.device) -> Tensor | None:
    """Which of past + tokens keys each of the new tokens sees; None where `is_causal`, or seeing all, says it."""
    if past == 0 or tokens == 1:
        return None
    return torch.ones(tokens, past + tokens, dtype=torch.bool, device=device).tril(diagonal=past)
