import numpy as np
import pytest
from tokenizers import Tokenizer as InnerTokenizer
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from narrowgauge.data.tokenizer import END_OF_TEXT, Tokenizer
from narrowgauge.errors import DataError

HARD = [
    "plain text",
    "  leading, trailing   and\n\n\tmixed \r\n white space  ",
    "äöü € 漢字 \U0001f600 e\u0301",
    "".join(chr(i) for i in range(1, 256)),
    f"a document may say {END_OF_TEXT} without ending",
    "x" * 5000,
    "",
]


@pytest.fixture(scope="module", params=["bpe", "bytes"])
def tokenizer(request, sentences) -> Tokenizer:
    if request.param == "bytes":
        return Tokenizer.bytes()
    return Tokenizer.train([sentences(i, 20) for i in range(20)], 300)


@pytest.mark.parametrize("text", HARD)
def test_decoding_gives_back_every_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.end_id not in ids
    assert int(tokenizer.token_bytes()[ids].sum()) == len(text.encode())


def test_byte_tokens_are_the_bytes():
    tokenizer = Tokenizer.bytes()
    assert (tokenizer.vocab_size, tokenizer.end_id) == (257, 256)
    for text in HARD:
        assert tokenizer.encode(text) == list(text.encode())
        # the fast path against the library's own
        assert tokenizer._inner.encode(text, add_special_tokens=False).ids == list(text.encode())


def test_training_gives_the_asked_size_deterministically_and_compresses(sentences):
    texts = [sentences(i, 20) for i in range(20)]
    a, b = Tokenizer.train(texts, 300), Tokenizer.train(iter(texts), 300)
    assert a.vocab_size == 300 and a.to_json() == b.to_json() and a.fingerprint() == b.fingerprint()
    text = sentences(99, 10)
    assert len(a.encode(text)) < 0.6 * len(text)
    assert a.fingerprint() != Tokenizer.train(texts, 301).fingerprint()


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(DataError, match="vocab_size=256: expected at least 257"):
        Tokenizer.train(["text"], 256)
    assert Tokenizer.train(["text"], 257).decode(Tokenizer.train(["text"], 257).encode("äh")) == "äh"


def test_batches_equal_single_texts(tokenizer):
    batch = tokenizer.encode_documents(HARD)
    assert all(ids.dtype == np.int64 for ids in batch)
    assert [ids.tolist() for ids in batch] == [tokenizer.encode(text) for text in HARD]


def test_end_of_text_is_left_out_when_decoding(tokenizer):
    ids = [*tokenizer.encode("one"), tokenizer.end_id, *tokenizer.encode("two")]
    assert tokenizer.decode(ids) == "onetwo"


def test_the_file_loads_again_and_in_transformers(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    loaded = Tokenizer.load(path)
    assert loaded.fingerprint() == tokenizer.fingerprint() and loaded.vocab_size == tokenizer.vocab_size
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=END_OF_TEXT)
    assert theirs.eos_token_id == tokenizer.end_id and len(theirs) == tokenizer.vocab_size
    for text in HARD[:4]:
        assert theirs(text).input_ids == tokenizer.encode(text) == loaded.encode(text)
        assert theirs.decode(tokenizer.encode(text), clean_up_tokenization_spaces=False) == text


def test_unusable_tokenizer_files_are_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(DataError, match="no readable tokenizer.json"):
        Tokenizer.load(path)
    path.write_text("{}")
    with pytest.raises(DataError, match="no readable tokenizer.json"):
        Tokenizer.load(path)
    InnerTokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(path))
    with pytest.raises(DataError, match="expected a byte-level tokenizer"):
        Tokenizer.load(path)
    inner = Tokenizer.bytes()._inner
    with pytest.raises(DataError, match=r"no token <\|endoftext\|>"):
        fresh = InnerTokenizer(inner.model)
        fresh.decoder = inner.decoder
        Tokenizer(fresh)
