"""Completions drawn from a policy: plain sampling at a temperature, with a cache of keys and values where there is one.

No top-k, no penalties, no processors: what is drawn has the probability that the model's logits say, as importance
ratios and KL estimates need it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from narrowgauge.errors import DivergenceError
from narrowgauge.models.attention import KVCache
from narrowgauge.models.gpt import GPT
from narrowgauge.train.scoring import logits_of, mode, parameters_of_forward, plain

# (all ids [B, T], their mask [B, T], how many of them are new) -> logits of the last, [B, V]
NextLogits = Callable[[Tensor, Tensor, int], Tensor]


@torch.no_grad()
def sample_completions(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    stop_ids: Sequence[int],
    pad_id: int,
    temperature: float = 1.0,
    generator: torch.Generator,
    batch_size: int | None = None,
) -> list[list[int]]:
    """A completion for each prompt: at most `max_new_tokens` ids, up to and including the first of `stop_ids`.

    Runs in eval mode, `batch_size` prompts at a time (None: all). Models that take a cache and position_ids get prompts
    padded on the left; others, prompts of one length at a time. Raises DivergenceError where the probabilities are not
    finite.
    """
    completions: list[list[int]] = [[] for _ in prompts]
    device = next(model.parameters()).device
    with mode(model, training=False):
        for rows in _batches(prompts, batch_size or len(prompts), mixed=_takes_padding(model)):
            longest = max(len(prompts[i]) for i in rows)
            ids = torch.tensor([[pad_id] * (longest - len(prompts[i])) + list(prompts[i]) for i in rows], device=device)
            lengths = torch.tensor([len(prompts[i]) for i in rows], device=device)
            attention = torch.arange(longest, device=device)[None] >= longest - lengths[:, None]
            drawn = _continue(
                _next_logits(model), ids, attention, max_new_tokens, list(stop_ids), pad_id, temperature, generator
            )
            for i, row in zip(rows, drawn.tolist(), strict=True):
                completions[i] = until_stop(row, stop_ids)
    return completions


def until_stop(row: Sequence[int], stop_ids: Sequence[int]) -> list[int]:
    """`row` up to and including its first stop."""
    end = next((k + 1 for k, token in enumerate(row) if token in stop_ids), len(row))
    return list(row[:end])


def _batches(prompts: Sequence[Sequence[int]], size: int, mixed: bool) -> list[list[int]]:
    """Numbers of the prompts that are sampled together; mixed: also of different lengths."""
    groups: dict[int, list[int]] = defaultdict(list)
    for number, prompt in enumerate(prompts):
        groups[0 if mixed else len(prompt)].append(number)
    return [group[at : at + size] for group in groups.values() for at in range(0, len(group), size)]


def _continue(
    next_logits: NextLogits,
    ids: Tensor,
    attention: Tensor,
    max_new_tokens: int,
    stop_ids: list[int],
    pad_id: int,
    temperature: float,
    generator: torch.Generator,
) -> Tensor:
    """ids, attention [B, T] -> the new ids, [B, n]; after a row's stop come others that mean nothing."""
    start, new = ids.shape[1], ids.shape[1]
    stops = torch.tensor(stop_ids, dtype=torch.int64, device=ids.device)
    stopped = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    for _ in range(max_new_tokens):
        token = draw(next_logits(ids, attention, new), temperature, generator)
        token = token.masked_fill(stopped, pad_id)
        ids = torch.cat((ids, token[:, None]), dim=1)
        attention = torch.cat((attention, torch.ones_like(attention[:, :1])), dim=1)
        new = 1
        if stop_ids:
            stopped |= torch.isin(token, stops)
            if bool(stopped.all()):
                break
    return ids[:, start:]


def draw(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """One id for each row of logits [B, V], by softmax(logits / temperature) in float32: int64 [B]."""
    with torch.autocast(logits.device.type, enabled=False):
        probabilities = (logits.float() / temperature).softmax(dim=-1)
    if not bool(probabilities.isfinite().all()):
        raise DivergenceError(
            "the policy's logits are not finite, so nothing can be drawn: expected finite numbers; go back to an "
            "earlier checkpoint, and lower the learning rate or raise kl_coefficient"
        )
    drawn = torch.multinomial(probabilities.to(generator.device), 1, generator=generator)
    return drawn[:, 0].to(logits.device)


def _next_logits(model: nn.Module) -> NextLogits:
    """How this kind of model says what comes next, with its cache if it has one."""
    inner = plain(model)
    if isinstance(inner, GPT):
        cache = KVCache(inner.config.layers, inner.config.context)
        return lambda ids, attention, new: model(ids[:, -new:], cache=cache)[0][:, -1]
    name = _cache_name(model)
    if name is None:
        return lambda ids, attention, new: logits_of(model, ids, attention)[:, -1]
    names = parameters_of_forward(model)
    kept: dict[str, object] = {name: None}
    only_last = {"logits_to_keep": 1} if "logits_to_keep" in names else {}

    def cached(ids: Tensor, attention: Tensor, new: int) -> Tensor:
        unread = ids if kept[name] is None else ids[:, -new:]
        # of padding on the left any position will do: nothing attends to it
        positions = (attention.long().cumsum(dim=1) - 1).clamp(min=0)[:, -unread.shape[1] :]
        told = {"position_ids": positions} if "position_ids" in names else {}
        found = model(input_ids=unread, attention_mask=attention.long(), use_cache=True, **kept, **told, **only_last)
        kept[name] = getattr(found, name, None)
        return found.logits[:, -1]

    return cached


def _cache_name(model: nn.Module) -> str | None:
    """What the model calls its cache, as an argument and in what it returns; None: it has none that we know."""
    names = parameters_of_forward(model)
    # transformers has been renaming the first to the second, model by model
    return next((n for n in ("past_key_values", "cache") if n in names and "use_cache" in names), None)


def _takes_padding(model: nn.Module) -> bool:
    """True where prompts of different lengths can be sampled together: only the cached path tells positions."""
    return _cache_name(model) is not None and "position_ids" in parameters_of_forward(model)
