"""How well a reward model tells chosen from rejected, on held-out JSON Lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from narrowgauge.data.conversations import Records
from narrowgauge.errors import DataError
from narrowgauge.integrations.finetune_models import Loaded, length_for

Ids = list[int]


@dataclass(frozen=True)
class Preferences:
    """accuracy: share of pairs whose chosen half has the higher reward. loss: mean -log sigmoid of the difference of
    rewards, nats a pair. margin: mean difference. pairs: that were read. too_long: pairs left out, as in training,
    because a half is longer than the length."""

    accuracy: float
    loss: float
    margin: float
    pairs: int
    too_long: int


def preferences(
    loaded: Loaded,
    records: Records,
    *,
    max_length: int = 0,
    batch_size: int = 8,
    on_progress: Callable[[int, int], None] = lambda done, all_: None,
) -> Preferences:
    """Read all pairs once, in order. The tokens are those of TRL's RewardTrainer, the rewards float32.

    loaded: a sequence classifier with one output. Raises DataError where every pair is too long.
    """
    model, tokenizer = loaded
    length = length_for(model, max_length)
    margins: list[Tensor] = []
    batch: list[tuple[Ids, Ids]] = []
    pairs = too_long = 0
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for chosen, rejected in _tokenized(records, tokenizer):
            if max(len(chosen), len(rejected)) > length:
                too_long += 1
                continue
            pairs += 1
            batch.append((chosen, rejected))
            if len(batch) == batch_size:
                margins.append(_margins(model, batch, tokenizer.pad_token_id))
                batch.clear()
                on_progress(pairs + too_long, records.count)
        if batch:
            margins.append(_margins(model, batch, tokenizer.pad_token_id))
    model.train(was_training)
    if not margins:
        raise DataError(f"{records.path}: expected pairs within max_length={length}, found none: raise it")
    found = torch.cat(margins).double()
    return Preferences(
        float((found > 0).double().mean()), float(-F.logsigmoid(found).mean()), float(found.mean()), pairs, too_long
    )


def _tokenized(records: Records, tokenizer: Any) -> Iterator[tuple[Ids, Ids]]:
    for row in records.rows():
        yield _half(row, "chosen", tokenizer), _half(row, "rejected", tokenizer)


def _half(row: dict[str, Any], name: str, tokenizer: Any) -> Ids:
    prompt, answer = row.get("prompt"), row[name]
    if isinstance(answer, str):
        text = answer if answer.endswith(tokenizer.eos_token) else answer + tokenizer.eos_token
        return tokenizer((prompt or "") + text)["input_ids"]
    more = {"tools": row.get("tools"), **(row.get("chat_template_kwargs") or {})}
    return tokenizer.apply_chat_template((prompt or []) + answer, tokenize=True, return_dict=True, **more)["input_ids"]


def _margins(model: Any, batch: list[tuple[Ids, Ids]], pad: int) -> Tensor:
    """Rewards of the chosen less those of the rejected, float32 [pairs]."""
    halves = [chosen for chosen, _ in batch] + [rejected for _, rejected in batch]
    longest = max(len(ids) for ids in halves)

    def filled(rows: list[Ids], value: int) -> Tensor:
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows], device=model.device)

    mask = filled([[1] * len(ids) for ids in halves], 0)
    rewards = model(input_ids=filled(halves, pad), attention_mask=mask, use_cache=False).logits.squeeze(-1).float()
    chosen, rejected = rewards.chunk(2)
    return chosen - rejected
