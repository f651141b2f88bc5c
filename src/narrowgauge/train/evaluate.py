"""Validation: loss, perplexity, bits per byte."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from narrowgauge.data.loader import BatchStream
from narrowgauge.data.prepare import Dataset


@dataclass(frozen=True)
class Evaluation:
    """What a model makes of the validation text.

    loss: mean cross entropy, nats a token. tokens: predicted ones. text_bytes: bytes that those tokens stand for.
    """

    loss: float
    tokens: int
    text_bytes: int

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is beyond a float."""
        return math.exp(self.loss) if self.loss < 709 else math.inf  # exp(709.8) is the largest double

    @property
    def bits_per_byte(self) -> float:
        """Bits needed for a byte of text: independent of the tokenizer. NaN where the tokens stand for no text."""
        return self.loss * self.tokens / math.log(2) / self.text_bytes if self.text_bytes else math.nan


@torch.no_grad()
def evaluate(
    model: nn.Module,
    dataset: Dataset,
    *,
    batch_size: int,
    sequence_length: int,
    batches: int | None,
    device: torch.device | str = "cpu",
) -> Evaluation:
    """Read the same `batches` batches of the validation split each time (None, or more than there are: all of it).

    Runs in eval mode and leaves mode, scales and random states as they were; casts that are rounded stochastically take
    the same random bits each time. Raises DataError where the split is shorter than one sequence.
    """
    stream = BatchStream(dataset.validation, batch_size, sequence_length, seed=0)
    everything = stream.sequences_per_epoch
    sequences = everything if batches is None else min(batches * batch_size, everything)
    token_bytes = torch.from_numpy(dataset.tokenizer.token_bytes())
    total = 0.0
    text_bytes = tokens = 0
    was_training = model.training
    model.eval()
    try:
        with torch.random.fork_rng([device] if torch.device(device).type == "cuda" else []):
            torch.manual_seed(0)
            while stream.position < sequences:
                stream.batch_size = min(batch_size, sequences - stream.position)  # the last batch may be smaller
                ids, targets = stream.next()
                _, loss = model(ids.to(device), targets.to(device))
                total += float(loss) * len(ids)
                tokens += targets.numel()
                text_bytes += int(token_bytes[targets].sum())
    finally:
        model.train(was_training)
    return Evaluation(total / sequences, tokens, text_bytes)
