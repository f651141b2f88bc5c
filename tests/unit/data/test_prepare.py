import dataclasses
import errno
import multiprocessing
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from narrowgauge.data import cache
from narrowgauge.data.corpus import load_corpus
from narrowgauge.data.prepare import DataConfig, Dataset, prepare_data
from narrowgauge.data.tokenizer import Tokenizer
from narrowgauge.errors import ConfigError, DataError


@pytest.fixture
def config(text_folder) -> DataConfig:
    return DataConfig(corpus=str(text_folder / "*.txt"), vocab_size=300, validation_fraction=0.2)


def documents(dataset: Dataset, name: str) -> list[str]:
    split = getattr(dataset, name)
    parts = [split.tokens[a:b] for a, b in zip(split.offsets[:-1], split.offsets[1:], strict=True)]
    assert all(part[-1] == dataset.tokenizer.end_id for part in parts)
    return [dataset.tokenizer.decode(part.tolist()) for part in parts]


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes"])
def test_every_document_is_in_exactly_one_split_without_loss(config, tokenizer, tmp_path):
    config = dataclasses.replace(config, tokenizer=tokenizer)
    dataset = prepare_data(config, tmp_path / "cache")
    train, validation = documents(dataset, "train"), documents(dataset, "validation")
    everything = [d.text for d in load_corpus(config.corpus).documents()]
    assert sorted(train + validation) == sorted(everything)
    assert train == [t for t in everything if t in set(train)]  # in corpus order
    assert 2 <= len(validation) <= 16  # 40 documents at 0.2: 8 +- 3 standard deviations
    for split, texts in ((dataset.train, train), (dataset.validation, validation)):
        assert split.text_bytes == len("".join(texts).encode())
        assert split.tokens.dtype == np.uint16 and isinstance(split.tokens, np.memmap)
        assert split.text_bytes == dataset.tokenizer.token_bytes()[split.tokens].sum()


def test_the_tokenizer_is_trained_on_training_documents_only(config, tmp_path):
    dataset = prepare_data(config, tmp_path / "cache")
    assert dataset.tokenizer.to_json() == Tokenizer.train(documents(dataset, "train"), 300).to_json()


def test_tokenizer_bytes_limits_what_the_tokenizer_sees_to_a_spread_of_documents(config, tmp_path):
    dataset = prepare_data(dataclasses.replace(config, tokenizer_bytes=5000), tmp_path / "cache")
    train = documents(dataset, "train")
    step = -(-dataset.train.text_bytes // 5000)
    assert step > 2
    assert dataset.tokenizer.to_json() == Tokenizer.train(train[::step], 300).to_json()


def test_the_split_follows_the_seed_and_the_text_not_names_or_order(config, text_folder, tmp_path):
    held = documents(prepare_data(config, tmp_path / "cache"), "validation")
    other = documents(prepare_data(dataclasses.replace(config, split_seed=1), tmp_path / "cache"), "validation")
    assert held != other
    for number, path in enumerate(sorted(text_folder.iterdir())):
        path.rename(text_folder / f"{39 - number:02d}-renamed.txt")
    shutil.copy(text_folder / "05-renamed.txt", text_folder / "copy.txt")
    again = documents(prepare_data(config, tmp_path / "cache"), "validation")
    assert set(again) == set(held)  # the copy went where its original is


def test_the_second_time_nothing_is_built(config, tmp_path, monkeypatch):
    messages = []
    first = prepare_data(config, tmp_path / "cache", messages.append)
    assert [m.split(" ")[0] for m in messages] == ["training", "encoding"]
    monkeypatch.setattr(cache, "_build", lambda *args: pytest.fail("built again"))
    second = prepare_data(config, tmp_path / "cache", messages.append)
    assert len(messages) == 2 and second.path == first.path
    assert np.array_equal(first.train.tokens, second.train.tokens)
    assert second.train.fingerprint == first.train.fingerprint != second.validation.fingerprint
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [first.path.name]  # no temporary folder is left


def test_where_the_text_lies_does_not_matter_and_what_it_says_does(config, text_folder, tmp_path, sentences):
    first = prepare_data(config, tmp_path / "cache")
    moved = tmp_path / "moved"
    shutil.copytree(text_folder, moved)
    assert prepare_data(dataclasses.replace(config, corpus=str(moved / "*.txt")), tmp_path / "cache").path == first.path
    (moved / "00.txt").write_text(sentences(1000, 3))
    paths = {first.path}
    changed = dataclasses.replace(config, corpus=str(moved / "*.txt"))
    for fields in ({}, {"vocab_size": 310}, {"validation_fraction": 0.3}, {"split_seed": 2}, {"tokenizer": "bytes"}):
        paths.add(prepare_data(dataclasses.replace(changed, **fields), tmp_path / "cache").path)
    assert len(paths) == 6


def test_a_given_tokenizer_file_is_used_as_it_is(config, tmp_path, sentences):
    tokenizer = Tokenizer.train([sentences(5, 200)], 280)
    tokenizer.save(tmp_path / "mine.json")
    dataset = prepare_data(dataclasses.replace(config, tokenizer=str(tmp_path / "mine.json")), tmp_path / "cache")
    assert dataset.tokenizer.fingerprint() == tokenizer.fingerprint()


def test_a_vocabulary_beyond_16_bits_is_stored_in_32(config, tmp_path, monkeypatch):
    wide = Tokenizer.bytes()
    monkeypatch.setattr(wide, "vocab_size", 70000)
    monkeypatch.setattr(Tokenizer, "bytes", lambda: wide)
    dataset = prepare_data(dataclasses.replace(config, tokenizer="bytes"), tmp_path / "cache")
    assert dataset.train.tokens.dtype == np.uint32
    assert len(documents(dataset, "train")) == dataset.train.documents


DAMAGES = {
    "truncated": lambda p: (p / "train.tokens").write_bytes((p / "train.tokens").read_bytes()[:-2]),
    "one bit": lambda p: flip(p / "train.tokens"),
    "missing": lambda p: (p / "validation.offsets").unlink(),
    "meta": lambda p: (p / "meta.json").write_text("{"),
    "tokenizer": lambda p: (p / "tokenizer.json").write_text("{}"),
    "no meta": lambda p: (p / "meta.json").unlink(),
}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_noticed_and_made_anew(config, damage, tmp_path):
    first = prepare_data(config, tmp_path / "cache")
    before = np.array(first.train.tokens), first.train.fingerprint
    path = first.path
    del first
    DAMAGES[damage](path)
    with pytest.warns(UserWarning, match="token cache .* is damaged .*: it is made anew"):
        again = prepare_data(config, tmp_path / "cache")
    assert np.array_equal(again.train.tokens, before[0]) and again.train.fingerprint == before[1]
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [path.name]
    prepare_data(config, tmp_path / "cache")  # without a warning


def prepare_in_process(config: DataConfig, folder: Path, barrier, results) -> None:
    barrier.wait(120)
    dataset = prepare_data(config, folder)
    results.put((dataset.train.fingerprint, int(dataset.train.tokens.astype(np.int64).sum())))


@pytest.mark.multiproc
def test_two_processes_at_once_get_the_same_tokens(config, tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    process = context.Process(target=prepare_in_process, args=(config, tmp_path / "cache", barrier, results))
    process.start()
    prepare_in_process(config, tmp_path / "cache", barrier, results)
    answers = [results.get(timeout=120) for _ in range(2)]
    process.join(60)
    assert process.exitcode == 0
    assert answers[0] == answers[1]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_losing_the_race_takes_the_winners_entry(tmp_path):
    def build(folder: Path) -> dict:
        if not (tmp_path / "key").exists():  # meanwhile another process finishes the same entry
            cache._build(tmp_path / "key", build_other)
        (folder / "file").write_text("mine")
        return {"who": "mine"}

    def build_other(folder: Path) -> dict:
        (folder / "file").write_text("other")
        return {"who": "other"}

    entry = cache.publish(tmp_path, "key", build)
    assert entry.meta == {"who": "other"} and (entry.path / "file").read_text() == "other"
    assert [p.name for p in tmp_path.iterdir()] == ["key"]


def test_a_full_disk_leaves_no_half_entry(config, tmp_path, monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cache, "_fsync", full)
        with pytest.raises(DataError, match="cannot write the token cache .*No space left.*free space"):
            prepare_data(config, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    assert prepare_data(config, tmp_path / "cache").train.documents > 20


def test_one_document_is_cut_at_a_line_end(tmp_path, sentences):
    text = sentences(3, 100)
    (tmp_path / "one.txt").write_text(text)
    config = DataConfig(corpus=str(tmp_path / "one.txt"), tokenizer="bytes", validation_fraction=0.1)
    dataset = prepare_data(config, tmp_path / "cache")
    train, validation = documents(dataset, "train")[0], documents(dataset, "validation")[0]
    assert train + validation == text and train.endswith("\n")
    assert 0.1 <= len(validation) / len(text) < 0.12


@pytest.mark.parametrize("fraction", [1e-6, 0.999999])
def test_neither_side_is_empty_however_small_the_corpus(fraction, tmp_path, sentences):
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text(sentences(number, 3))
    config = DataConfig(corpus=str(tmp_path / "*.txt"), tokenizer="bytes", validation_fraction=fraction)
    dataset = prepare_data(config, tmp_path / "cache")
    assert (dataset.train.documents, dataset.validation.documents) == (1, 1)


def test_a_corpus_that_cannot_be_divided_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("same")
    (tmp_path / "b.txt").write_text("same")
    with pytest.raises(DataError, match="all 2 documents .* are the same text"):
        prepare_data(DataConfig(corpus=str(tmp_path / "*.txt")), tmp_path / "cache")
    (tmp_path / "b.txt").unlink()
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match="one document of 1 character"):
        prepare_data(DataConfig(corpus=str(tmp_path / "a.txt")), tmp_path / "cache")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokenizer": "byte"}, "unknown tokenizer 'byte'; did you mean 'bytes'"),
        ({"vocab_size": 100}, "vocab_size=100: expected at least 257"),
        ({"validation_fraction": 0.0}, "validation_fraction=0.0: expected a share between 0 and 1"),
        ({"validation_fraction": 1.0}, "validation_fraction=1.0"),
        ({"max_bytes": 0}, "max_bytes=0: expected a number of bytes"),
        ({"split_seed": -1}, "split_seed=-1"),
    ],
)
def test_bad_settings_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        DataConfig(**fields)


def test_the_default_corpus_gives_bits_per_byte_from_its_byte_counts(tmp_path):
    dataset = prepare_data(DataConfig(max_bytes=400_000, tokenizer="bytes"), tmp_path / "cache")
    split = dataset.validation
    assert split.text_bytes == len(split.tokens) - split.documents
    assert split.bytes_per_token == pytest.approx(split.text_bytes / len(split.tokens))


def test_a_full_disk_never_leaves_tokens_that_were_cut_short(tmp_path):
    """In a process of its own, whose files may not grow beyond 20000 bytes: a stand-in for a full disk."""
    (tmp_path / "a.txt").write_text("the narrow gauge line ran twice a day\n" * 400)
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        "from narrowgauge.data.prepare import DataConfig, prepare_data\n"
        "prepare_data(DataConfig(corpus='a.txt', tokenizer='bytes'), 'cache')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "DataError: cannot write the token cache cache" in done.stderr
    assert not list((tmp_path / "cache").iterdir())
