"""Batches of packed token sequences, shuffled by a seed, that resume exactly from one integer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge.errors import CheckpointError, ConfigError, DataError


@dataclass(frozen=True)
class TokenSplit:
    """The tokens of the training or of the validation documents.

    tokens: all documents, each with its end-of-text token, one after the other (uint16 or uint32, memory-mapped).
    offsets: int64 [documents + 1]; document i is tokens[offsets[i] : offsets[i + 1]]. text_bytes: UTF-8 bytes of the
    text. fingerprint: hash of the tokens. name: "train" or "validation".
    """

    tokens: np.ndarray
    offsets: np.ndarray
    text_bytes: int
    fingerprint: str
    name: str

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes of text for each token, so that bits per byte = loss in nats / ln 2 / bytes_per_token."""
        return self.text_bytes / len(self.tokens)


class BatchStream:
    """An endless stream of (ids, targets), each int64 [batch_size, sequence_length]; targets are ids one token on.

    In each epoch the documents are put in an order drawn from the seed and the epoch, joined, cut into sequences of
    sequence_length tokens (what is left at the end is dropped), and the sequences are taken in a drawn order too, each
    once. `position` counts sequences taken by all ranks since the start; it and the seed are all there is to resume.
    Rank r of world_size takes every world_size-th sequence, starting with the r-th.
    """

    def __init__(
        self,
        split: TokenSplit,
        batch_size: int,
        sequence_length: int,
        seed: int,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Raises ConfigError for sizes out of range, DataError where the split is shorter than one sequence."""
        for name, value, lowest in (
            ("batch_size", batch_size, 1),
            ("sequence_length", sequence_length, 1),
            ("seed", seed, 0),
        ):
            if value < lowest:
                raise ConfigError(f"{name}={value}: expected a whole number, at least {lowest}")
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank}: expected 0 <= rank < world_size={world_size}")
        self.split, self.seed = split, seed
        self.batch_size, self.sequence_length = batch_size, sequence_length
        self.rank, self.world_size = rank, world_size
        self.position = 0
        # the last sequence needs one token more, for its last target
        self.sequences_per_epoch = (len(split.tokens) - 1) // sequence_length
        if self.sequences_per_epoch < 1:
            raise DataError(
                f"the {split.name} split has {len(split.tokens)} tokens, fewer than one sequence of {sequence_length} "
                "and its last target: use more text, or a shorter sequence"
            )
        self._epoch: _Epoch | None = None

    @property
    def epoch(self) -> float:
        """Passes over the data so far, with their fraction."""
        return self.position / self.sequences_per_epoch

    def next(self) -> tuple[Tensor, Tensor]:
        """The next batch of this rank; moves `position` on by batch_size * world_size."""
        mine = range(self.position + self.rank, self.position + self.batch_size * self.world_size, self.world_size)
        rows = np.stack([self._sequence(position) for position in mine])
        self.position += self.batch_size * self.world_size
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _sequence(self, position: int) -> np.ndarray:
        """int64 [sequence_length + 1]."""
        number, index = divmod(position, self.sequences_per_epoch)
        if self._epoch is None or self._epoch.number != number:
            self._epoch = _Epoch(self.split, self.seed, number, self.sequences_per_epoch)
        start = int(self._epoch.sequence_order[index]) * self.sequence_length
        return self._epoch.read(start, self.sequence_length + 1)

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on: plain integers and a string, fit for JSON."""
        return {
            "position": self.position,
            "seed": self.seed,
            "sequence_length": self.sequence_length,
            "fingerprint": self.split.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state. Batch size and number of ranks may differ from before.

        Raises CheckpointError where the text, the seed or the sequence length differ: the order would be another.
        """
        mine = self.state_dict()
        for key in mine:
            if key not in state:
                raise CheckpointError(f"the data state lacks '{key}': it is of another version, or damaged")
            if key != "position" and state[key] != mine[key]:
                raise CheckpointError(
                    f"the checkpoint's data has {key} {state[key]!r}, this run's has {mine[key]!r}: resume with the "
                    "same text, tokenizer, seed and sequence length"
                )
        self.position = int(state["position"])


class _Epoch:
    """One pass over a split: the joined documents in this epoch's order, and the order of the sequences."""

    def __init__(self, split: TokenSplit, seed: int, number: int, sequences: int) -> None:
        self.number = number
        self.tokens = split.tokens
        order = permutation(split.documents, seed, number, stream=0)
        self.starts = split.offsets[:-1][order]  # where each document, in this epoch's order, lies in the file
        lengths = np.diff(split.offsets)[order]
        self.joined_starts = np.concatenate(([0], np.cumsum(lengths)))  # and where in the joined text
        self.sequence_order = permutation(sequences, seed, number, stream=1)

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens start .. start + count of the joined documents: int64 [count]."""
        out = np.empty(count, dtype=np.int64)
        done = 0
        document = int(np.searchsorted(self.joined_starts, start, side="right")) - 1
        while done < count:
            inside = start + done - int(self.joined_starts[document])
            left = int(self.joined_starts[document + 1] - self.joined_starts[document]) - inside
            taken = min(left, count - done)
            begin = int(self.starts[document]) + inside
            out[done : done + taken] = self.tokens[begin : begin + taken]
            done += taken
            document += 1
        return out


def permutation(length: int, seed: int, epoch: int, stream: int) -> np.ndarray:
    """A permutation of 0 .. length - 1 drawn from the three numbers: int64 [length].

    It sorts raw Philox words, which NumPy keeps the same in all versions; Generator.permutation it may change.
    """
    words = np.random.Philox(np.random.SeedSequence([seed, epoch, stream])).random_raw(length)
    return np.argsort(words, kind="stable")
