"""Which documents are for training and which for validation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from narrowgauge.data.corpus import Corpus, Document
from narrowgauge.errors import DataError


@dataclass(frozen=True)
class Division:
    """Which documents are for validation: those whose hash, drawn from the seed and the text, is below the fraction.

    Equal texts have equal hashes, so no copy of a training document is in validation. Where chance leaves one side
    empty, the document with the lowest (or highest) hash goes there. A corpus of one document is cut in two at
    `cut_characters`, a line's end where there is one. train_bytes, validation_bytes: UTF-8 bytes of each side.
    """

    seed: int
    bound: int
    cut_characters: int | None
    train_bytes: int
    validation_bytes: int

    @classmethod
    def of(cls, corpus: Corpus, fraction: float, seed: int) -> Division:
        """Divide a corpus so that about `fraction` of its documents are for validation. Reads all of it once."""
        hashes, sizes, last = [], [], None
        for last in corpus.documents():
            hashes.append(_hash(seed, last))
            sizes.append(len(last.text.encode()))
        total = sum(sizes)
        if len(set(hashes)) == 1:
            if len(hashes) > 1:
                raise DataError(f"all {len(hashes)} documents of '{corpus.name}' are the same text: give more text")
            assert last is not None  # documents() raises where there is none
            cut = _cut(last.text, fraction)
            first = len(last.text[:cut].encode())
            return cls(seed, 0, cut, first, total - first)
        # below the bound is validation: at least the lowest hash, and never the highest
        bound = min(max(int(fraction * 2**64), min(hashes) + 1), max(hashes))
        held = sum(size for size, value in zip(sizes, hashes, strict=True) if value < bound)
        return cls(seed, bound, None, total - held, held)

    def texts(self, corpus: Corpus) -> Iterator[tuple[str, str]]:
        """("train" or "validation", text) of each document, in corpus order."""
        for document in corpus.documents():
            if self.cut_characters is not None:
                yield "train", document.text[: self.cut_characters]
                yield "validation", document.text[self.cut_characters :]
            else:
                yield "validation" if _hash(self.seed, document) < self.bound else "train", document.text


def _hash(seed: int, document: Document) -> int:
    data = seed.to_bytes(8, "little", signed=True) + document.text.encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _cut(text: str, fraction: float) -> int:
    """Characters of the training part: up to the last line end before 1 - fraction, where there is one."""
    if len(text) < 2:
        raise DataError(f"the corpus is one document of {len(text)} character: give more text")
    at = min(max(int(len(text) * (1 - fraction)), 1), len(text) - 1)
    return text.rfind("\n", 0, at) + 1 or at
