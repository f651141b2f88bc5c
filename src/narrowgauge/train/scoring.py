"""How preference training calls models: logits, values and scores of sequences, whoever built the model.

A model is this library's GPT, or a module that returns `.logits` for (input_ids, attention_mask), as transformers' do.
Sequences are padded on the right, where a causal model does not see it: positions are the same with and without.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import ConfigError, DataError
from narrowgauge.models.gpt import GPT


def plain(model: nn.Module) -> nn.Module:
    """The module itself where torch.compile wrapped it."""
    return getattr(model, "_orig_mod", model)


def logits_of(model: nn.Module, ids: Tensor, attention: Tensor) -> Tensor:
    """ids int64 [B, T], attention bool [B, T], True on tokens -> what the model says of them, mostly [B, T, V]."""
    if isinstance(plain(model), GPT):
        return model(ids)[0]
    found = model(input_ids=ids, attention_mask=attention.long())
    logits = found if isinstance(found, Tensor) else getattr(found, "logits", None)
    if logits is None:
        raise ConfigError(
            f"{type(plain(model)).__name__} returned a {type(found).__name__}: expected `.logits` for (input_ids, "
            "attention_mask); wrap it in a module that returns an object with that attribute"
        )
    return logits


def values_of(model: nn.Module, ids: Tensor, attention: Tensor) -> Tensor:
    """One float32 number a token, [B, T], of a model whose logits are [B, T, 1] or [B, T]."""
    values = logits_of(model, ids, attention)
    if values.shape != ids.shape and values.shape != (*ids.shape, 1):
        raise ConfigError(
            f"the value model's logits have shape {list(values.shape)} for ids {list(ids.shape)}: expected one number "
            "a token; wrap a language model in narrowgauge.train.value_head.ValueHead"
        )
    return values.reshape(ids.shape).float()


def scores_of(model: nn.Module, ids: Tensor, attention: Tensor) -> Tensor:
    """One float32 number a sequence, [B]: logits [B, 1] or [B], or of one number a token that of the last token."""
    logits = logits_of(model, ids, attention)
    batch = ids.shape[0]
    if logits.numel() == batch:
        return logits.reshape(batch).float()
    if logits.shape == ids.shape or logits.shape == (*ids.shape, 1):
        last = attention.sum(dim=1, keepdim=True) - 1
        return logits.reshape(ids.shape).gather(1, last)[:, 0].float()
    raise ConfigError(
        f"the reward model's logits have shape {list(logits.shape)} for ids {list(ids.shape)}: expected one number a "
        "sequence or a token, e.g. of AutoModelForSequenceClassification with num_labels=1, or of a ValueHead"
    )


def padded(rows: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of ids as int64 [B, T], padded on the right, and bool [B, T], True on tokens."""
    longest = max((len(row) for row in rows), default=0)
    ids = torch.full((len(rows), longest), pad_id, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    attention = torch.arange(longest)[None] < lengths[:, None]
    return ids.to(device), attention.to(device)


def context_of(model: nn.Module) -> int | None:
    """Longest sequence in tokens that the model takes, or None where it does not say."""
    config = getattr(plain(model), "config", None)
    for name in ("context", "max_position_embeddings", "n_positions"):
        found = getattr(config, name, None)
        if isinstance(found, int) and found > 0:
            return found
    return None


def vocabulary_of(model: nn.Module) -> int | None:
    """Number of token ids that the model knows, or None where it does not say."""
    found = getattr(getattr(plain(model), "config", None), "vocab_size", None)
    return found if isinstance(found, int) else None


def checked_prompts(
    prompts: Sequence[Sequence[int] | Tensor], model: nn.Module, max_new_tokens: int, long_prompts: str
) -> list[list[int]]:
    """Prompts as lists of ids that leave room for `max_new_tokens`; those too long raise DataError or are truncated.

    Raises DataError, naming the prompt, for one that is empty or has an id outside the vocabulary.
    """
    context, vocabulary = context_of(model), vocabulary_of(model)
    room = None if context is None else context - max_new_tokens
    if room is not None and room < 1:
        raise ConfigError(
            f"max_new_tokens={max_new_tokens} in a context of {context} tokens leaves no room for a prompt: lower it"
        )
    found = []
    for number, prompt in enumerate(prompts):
        ids = [int(i) for i in (prompt.tolist() if isinstance(prompt, Tensor) else prompt)]
        if not ids:
            raise DataError(f"prompt {number} is empty: expected at least one token id, e.g. the beginning of a text")
        for i in ids:
            if i < 0 or (vocabulary is not None and i >= vocabulary):
                expected = "at least 0" if vocabulary is None else f"0 to {vocabulary - 1}"
                raise DataError(f"prompt {number}: token id {i}, expected {expected}: was another tokenizer used?")
        if room is not None and len(ids) > room:
            if long_prompts == "error":
                raise DataError(
                    f"prompt {number} has {len(ids)} tokens: expected at most {room}, as the context is {context} and "
                    f"max_new_tokens={max_new_tokens}; shorten it, or set long_prompts='truncate'"
                )
            ids = ids[-room:]
        found.append(ids)
    return found


@contextlib.contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """The model in train() or eval() mode; afterwards as it was."""
    was = model.training
    model.train(training)
    try:
        yield
    finally:
        model.train(was)


def turn_off_dropout(model: nn.Module) -> None:
    """Let the model be the same function in train() as in eval(): the ratio of an unchanged policy to itself is 1."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):  # transformers' attention, by functional
            module.attention_dropout = 0.0  # type: ignore[assignment]


def parameters_of_forward(model: nn.Module) -> Any:
    """Names that the model's forward takes."""
    return inspect.signature(model.forward).parameters
