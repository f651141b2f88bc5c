"""Loss and perplexity of a Hugging Face model on held-out JSON Lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from narrowgauge.data.conversations import Format, Records
from narrowgauge.data.jsonl import Record
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.integrations.finetune_models import Loaded, length_for
from narrowgauge.models.gpt import IGNORED

Ids = list[int]


@dataclass(frozen=True)
class HeldOutLoss:
    """loss: mean cross entropy, nats a token that counts. tokens: those. examples: with at least one. cut: longer than
    the length, of which the end was left out. empty: examples of which no token counts."""

    loss: float
    tokens: int
    examples: int
    cut: int
    empty: int

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is beyond a float."""
        return math.exp(self.loss) if self.loss < 709 else math.inf  # exp(709.8) is the largest double


def held_out_loss(
    loaded: Loaded,
    records: Records,
    *,
    loss_on: str = "auto",
    max_length: int = 0,
    batch_size: int = 8,
    on_progress: Callable[[int, int], None] = lambda done, all_: None,
) -> HeldOutLoss:
    """Read all records once, in order. The tokens, and which of them count, are those of TRL's SFTTrainer.

    loss_on: "auto", "completion" or "all", as in fine-tuning. The loss is the mean over all tokens of the file, in
    float32, however they are batched. Raises DataError where none counts.
    """
    model, tokenizer = loaded
    length = length_for(model, max_length)
    total, tokens, examples, cut, empty = 0.0, 0, 0, 0, 0
    batch: list[tuple[Ids, Ids]] = []
    was_training = model.training
    model.eval()

    def take() -> None:
        nonlocal total, tokens
        loss, count = _loss(model, batch, tokenizer.pad_token_id)
        total, tokens = total + loss, tokens + count
        batch.clear()

    with torch.no_grad():
        for ids, labels in tokenized(records, tokenizer, loss_on):
            cut += len(ids) > length
            ids, labels = ids[:length], labels[:length]
            if all(label == IGNORED for label in labels[1:]):
                empty += 1
                continue
            examples += 1
            batch.append((ids, labels))
            if len(batch) == batch_size:
                take()
                on_progress(examples + empty, records.count)
        if batch:
            take()
    model.train(was_training)
    if not tokens:
        raise DataError(f"{records.path}: expected tokens to predict within max_length={length}, found none: raise it")
    return HeldOutLoss(total / tokens, tokens, examples, cut, empty)


def tokenized(records: Records, tokenizer: Any, loss_on: str) -> Iterator[tuple[Ids, Ids]]:
    """(ids, labels) of each record; labels are the ids, or IGNORED where a token does not count."""
    if records.format not in (Format.TEXT, Format.MESSAGES, Format.PROMPT_COMPLETION):
        raise ConfigError(f"loss of lines with '{records.format}': expected text, messages, or prompt and completion")
    template = None
    if records.format is Format.MESSAGES and loss_on == "completion":
        template = _marked_template(tokenizer)
    for row in records.rows():
        if records.format is Format.TEXT:
            ids = tokenizer(_ended(row["text"], tokenizer))["input_ids"]
            yield ids, ids
        elif records.format is Format.MESSAGES:
            yield _of_messages(row, tokenizer, template)
        else:
            prompt, whole = _of_pair(row, tokenizer)
            same = next((at for at, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
            ignored = 0 if loss_on == "all" else min(same, len(whole))
            yield whole, [IGNORED] * ignored + whole[ignored:]


def _of_messages(row: Record, tokenizer: Any, template: str | None) -> tuple[Ids, Ids]:
    found = tokenizer.apply_chat_template(
        row["messages"], tokenize=True, return_dict=True, tools=row.get("tools"), chat_template=template,
        return_assistant_tokens_mask=template is not None, **(row.get("chat_template_kwargs") or {}),
    )  # fmt: skip
    ids = found["input_ids"]
    if template is None:
        return ids, ids
    return ids, [id_ if said else IGNORED for id_, said in zip(ids, found["assistant_masks"], strict=True)]


def _of_pair(row: Record, tokenizer: Any) -> tuple[Ids, Ids]:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"], tokenizer(prompt + _ended(completion, tokenizer))["input_ids"]
    more = {"tokenize": True, "return_dict": True, "tools": row.get("tools")} | (row.get("chat_template_kwargs") or {})
    before = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, **more)["input_ids"]
    return before, tokenizer.apply_chat_template(prompt + completion, **more)["input_ids"]


def _marked_template(tokenizer: Any) -> str:
    """A chat template that marks what the assistant says. Raises ConfigError where there is none."""
    if "{% generation %}" in tokenizer.chat_template.replace("{%-", "{%").replace("-%}", "%}"):
        return tokenizer.chat_template
    from trl.chat_template_utils import get_training_chat_template

    try:
        marked = get_training_chat_template(tokenizer)
    except ValueError:
        marked = None
    if marked is None:
        raise ConfigError(
            "loss_on=completion: expected a chat template that marks the assistant's words by {% generation %}, found "
            "none: add the marks, or take loss_on=all"
        )
    return marked


def _ended(text: str, tokenizer: Any) -> str:
    return text if text.endswith(tokenizer.eos_token) else text + tokenizer.eos_token


def _loss(model: Any, batch: list[tuple[Ids, Ids]], pad: int) -> tuple[float, int]:
    """(sum of cross entropies, their number) of a batch, filled up on the right."""
    longest = max(len(ids) for ids, _ in batch)

    def filled(rows: list[Ids], value: int) -> Tensor:
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows], device=model.device)

    ids = filled([ids for ids, _ in batch], pad)
    mask = filled([[1] * len(ids) for ids, _ in batch], 0)
    targets = filled([labels for _, labels in batch], IGNORED)[:, 1:]
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    loss = F.cross_entropy(logits.float().transpose(1, 2), targets, ignore_index=IGNORED, reduction="sum")
    return float(loss), int((targets != IGNORED).sum())
