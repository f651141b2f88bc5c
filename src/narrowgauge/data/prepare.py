"""From a corpus to memory-mapped tokens: split, train the tokenizer, encode, and keep the result in a cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from narrowgauge.data.cache import CacheEntry, publish
from narrowgauge.data.corpus import DEFAULT_CORPUS, Corpus, load_corpus
from narrowgauge.data.division import Division
from narrowgauge.data.loader import TokenSplit
from narrowgauge.data.tokenizer import BYTES, Tokenizer
from narrowgauge.errors import ConfigError, DataError, closest

FORMAT_VERSION = 1  # of the cached files; a new one makes old caches unused
ENCODE_BYTES = 4 << 20  # text handed to the tokenizer at once: enough for all cores, little memory
TOKENIZERS = ("bpe", "bytes")
MAX_VOCAB_SIZE = 1 << 20  # the tokenizer's trainer reserves memory for all of it, and aborts the process without


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which text, how it is split, and how it becomes tokens.

    corpus, text_field, split, max_bytes: see `load_corpus`. tokenizer: "bpe" (trained on the training documents),
    "bytes", or the path of a byte-level tokenizer.json. vocab_size: of the trained tokenizer. validation_fraction:
    share of the documents that is kept for validation. split_seed: which ones. tokenizer_bytes: the tokenizer is
    trained on at most about this much text, spread over the corpus.
    """

    corpus: str = DEFAULT_CORPUS
    text_field: str = "text"
    split: str = "train"
    max_bytes: int | None = None
    tokenizer: str = "bpe"
    vocab_size: int = 4096
    validation_fraction: float = 0.05
    split_seed: int = 0
    tokenizer_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if not 0 < self.validation_fraction < 1:
            raise ConfigError(f"validation_fraction={self.validation_fraction}: expected a share between 0 and 1")
        for name in ("max_bytes", "tokenizer_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: expected a number of bytes, at least 1")
        if not 0 <= self.split_seed < 2**63:
            raise ConfigError(f"split_seed={self.split_seed}: expected a whole number from 0 to 2^63 - 1")
        is_path = "/" in self.tokenizer or self.tokenizer.endswith(".json")
        if self.tokenizer not in TOKENIZERS and not is_path:
            raise ConfigError(f"unknown tokenizer '{self.tokenizer}'{closest(self.tokenizer, TOKENIZERS)}")
        if self.tokenizer == "bpe" and self.vocab_size < BYTES + 1:
            raise ConfigError(f"vocab_size={self.vocab_size}: expected at least {BYTES + 1}, all bytes and the end")
        if self.tokenizer == "bpe" and self.vocab_size > MAX_VOCAB_SIZE:
            raise ConfigError(f"vocab_size={self.vocab_size}: expected at most {MAX_VOCAB_SIZE}")


@dataclass(frozen=True)
class Dataset:
    """Tokens ready for training. path: the cache folder they lie in."""

    train: TokenSplit
    validation: TokenSplit
    tokenizer: Tokenizer
    path: Path


def prepare_data(
    config: DataConfig, cache_dir: str | Path, on_progress: Callable[[str], None] = lambda message: None
) -> Dataset:
    """Tokens of the corpus, from the cache where the same text and settings were prepared before.

    on_progress gets a line of text as each slow part begins. Safe where several processes do the same at once; a
    damaged cache is made anew, with a warning. Raises DataError for text that cannot be used.
    """
    corpus = load_corpus(config.corpus, text_field=config.text_field, split=config.split, max_bytes=config.max_bytes)
    given = None
    if config.tokenizer == "bytes":
        given = Tokenizer.bytes()
    elif config.tokenizer != "bpe":
        given = Tokenizer.load(config.tokenizer)
    settings = _settings(config, corpus, given)
    key = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16).hexdigest()
    entry = publish(
        Path(cache_dir),
        key,
        lambda folder: _build(folder, corpus, config, given, settings, on_progress),
    )
    return open_dataset(entry)


def _settings(config: DataConfig, corpus: Corpus, given: Tokenizer | None) -> dict[str, Any]:
    """All that the tokens depend on: where the text lies does not matter, what it says does."""
    fields = asdict(config)
    for name in ("corpus", "text_field", "split", "max_bytes"):  # they act through the text
        del fields[name]
    if given is not None:  # the trained tokenizer follows from the text, a given one stands for itself
        del fields["vocab_size"], fields["tokenizer_bytes"]
        fields["tokenizer"] = given.fingerprint()
    return {"version": FORMAT_VERSION, "text": corpus.fingerprint(), **fields}


def open_dataset(entry: CacheEntry) -> Dataset:
    """Map the token files of a checked cache entry."""
    meta = entry.meta
    splits = {}
    for name in ("train", "validation"):
        tokens = np.memmap(entry.path / f"{name}.tokens", dtype=np.dtype(meta["dtype"]), mode="r")
        offsets = np.fromfile(entry.path / f"{name}.offsets", dtype=np.int64)
        fingerprint = entry.hashes[f"{name}.tokens"]
        splits[name] = TokenSplit(tokens, offsets, meta[name]["text_bytes"], fingerprint, name)
    return Dataset(splits["train"], splits["validation"], Tokenizer.load(entry.path / "tokenizer.json"), entry.path)


def _build(
    folder: Path,
    corpus: Corpus,
    config: DataConfig,
    tokenizer: Tokenizer | None,
    settings: dict[str, Any],
    on_progress: Callable[[str], None],
) -> dict[str, Any]:
    """Write tokenizer.json and the token files into `folder`; return what else must be remembered."""
    division = Division.of(corpus, config.validation_fraction, config.split_seed)
    if tokenizer is None:
        on_progress(
            f"training a tokenizer of {config.vocab_size} tokens on {division.train_bytes / 1e6:.1f} MB of text"
        )
        tokenizer = Tokenizer.train(_tokenizer_texts(corpus, division, config.tokenizer_bytes), config.vocab_size)
    on_progress(f"encoding {(division.train_bytes + division.validation_bytes) / 1e6:.1f} MB of text")
    tokenizer.save(folder / "tokenizer.json")
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    writers = {name: _Writer(folder, name, dtype, tokenizer) for name in ("train", "validation")}
    try:
        for name, text in division.texts(corpus):
            writers[name].add(text)
        counts = {name: writer.finish() for name, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.close()
    read = (counts["train"]["text_bytes"], counts["validation"]["text_bytes"])
    if read != (division.train_bytes, division.validation_bytes):
        raise DataError(f"the text of '{corpus.name}' changed while it was being read: run again once it is still")
    return {"dtype": dtype.name, "vocab_size": tokenizer.vocab_size, "settings": settings, **counts}


def _tokenizer_texts(corpus: Corpus, division: Division, limit_bytes: int) -> Iterator[str]:
    """Training documents, every n-th where all would be more than the limit."""
    step = max(1, -(-division.train_bytes // limit_bytes))
    texts = (text for name, text in division.texts(corpus) if name == "train")
    for number, text in enumerate(texts):
        if number % step == 0:
            yield text


class _Writer:
    """Encodes documents of one split in large batches and appends them to its token file."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype, tokenizer: Tokenizer) -> None:
        self._tokens = open(folder / f"{name}.tokens", "wb")  # noqa: SIM115 (closed by `close`)
        self._offsets_path = folder / f"{name}.offsets"
        self._dtype, self._tokenizer = dtype, tokenizer
        self._offsets = [0]
        self._waiting: list[str] = []
        self._waiting_bytes = self._text_bytes = 0

    def add(self, text: str) -> None:
        self._waiting.append(text)
        self._waiting_bytes += len(text.encode())
        if self._waiting_bytes >= ENCODE_BYTES:
            self._flush()

    def _flush(self) -> None:
        for ids in self._tokenizer.encode_documents(self._waiting):
            # not tofile, which loses what a full disk refuses without a word
            self._tokens.write(np.append(ids, self._tokenizer.end_id).astype(self._dtype).tobytes())
            self._offsets.append(self._offsets[-1] + len(ids) + 1)
        self._text_bytes += self._waiting_bytes
        self._waiting, self._waiting_bytes = [], 0

    def finish(self) -> dict[str, int]:
        self._flush()
        self._offsets_path.write_bytes(np.array(self._offsets, dtype=np.int64).tobytes())
        return {"text_bytes": self._text_bytes, "documents": len(self._offsets) - 1, "tokens": self._offsets[-1]}

    def close(self) -> None:
        self._tokens.close()
