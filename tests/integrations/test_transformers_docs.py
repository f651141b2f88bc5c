"""What docs/transformers.md shows is what the example does: three lines of a script at most."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
EXAMPLE = (ROOT / "examples" / "huggingface_trainer.py").read_text(encoding="utf-8")


def test_the_diff_adds_at_most_three_lines_and_its_lines_are_those_of_the_example() -> None:
    shown = re.search(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    lines = shown[1].splitlines()
    added = [line[1:] for line in lines if line.startswith("+")]
    assert 1 <= len(added) <= 3 and len(added) == sum(line.startswith("-") for line in lines)
    assert added[0] in EXAMPLE.splitlines()
    call = re.search(r"trainer = Trainer\(.*recipe=", EXAMPLE)
    assert call is not None and "recipe=" in added[1]


def test_the_example_without_those_lines_is_a_script_of_transformers() -> None:
    plain = EXAMPLE.replace(
        "from narrowgauge.integrations.transformers import Trainer", "from transformers import Trainer"
    )
    plain = plain.replace(", recipe=recipe)", ")")
    changed = [line for line in difflib.ndiff(plain.splitlines(), EXAMPLE.splitlines()) if line.startswith("+ ")]
    assert len(changed) == 2
    assert "narrowgauge" not in re.sub(r'(?s)^""".*?"""|ng\.recipe_names\(\)|import narrowgauge as ng', "", plain)
