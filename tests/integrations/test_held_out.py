"""Loss on held-out lines: the tokens are TRL's, the loss is a mean over tokens however they are batched."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset

from narrowgauge.data.conversations import Records, check_records
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.integrations.finetune_config import SFTConfig
from narrowgauge.integrations.finetune_models import Loaded, open_directory
from narrowgauge.integrations.held_out import held_out_loss, tokenized
from narrowgauge.layers.report import report
from narrowgauge.recipes.library import recipe
from tiny_chat import TEMPLATE, sums, turn, write_lines, write_model

KINDS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": f"{q} {a}"} for q, a in sums(10)],
    "messages": [
        {"messages": [turn("user", q), turn("assistant", a * 3), turn("user", "?"), turn("assistant", a)]}
        for q, a in sums(10)
    ],
    "pair": [{"prompt": q, "completion": f" {a}"} for q, a in sums(10)],
    "turns": [{"prompt": [turn("user", q)], "completion": [turn("assistant", a)]} for q, a in sums(10)],
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A tiny chat model."""
    return open_directory(write_model(tmp_path_factory.mktemp("model")))


def records(tmp_path: Path, lines: list[dict[str, Any]]) -> Records:
    return check_records(write_lines(tmp_path / "data.jsonl", lines), SFTConfig.formats)


@pytest.mark.parametrize("loss_on", ["auto", "completion", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_labels_are_those_of_trl(kind: str, loss_on: str, loaded: Loaded, tmp_path: Path) -> None:
    if kind == "text" and loss_on == "completion":
        return  # there is none
    is_messages = kind == "messages"
    arguments = trl.SFTConfig(
        str(tmp_path), report_to="none", use_cpu=True, bf16=False, dataloader_pin_memory=False, max_length=128,
        completion_only_loss={"auto": None, "completion": not is_messages, "all": False}[loss_on],
        assistant_only_loss=is_messages and loss_on == "completion", activation_checkpointing=False,
    )  # fmt: skip
    rows = Dataset.from_list(KINDS[kind])
    model = open_directory(write_model(tmp_path / "m")).model
    theirs = trl.SFTTrainer(model, args=arguments, train_dataset=rows, processing_class=loaded.tokenizer)
    ours = list(tokenized(records(tmp_path, KINDS[kind]), loaded.tokenizer, loss_on))
    assert [ids for ids, _ in ours] == [list(row["input_ids"]) for row in theirs.train_dataset]
    assert [labels for _, labels in ours] == [list(row["labels"]) for row in theirs.train_dataset]


def test_the_loss_is_the_mean_over_tokens_however_they_are_batched(loaded: Loaded, tmp_path: Path) -> None:
    lines = records(tmp_path, KINDS["pair"])
    total, count = 0.0, 0
    for ids, labels in tokenized(lines, loaded.tokenizer, "auto"):
        with torch.no_grad():
            log_probs = loaded.model(torch.tensor([ids])).logits.double().log_softmax(-1)[0]
        for at in range(1, len(ids)):
            if labels[at] != -100:
                total, count = total - float(log_probs[at - 1, ids[at]]), count + 1
    for batch_size in (1, 3, 16):
        found = held_out_loss(loaded, lines, batch_size=batch_size)
        assert found.loss == pytest.approx(total / count, rel=1e-5)
        assert (found.tokens, found.examples, found.cut, found.empty) == (count, 10, 0, 0)
    assert found.perplexity == pytest.approx(math.exp(found.loss))


def test_what_does_not_fit_is_cut_and_counted(loaded: Loaded, tmp_path: Path) -> None:
    lines = records(tmp_path, [{"prompt": "a" * 20, "completion": "b"}, {"prompt": "a", "completion": "b" * 20}])
    found = held_out_loss(loaded, lines, max_length=10)
    assert (found.examples, found.cut, found.empty, found.tokens) == (1, 2, 1, 9)
    with pytest.raises(DataError, match="found none"):
        held_out_loss(loaded, lines, max_length=1)


def test_a_recipe_computes_the_loss_in_its_formats(loaded: Loaded, tmp_path: Path) -> None:
    lines = records(tmp_path, KINDS["pair"])
    prepared = open_directory(write_model(tmp_path / "m"), recipe=recipe("fp8_current"))
    assert report(prepared.model).counts()["converted"] >= 14
    wide, narrow = held_out_loss(loaded, lines), held_out_loss(prepared, lines)
    assert 1e-7 < abs(narrow.loss - wide.loss) < 1e-2


def test_marks_are_needed_for_what_the_assistant_says(tmp_path: Path) -> None:
    plain = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    loaded = open_directory(write_model(tmp_path / "m", chat_template=plain))
    with pytest.raises(ConfigError, match=r"marks the assistant's words by \{% generation %\}"):
        held_out_loss(loaded, records(tmp_path, KINDS["messages"]), loss_on="completion")
