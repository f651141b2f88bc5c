"""How well a reward model tells chosen from rejected, by closed formulas: rewards are sums of tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from narrowgauge.data.conversations import Format, check_records
from narrowgauge.errors import DataError
from narrowgauge.integrations.finetune_models import Loaded
from narrowgauge.integrations.preferences import preferences

PAD = 7


class Letters:
    """A token for each letter: its number in the alphabet; '.' ends a text."""

    eos_token, pad_token_id = ".", PAD

    def __call__(self, text: str) -> dict[str, Any]:
        return {"input_ids": [ord(letter) - ord("a") if letter != "." else 100 for letter in text]}

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, return_dict: bool, **more: Any
    ) -> Any:
        assert tokenize and return_dict and more["tools"][0]["function"]["name"] == "f"
        return self("".join(message["content"] for message in messages))


class Sums(nn.Module):
    """The reward is a hundredth of the sum of the tokens that are attended to, in bfloat16 as a half model's."""

    device = torch.device("cpu")
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=16))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, use_cache: bool) -> Any:
        assert not self.training and not use_cache and not torch.is_grad_enabled()
        assert bool((input_ids[attention_mask == 0] == PAD).all())
        return SimpleNamespace(logits=((input_ids * attention_mask).sum(1, keepdim=True) / 128).bfloat16())


def records(folder: Path, rows: list[dict[str, Any]]) -> Any:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return check_records(path, [Format.PREFERENCE])


ROWS = [
    {"prompt": "b", "chosen": "qq", "rejected": "bb."},  # 32 above 2: both end alike
    {"prompt": "ccc", "chosen": "b", "rejected": "qqqq"},  # 1 below 64
    {"prompt": "d", "chosen": "q", "rejected": "q"},  # equal: not told apart
    {"prompt": "b", "chosen": "q" * 16, "rejected": "b"},  # too long
    {"prompt": "b", "chosen": "b", "rejected": "q" * 16},  # and so is this half
    {"prompt": "a", "chosen": "y" * 12 + "m", "rejected": "b"},  # 400, 101: bfloat16 has no difference
]
MARGINS = [30 / 128, -63 / 128, 0.0, 299 / 128]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_numbers_are_those_of_the_pairs_that_fit_whatever_the_batch(tmp_path: Path, batch_size: int) -> None:
    model, told = Sums(), []
    model.train()
    found = preferences(
        Loaded(model, Letters()), records(tmp_path, ROWS), batch_size=batch_size,
        on_progress=lambda *at: told.append(at),
    )  # fmt: skip
    assert model.training and (found.pairs, found.too_long) == (4, 2)
    assert found.accuracy == 0.5  # a tie is none
    assert found.margin == pytest.approx(sum(MARGINS) / 4, abs=1e-9)
    assert found.loss == pytest.approx(sum(math.log1p(math.exp(-margin)) for margin in MARGINS) / 4, abs=1e-9)
    assert all(count == 6 for _, count in told) and len(told) == 4 // batch_size


def test_halves_of_messages_are_written_by_the_template_with_their_tools(tmp_path: Path) -> None:
    def said(text: str, role: str = "assistant") -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    row = {"prompt": said("q", "user"), "chosen": said("c"), "rejected": said("b"), "tools": [tool]}
    found = preferences(Loaded(Sums(), Letters()), records(tmp_path, [row]))
    assert (found.pairs, found.accuracy, found.margin) == (1, 1.0, 1 / 128)


def test_a_length_that_no_pair_fits_is_an_error(tmp_path: Path) -> None:
    model = Sums()
    with pytest.raises(DataError, match="expected pairs within max_length=2, found none: raise it"):
        preferences(Loaded(model, Letters()), records(tmp_path, ROWS[:2]), max_length=2)
