"""Validation: loss, perplexity, bits per byte."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from narrowgauge.data.loader import BatchStream
from narrowgauge.data.prepare import Dataset
from narrowgauge.models.gpt import IGNORED
from narrowgauge.train.ranks import ONE, Ranks


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
    ranks: Ranks = ONE,
    loss_of: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Evaluation:
    """Read the same `batches` batches of the validation split each time (None, or more than there are: all of it).

    Runs in eval mode and leaves mode, scales and random states as they were; casts that are rounded stochastically take
    the same random bits each time. Each rank reads its own, and all get the same figures. loss_of: the mean loss of
    (ids, targets); None: the model's own. Raises DataError where the split is shorter than one sequence.
    """
    rank, world = ranks.batch_rank, ranks.batch_ranks
    stream = BatchStream(dataset.validation, batch_size, sequence_length, seed=0, rank=rank, world_size=world)
    loss_of = loss_of or (lambda ids, targets: model(ids, targets)[1])
    everything = stream.sequences_per_epoch
    sequences = everything if batches is None else min(batches * batch_size * world, everything)
    token_bytes = torch.from_numpy(dataset.tokenizer.token_bytes())
    total = 0.0
    text_bytes = tokens = 0
    was_training = model.training
    model.eval()
    try:
        with torch.random.fork_rng([device] if torch.device(device).type == "cuda" else []):
            torch.manual_seed(0)
            while stream.position < sequences:
                left = sequences - stream.position
                stream.batch_size = min(batch_size, -(-left // world))  # the last batch may be smaller
                ids, targets = stream.next()
                mine = min(len(ids), -(-(left - rank) // world))  # beyond, ranks only keep the others company
                loss = loss_of(ids.to(device), _without(targets, mine).to(device))
                if mine > 0:
                    total += float(loss) * mine
                    tokens += targets[:mine].numel()
                    text_bytes += int(token_bytes[targets[:mine]].sum())
    finally:
        model.train(was_training)
    total, *counts = ranks.sums([total, tokens, text_bytes])
    return Evaluation(total / sequences, *map(int, counts))


def _without(targets: Tensor, sequences: int) -> Tensor:
    """Targets of which those after so many sequences count for nothing; where none is left, all do."""
    if sequences <= 0 or sequences == len(targets):
        return targets
    return torch.cat([targets[:sequences], torch.full_like(targets[sequences:], IGNORED)])
