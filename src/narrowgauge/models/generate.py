"""Sampling from a GPT with a cache of keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.errors import ConfigError, DataError
from narrowgauge.models.attention import KVCache

if TYPE_CHECKING:
    from narrowgauge.models.gpt import GPT


@torch.no_grad()
def generate(
    self: GPT,
    ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    stop_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue each row of `ids` [B, T] int64 by up to `max_new_tokens` tokens: returns [B, T + n], n at most that.

    temperature: logits are divided by it; 0 takes the most probable token. top_k: sample among the k most probable
    only. stop_id: a row that has drawn it goes on with stop_id, and all rows having drawn it ends the work.
    generator: source of randomness, on the logits' device; None: torch's global one. Runs in eval mode, and leaves
    every module's mode as it was. Raises DataError where prompt and new tokens exceed the context.
    """
    _check(self, ids, max_new_tokens, temperature, top_k)
    modes = [(module, module.training) for module in self.modules()]
    self.eval()
    try:
        cache = KVCache(self.config.layers, self.config.context)
        stopped = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
        unread = ids
        for _ in range(max_new_tokens):
            logits, _ = self(unread, cache=cache)
            unread = sample(logits[:, -1], temperature, top_k, generator)[:, None]
            if stop_id is not None:
                unread = unread.masked_fill(stopped[:, None], stop_id)
                stopped |= unread[:, 0] == stop_id
            ids = torch.cat((ids, unread), dim=1)
            if stop_id is not None and bool(stopped.all()):
                break
        return ids
    finally:
        for module, was_training in modes:
            module.training = was_training


def sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One token for each row of logits [B, vocab_size]: int64 [B]. Computed in float32."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]


def _check(model: GPT, ids: Tensor, max_new_tokens: int, temperature: float, top_k: int | None) -> None:
    if max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens={max_new_tokens}: expected a whole number, at least 0")
    if not temperature >= 0 or temperature == float("inf"):
        raise ConfigError(f"temperature={temperature}: expected a finite number >= 0")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k={top_k}: expected a whole number, at least 1, or none")
    if ids.dim() != 2 or ids.shape[1] == 0:
        raise DataError(f"the prompt has shape {tuple(ids.shape)}: expected [batch, tokens] with at least one token")
    context = model.config.context
    if ids.shape[1] + max_new_tokens > context:
        raise DataError(
            f"a prompt of {ids.shape[1]} tokens and {max_new_tokens} new ones exceed the model's context of {context}: "
            f"ask for at most {max(context - ids.shape[1], 0)} new tokens, or shorten the prompt"
        )
