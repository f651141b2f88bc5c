"""Where training text comes from: a name or a glob becomes a stream of documents in a fixed order."""

from __future__ import annotations

import functools
import glob
import hashlib
import importlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.data.files import document_text, jsonl_documents, parquet_documents, text_documents
from narrowgauge.errors import DataError, UnknownCorpusError, closest

HUGGING_FACE = "hf:"
DEFAULT_CORPUS = "python"


@dataclass(frozen=True)
class Document:
    """One text, never empty, and where it came from (a path, or a path and a line)."""

    text: str
    name: str


@dataclass(frozen=True)
class Corpus:
    """Documents that can be read again and again, always in the same order.

    name: what the user asked for. read: starts a fresh pass over (text, name) pairs; empty texts may be among them.
    max_bytes: a pass ends before the document that would take the UTF-8 text beyond this many bytes; None: no limit.
    """

    name: str
    read: Callable[[], Iterable[tuple[str, str]]]
    max_bytes: int | None = None

    def documents(self) -> Iterator[Document]:
        """The non-empty documents. Raises DataError where there is none, or where one is no text."""
        total_bytes = count = 0
        for text, name in self.read():
            if not text.strip():
                continue
            total_bytes += len(text.encode())
            if self.max_bytes is not None and total_bytes > self.max_bytes:
                break
            count += 1
            yield Document(text, name)
        if not count:
            limit = "" if self.max_bytes is None else f" within max_bytes={self.max_bytes}"
            raise DataError(f"corpus '{self.name}' holds no text{limit}: give files that have some")

    def fingerprint(self) -> str:
        """A hash of the text of all documents, in order."""
        digest = hashlib.blake2b(digest_size=16)
        for document in self.documents():
            data = document.text.encode()
            digest.update(len(data).to_bytes(8, "little"))  # or two documents would hash as their concatenation
            digest.update(data)
        return digest.hexdigest()


def load_corpus(spec: str, *, text_field: str = "text", split: str = "train", max_bytes: int | None = None) -> Corpus:
    """The corpus of that name.

    spec: "python" (library sources and help topics of the running Python); "hf:NAME" or "hf:NAME:CONFIG" (a dataset of
    the Hugging Face hub, or a local folder that `datasets` reads); else a path or glob of text, .jsonl or .parquet
    files, "**" for any folders. text_field: the field or column that holds the text. split: of a Hugging Face dataset.
    Raises DataError where the name is unknown, nothing matches, or a file is no text.
    """
    if spec in BUILT_IN:
        read = BUILT_IN[spec]
    elif spec.startswith(HUGGING_FACE):
        dataset = _load_hugging_face(spec.removeprefix(HUGGING_FACE), split, text_field)
        read = functools.partial(_hugging_face_documents, dataset, spec, text_field)
    else:
        read = functools.partial(_file_documents, _matching_files(spec), text_field)
    return Corpus(spec, read, max_bytes)


def _matching_files(spec: str) -> list[str]:
    looks_like_a_path = any(c in spec for c in "*?[/\\.") or os.path.exists(spec)
    if not looks_like_a_path:
        valid = [*BUILT_IN, HUGGING_FACE + "NAME", "a path or glob such as data/*.jsonl"]
        raise UnknownCorpusError(f"unknown corpus '{spec}'{closest(spec, valid)}")
    if os.path.isdir(spec):
        raise UnknownCorpusError(f"'{spec}' is a folder: say which files in it, e.g. '{spec.rstrip('/')}/**/*.txt'")
    paths = sorted(path for path in glob.glob(os.path.expanduser(spec), recursive=True) if os.path.isfile(path))
    if not paths:
        raise UnknownCorpusError(f"no file matches '{spec}' in {os.getcwd()}: check the pattern and the folder")
    return paths


def _file_documents(paths: list[str], text_field: str) -> Iterator[tuple[str, str]]:
    for path in paths:
        extension = os.path.splitext(path)[1].lower()
        if extension in (".jsonl", ".ndjson"):
            yield from jsonl_documents(path, text_field)
        elif extension == ".parquet":
            yield from parquet_documents(path, text_field)
        else:
            yield from text_documents(path)


# folders of the standard library that hold no text worth learning: tests, other people's packages, generated tables
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}


def _python_documents() -> Iterator[tuple[str, str]]:
    """Help topics first, sorted by name, then the sources of the standard library, sorted by path."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for name in sorted(topics):
        yield topics[name], f"pydoc_data.topics[{name!r}]"
    library = Path(sysconfig.get_paths()["stdlib"])
    for folder, folders, files in os.walk(library):
        folders[:] = sorted(f for f in folders if f not in _SKIPPED_FOLDERS and not f.startswith(("config-", "__")))
        for file in sorted(files):
            if file.endswith(".py"):
                path = Path(folder, file)
                # a few sources declare another encoding; their documents keep what UTF-8 can read
                yield path.read_bytes().decode("utf-8", errors="ignore").replace("\0", ""), str(path)


BUILT_IN: dict[str, Callable[[], Iterable[tuple[str, str]]]] = {DEFAULT_CORPUS: _python_documents}


def _load_hugging_face(name: str, split: str, text_field: str) -> Any:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(
            f"corpus 'hf:{name}' needs the package datasets ({error}): pip install 'narrowgauge[hf]'"
        ) from error
    path, _, config = name.partition(":")
    try:
        if os.path.isfile(os.path.join(path, "state.json")):  # a folder written by Dataset.save_to_disk
            dataset = datasets.load_from_disk(path)
        else:
            dataset = datasets.load_dataset(path, config or None, split=split)
    except Exception as error:  # datasets raises many kinds: missing name, no network, unknown split or config
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"datasets could not load '{name}' (split '{split}'): {reason}") from error
    if text_field not in dataset.column_names:
        raise DataError(f"'hf:{name}' has no column '{text_field}'{closest(text_field, dataset.column_names)}")
    return dataset


def _hugging_face_documents(dataset: Any, spec: str, text_field: str) -> Iterator[tuple[str, str]]:
    row = 0
    for batch in dataset.select_columns([text_field]).iter(batch_size=1000):
        for text in batch[text_field]:
            row += 1
            yield document_text(text, text_field, f"{spec}, row {row}"), f"{spec}, row {row}"
