"""Byte-level tokenizers, kept as `tokenizer.json` files that transformers' PreTrainedTokenizerFast loads."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from narrowgauge.errors import DataError

END_OF_TEXT = "<|endoftext|>"
BYTES = 256


class Tokenizer:
    """Text to token ids and back, without loss: every byte has a token.

    `end_id` ends each document; that text inside a document is text and never becomes the token.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        """inner: a byte-level tokenizer with the token <|endoftext|>. Raises DataError for any other."""
        end_id = inner.token_to_id(END_OF_TEXT)
        if end_id is None:
            raise DataError(f"the tokenizer has no token {END_OF_TEXT}, which ends each document: add it")
        self._inner = inner
        self._inner.encode_special_tokens = True  # so that a document cannot contain the end of a document
        self.end_id: int = end_id
        self.vocab_size: int = inner.get_vocab_size()
        self._byte_values = _byte_of_character()
        # with no merges a token is a byte, in this order
        self._is_plain_bytes = self.vocab_size == BYTES + 1 and all(
            inner.token_to_id(c) == b for c, b in self._byte_values.items()
        )

    @classmethod
    def bytes(cls) -> Self:
        """One token a byte: id = byte value, and 256 for the end of a document."""
        vocab = {character: byte for character, byte in _byte_of_character().items()}
        inner = _byte_level(models.BPE(vocab=vocab, merges=[]))
        inner.add_special_tokens([END_OF_TEXT])
        return cls(inner)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Self:
        """Byte pair encoding (Sennrich et al. 2016, arXiv:1508.07909) on the bytes of `texts`.

        The vocabulary is smaller than `vocab_size` where the text has fewer pairs that occur twice.
        Raises DataError where there is no room for the 256 bytes and the end of text.
        """
        if vocab_size < BYTES + 1:
            raise DataError(f"vocab_size={vocab_size}: expected at least {BYTES + 1} (all bytes and {END_OF_TEXT})")
        inner = _byte_level(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a tokenizer.json. Raises DataError where it is missing, broken, or not byte-level."""
        try:
            inner = tokenizers.Tokenizer.from_file(os.fspath(path))
        except Exception as error:  # tokenizers raises bare Exceptions
            raise DataError(f"{path}: no readable tokenizer.json ({error})") from None
        if not isinstance(inner.decoder, decoders.ByteLevel):
            raise DataError(f"{path}: expected a byte-level tokenizer, whose tokens are bytes; found another kind")
        return cls(inner)

    def to_json(self) -> str:
        """The content of tokenizer.json."""
        return self._inner.to_str(pretty=True)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write tokenizer.json."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    def fingerprint(self) -> str:
        """A hash of tokenizer.json."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of the text, without the end of text."""
        return self.encode_documents([text])[0].tolist()

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, without the end of text: int64 arrays. Uses all cores."""
        if self._is_plain_bytes:
            return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; the end of text is left out, and bytes that are no UTF-8 become U+FFFD."""
        return self._inner.decode([i for i in ids if i != self.end_id], skip_special_tokens=False)

    def token_bytes(self) -> np.ndarray:
        """Bytes of text that each id stands for: int64 [vocab_size], 0 for the end of text."""
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, i in self._inner.get_vocab(with_added_tokens=True).items():
            lengths[i] = 0 if i == self.end_id else len(token)  # one character of a token is one byte
        return lengths


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # type: ignore[assignment]
    inner.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return inner


def _byte_of_character() -> dict[str, int]:
    """The printable character that byte-level tokenizers write for each byte (GPT-2's table) -> the byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(BYTES) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(BYTES + i): b for i, b in enumerate(others)}
