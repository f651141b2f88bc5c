import json
import sys

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from narrowgauge.data.corpus import load_corpus
from narrowgauge.errors import DataError


def texts(spec, **options) -> list[str]:
    return [document.text for document in load_corpus(str(spec), **options).documents()]


def test_python_has_the_help_topics_and_the_library_in_a_fixed_order():
    corpus = load_corpus("python")
    documents = list(corpus.documents())
    names = [document.name for document in documents]
    assert names[0].startswith("pydoc_data.topics['")
    assert [n for n in names if n.endswith("argparse.py")] and [n for n in names if n.endswith("asyncio/tasks.py")]
    assert not [n for n in names if "site-packages" in n or "/test/" in n or "/encodings/" in n]
    assert len(set(names)) == len(names)
    assert 5e6 < sum(len(d.text) for d in documents) < 50e6
    assert list(load_corpus("python").documents()) == documents
    assert load_corpus("python").fingerprint() == corpus.fingerprint()


def test_max_bytes_ends_before_the_document_that_would_exceed_it(text_folder):
    full = texts(text_folder / "*.txt")
    limit = len("".join(full[:3])) + 5
    assert texts(text_folder / "*.txt", max_bytes=limit) == full[:3]
    with pytest.raises(DataError, match="no text within max_bytes=10"):
        texts(text_folder / "*.txt", max_bytes=10)


def test_text_files_by_glob_in_sorted_order_with_folders(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.md").write_text("two")
    (tmp_path / "1.md").write_bytes("\N{BYTE ORDER MARK}one\r\nZeile: \u00e4\u20ac\U0001f600".encode())
    (tmp_path / "empty.md").write_text(" \n")
    assert texts(tmp_path / "**/*.md") == ["one\r\nZeile: \u00e4\u20ac\U0001f600", "two"]
    assert texts(tmp_path / "1.md") == ["one\r\nZeile: \u00e4\u20ac\U0001f600"]


def test_jsonl_takes_the_text_field_and_passes_over_blank_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"body": t, "id": i}) for i, t in enumerate(["one", "", "zwei \u00e4", None])]
    path.write_text("\n".join([*lines[:2], "", *lines[2:]]))
    documents = list(load_corpus(str(path), text_field="body").documents())
    assert [(d.text, d.name) for d in documents] == [("one", f"{path}:1"), ("zwei \u00e4", f"{path}:4")]


def test_parquet_takes_the_text_column(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [f"text {i}" for i in range(3000)]
    table = pyarrow.table({"text": [*rows, None], "n": list(range(3001))})
    pyarrow.parquet.write_table(table, path, row_group_size=700)
    assert texts(path) == rows
    with pytest.raises(DataError, match="no column 'txt'; did you mean 'text'"):
        texts(path, text_field="txt")
    path.write_bytes(b"PAR1" + b"\xff" * 999 + path.read_bytes()[1003:])
    with pytest.raises(DataError, match="a.parquet: a damaged Parquet file"):
        texts(path)
    path.write_bytes(b"PAR1 but not really")
    with pytest.raises(DataError, match="a.parquet: no readable Parquet file"):
        texts(path)


def test_hugging_face_datasets_from_a_local_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    rows = [f"text {i}" for i in range(2500)]
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in rows))
    (folder / "validation.jsonl").write_text(json.dumps({"text": "held out"}) + "\n")
    assert texts(f"hf:{folder}") == rows
    assert texts(f"hf:{folder}", split="validation") == ["held out"]
    with pytest.raises(DataError, match="no column 'txt'; did you mean 'text'"):
        texts(f"hf:{folder}", text_field="txt")
    with pytest.raises(DataError, match=r"could not load.*split 'test'"):
        texts(f"hf:{folder}", split="test")
    saved = tmp_path / "saved"
    datasets.Dataset.from_dict({"text": rows}).save_to_disk(saved)
    assert texts(f"hf:{saved}") == rows
    corpus = load_corpus(f"hf:{saved}")
    assert corpus.fingerprint() == load_corpus(f"hf:{folder}").fingerprint()  # the same text, however stored


@pytest.mark.parametrize(("package", "spec"), [("datasets", "hf:name"), ("pyarrow.parquet", "{}/a.parquet")])
def test_a_missing_package_is_named_with_the_way_to_get_it(package, spec, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"needs the package .*pip install 'narrowgauge\[hf\]'"):
        texts(spec.format(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pyton", "unknown corpus 'pyton'; did you mean 'python'"),
        ("wikipedia", "unknown corpus 'wikipedia'; valid: "),
        ("nowhere/*.txt", "no file matches 'nowhere/\\*.txt' in "),
        ("missing.jsonl", "no file matches"),
    ],
)
def test_unknown_corpora_and_globs_without_a_match(name, message):
    with pytest.raises(DataError, match=message):
        load_corpus(name)


def test_a_folder_is_answered_with_a_pattern(tmp_path):
    with pytest.raises(DataError, match=r"is a folder: say which files in it, e.g. '.*/\*\*/\*.txt'"):
        load_corpus(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("a.txt", b"", "holds no text"),
        ("a.txt", b" \n\n ", "holds no text"),
        ("a.txt", b"one\ntwo\0three", r"a.txt:2: binary data \(a NUL byte\)"),
        ("a.txt", b"one\n\ntwo \xff\xfe", r"a.txt:3: byte 0xFF is not UTF-8"),
        ("a.jsonl", b"\n", "holds no text"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": "bad}\n', r"a.jsonl:2: no JSON"),
        ("a.jsonl", b'{"text": "fine"}\n[1, 2]\n', r"a.jsonl:2: a JSON list, expected an object with 'text'"),
        ("a.jsonl", b'{"txt": "fine"}\n', r"a.jsonl:1: no field 'text'; did you mean 'txt'"),
        ("a.jsonl", b"{}\n", r"a.jsonl:1: no field 'text'; valid: none"),
        ("a.jsonl", b'{"text": ' + b"[" * 99999, r"a.jsonl:1: no JSON that can be read"),
        ("a.jsonl", b'{"text": 1' + b"0" * 5000 + b"}", r"a.jsonl:1: no JSON that can be read"),
        ("a.jsonl", b'{"text": 5}\n', r"a.jsonl:1: 'text' is a int, expected text"),
        ("a.jsonl", b'{"text": "a\\u0000b"}\n', r"a.jsonl:1: 'text' holds a NUL character"),
        ("a.jsonl", b'{"text": "a\\ud800b"}\n', r"a.jsonl:1: 'text' holds a lone surrogate at character 1"),
        ("a.jsonl", b'{"text": "a"}\n\x00\x01', r"a.jsonl:2: binary data"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xe4"}', r"a.jsonl:2: byte 0xE4 is not UTF-8"),
    ],
)
def test_empty_binary_and_broken_text_is_refused_with_file_and_line(file, content, message, tmp_path):
    (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError, match=message):
        texts(tmp_path / file)


def test_fingerprint_depends_on_text_and_where_documents_end(tmp_path):
    def fingerprint(*parts):
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps({"text": part}) + "\n" for part in parts))
        return load_corpus(str(path)).fingerprint()

    assert len({fingerprint("ab", "c"), fingerprint("a", "bc"), fingerprint("abc"), fingerprint("c", "ab")}) == 4
    assert fingerprint("ab", "c") == fingerprint("ab", "", "c")
