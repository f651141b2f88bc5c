"""Text from a trained model."""

from __future__ import annotations

import torch

from narrowgauge.data.tokenizer import Tokenizer
from narrowgauge.errors import ConfigError
from narrowgauge.models.gpt import GPT


def sample_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
) -> str:
    """What the model writes after `prompt`: at most `tokens` tokens, fewer at the end of a document or of the context.

    An empty prompt starts a new document. A prompt too long for the context and the new tokens is cut at its front,
    but for its last token. Equal seeds give equal text on one machine. Raises ConfigError for values that sampling
    refuses.
    """
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed={seed}: expected a whole number from 0 to 2^63 - 1")
    context = model.config.context
    tokens = min(tokens, context - 1)
    room = context - tokens
    ids = (tokenizer.encode(prompt) or [tokenizer.end_id])[-room:]
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    row = model.generate(
        torch.tensor([ids], device=device),
        tokens,
        temperature=temperature,
        top_k=top_k,
        stop_id=tokenizer.end_id,
        generator=generator,
    )
    return tokenizer.decode(row[0, len(ids) :].tolist())
