"""Small models and batches that tests of several kinds of parallelism share."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.models.config import GPTConfig
from narrowgauge.models.gpt import GPT

VOCABULARY = 64


def tiny_config(**changes: object) -> GPTConfig:
    """Two blocks of width 64 with two heads, layers of several thousand values each: large enough for 8-bit states."""
    fields = {"layers": 2, "width": 64, "heads": 2, "context": 32, "vocab_size": VOCABULARY, **changes}
    return GPTConfig(**fields)  # type: ignore[arg-type]


def tiny_gpt(seed: int = 0, **changes: object) -> GPT:
    """The same weights on every rank."""
    return GPT(tiny_config(**changes), device="cpu", generator=torch.Generator().manual_seed(seed))


def batch(seed: int, sequences: int = 4, tokens: int = 16) -> tuple[Tensor, Tensor]:
    """Ids and targets, int64 [sequences, tokens]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (sequences, tokens + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
