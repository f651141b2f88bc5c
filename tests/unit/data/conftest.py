import random
from collections.abc import Callable
from pathlib import Path

import pytest

WORDS = "scale amax tensor codes round nearest even saturate block row weight gradient moment recipe layer".split()


def make_sentences(seed: int, count: int) -> str:
    """Text that repeats words, so that a tokenizer finds pairs to merge."""
    choose = random.Random(seed)
    return "".join(" ".join(choose.choices(WORDS, k=8)).capitalize() + ".\n" for _ in range(count))


@pytest.fixture(scope="session")
def sentences() -> Callable[[int, int], str]:
    """sentences(seed, count) -> text."""
    return make_sentences


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """A folder of 40 text files; a corpus is `folder / "*.txt"`."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02d}.txt").write_text(make_sentences(number, 5 + number % 7))
    return folder
