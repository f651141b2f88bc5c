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

    An empty prompt starts a new document. A prompt too long for the context and the new tokens is cut at its front.
    Equal seeds give equal text on one machine.

    Raises ConfigError where the context leaves no room for any prompt, or for values that sampling refuses.
    """
    context = model.config.context
    room = context - tokens
    if room < 1:
        raise ConfigError(f"tokens={tokens}: expected fewer than the model's context, {context}: ask for fewer")
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
