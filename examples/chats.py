"""Writes JSON Lines to fine-tune on, from what every Python carries: docstrings of the standard library.

    python examples/chats.py chats.jsonl held-out.jsonl
    narrowgauge sft --model my-model --data chats.jsonl --eval-data held-out.jsonl --steps 60

Each line is a conversation: what does this function do, and the first paragraph of its docstring.
"""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

LONGEST = 400  # characters of an answer
HELD_OUT = 10  # each tenth function is held out


def functions(folder: Path) -> Iterator[tuple[str, str]]:
    """(name, first paragraph of its docstring) of the public functions of a folder of modules, in order."""
    for path in sorted(folder.glob("[a-z]*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            said = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
            if 20 <= len(said) <= LONGEST:
                yield f"{path.stem}.{node.name}", said


def conversation(name: str, said: str) -> dict[str, list[dict[str, str]]]:
    """One line."""
    question = {"role": "user", "content": f"What does {name} do?"}
    return {"messages": [question, {"role": "assistant", "content": said}]}


def main(words: list[str]) -> None:
    """Write both files, and say how many lines they have."""
    train, held_out = (Path(word) for word in words or ("chats.jsonl", "held-out.jsonl"))
    lines = [json.dumps(conversation(*each)) + "\n" for each in functions(Path(sysconfig.get_path("stdlib")))]
    kept = [line for at, line in enumerate(lines) if at % HELD_OUT]
    others = lines[::HELD_OUT]
    train.write_text("".join(kept), encoding="utf-8")
    held_out.write_text("".join(others), encoding="utf-8")
    print(f"{train}: {len(kept)} conversations; {held_out}: {len(others)}")


if __name__ == "__main__":
    main(sys.argv[1:])
