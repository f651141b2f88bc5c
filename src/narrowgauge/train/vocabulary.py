"""Reductions over the vocabulary with gradients of their own: log-probability, entropy and KL divergence of tokens.

Logits [..., T, V] in 16 bits are widened to float32 a chunk at a time, in forward and again in backward: what is saved
is the logits as they are, and a few numbers a token. `log_probabilities` has the public functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_VALUES = 1 << 22  # logits widened at a time: 16 MiB in float32
# below this |log(q / p)|, p * expm1(log(q / p)) has more digits than q - p
_CLOSE = 0.5


def log_probs_of(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """[..., T, V], int64 [..., T] -> [..., T]; a negative label: 0."""
    flat = _as_batch(logits)
    return _LogProbs.apply(flat, labels.reshape(flat.shape[:-1]), temperature).view(labels.shape)  # type: ignore[attr-defined]


def entropy_of(logits: Tensor, temperature: float) -> Tensor:
    """[..., T, V] -> [..., T]."""
    return _Entropy.apply(_as_batch(logits), temperature).view(logits.shape[:-1])  # type: ignore[attr-defined]


def vocabulary_kl_of(logits: Tensor, reference_logits: Tensor, temperature: float) -> Tensor:
    """Twice [..., T, V] -> [..., T]."""
    return _KL.apply(_as_batch(logits), _as_batch(reference_logits), temperature).view(logits.shape[:-1])  # type: ignore[attr-defined]


def _as_batch(logits: Tensor) -> Tensor:
    """[B, T, V]: a view, also of a slice along T, wherever there are at most two leading dimensions."""
    if logits.ndim == 3:
        return logits
    return logits.reshape(-1, *logits.shape[-2:]) if logits.ndim > 1 else logits[None, None]


def _chunks(shape: torch.Size) -> Iterator[tuple[slice, slice]]:
    """Slices of [B, T, V] along B and T with at most CHUNK_VALUES values, or one token's."""
    batch, tokens, vocabulary = shape
    rows = max(1, CHUNK_VALUES // max(vocabulary, 1))
    in_tokens = max(1, min(tokens, rows))
    in_batch = max(1, rows // in_tokens)
    for b in range(0, batch, in_batch):
        for t in range(0, tokens, in_tokens):
            yield slice(b, b + in_batch), slice(t, t + in_tokens)


def _widen(logits: Tensor, temperature: float) -> Tensor:
    wide = logits.to(torch.float64 if logits.dtype is torch.float64 else torch.float32)
    return wide if temperature == 1.0 else wide / temperature


def _per_token(logits: Tensor) -> Tensor:
    dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
    return torch.empty(logits.shape[:-1], dtype=dtype, device=logits.device)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
        found, normalizers = _per_token(logits), _per_token(logits)
        counts = labels >= 0
        at = labels.clamp(min=0)[..., None]
        for chunk in _chunks(logits.shape):
            x = _widen(logits[chunk], temperature)
            normalizers[chunk] = x.logsumexp(dim=-1)
            found[chunk] = x.gather(-1, at[chunk])[..., 0] - normalizers[chunk]
        ctx.save_for_backward(logits, labels, normalizers)
        ctx.temperature = temperature
        return found.masked_fill_(~counts, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        logits, labels, normalizers = ctx.saved_tensors
        counts = labels >= 0
        grad = torch.empty_like(logits)
        scale = (grad_output.to(normalizers.dtype) / ctx.temperature).masked_fill(~counts, 0.0)[..., None]
        at = labels.clamp(min=0)[..., None]
        for chunk in _chunks(logits.shape):
            x = _widen(logits[chunk], ctx.temperature)
            probabilities = (x - normalizers[chunk][..., None]).exp_()
            # onehot - p at the label is 1 - p = -expm1(log p), which keeps its digits where p is nearly 1
            at_label = -torch.expm1(x.gather(-1, at[chunk]) - normalizers[chunk][..., None])
            there = probabilities.neg_().scatter_(-1, at[chunk], at_label).mul_(scale[chunk])
            # a row that counts for nothing may hold anything
            grad[chunk] = there.masked_fill_(~counts[chunk][..., None], 0.0)
        return grad, None, None


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, temperature: float) -> Tensor:
        found, normalizers = _per_token(logits), _per_token(logits)
        for chunk in _chunks(logits.shape):
            log_p = _widen(logits[chunk], temperature)
            normalizers[chunk] = log_p.logsumexp(dim=-1)
            log_p = log_p - normalizers[chunk][..., None]
            found[chunk] = -_times_log(log_p.exp(), log_p).sum(dim=-1)
        ctx.save_for_backward(logits, normalizers, found)
        ctx.temperature = temperature
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        logits, normalizers, found = ctx.saved_tensors
        grad = torch.empty_like(logits)
        scale = (grad_output.to(found.dtype) / ctx.temperature)[..., None]
        for chunk in _chunks(logits.shape):
            log_p = _widen(logits[chunk], ctx.temperature) - normalizers[chunk][..., None]
            p = log_p.exp()
            grad[chunk] = _times_log(p, log_p + found[chunk][..., None]).neg_().mul_(scale[chunk])
        return grad, None


class _KL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, reference: Tensor, temperature: float) -> Tensor:
        found, shift, of_policy = _per_token(logits), _per_token(logits), _per_token(logits)
        for chunk in _chunks(logits.shape):
            x, y = _widen(logits[chunk], temperature), _widen(reference[chunk], temperature)
            of_policy[chunk] = x.logsumexp(dim=-1)
            p = (x - of_policy[chunk][..., None]).exp_()
            shift[chunk] = _shift(x, y, p, of_policy[chunk])
            r = _log_ratio(x, y, shift[chunk])
            # sum p (q/p - 1 - log(q/p)): never negative, each term keeps its digits; p * (q/p - 1) add up to nothing
            term = _difference(x, y, p, r, of_policy[chunk], shift[chunk]) - _times_log(p, r)
            found[chunk] = term.sum(dim=-1).clamp_(min=0.0)
        ctx.save_for_backward(logits, reference, of_policy, shift, found)
        ctx.temperature = temperature
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        logits, reference, of_policy, shift, found = ctx.saved_tensors
        needs_policy, needs_reference, _ = ctx.needs_input_grad
        grad = torch.empty_like(logits) if needs_policy else None
        of_reference = torch.empty_like(reference) if needs_reference else None
        scale = (grad_output.to(found.dtype) / ctx.temperature)[..., None]
        for chunk in _chunks(logits.shape):
            x, y = _widen(logits[chunk], ctx.temperature), _widen(reference[chunk], ctx.temperature)
            p = (x - of_policy[chunk][..., None]).exp_()
            r = _log_ratio(x, y, shift[chunk])
            if grad is not None:
                grad[chunk] = _times_log(p, r + found[chunk][..., None]).neg_().mul_(scale[chunk])
            if of_reference is not None:
                of_reference[chunk] = _difference(x, y, p, r, of_policy[chunk], shift[chunk]).mul_(scale[chunk])
        return grad, of_reference, None


def _shift(x: Tensor, y: Tensor, p: Tensor, of_policy: Tensor) -> Tensor:
    """logsumexp(y) - logsumexp(x): where x and y are close, by their differences, which are exact."""
    apart = y - x
    close = (apart.abs().amax(dim=-1) < _CLOSE) if apart.shape[-1] else torch.ones_like(of_policy, dtype=torch.bool)
    near = torch.log1p(_times_log(p, torch.expm1(apart.clamp(-_CLOSE, _CLOSE))).sum(dim=-1))
    return torch.where(close, near, y.logsumexp(dim=-1) - of_policy)


def _log_ratio(x: Tensor, y: Tensor, shift: Tensor) -> Tensor:
    """log(q / p); NaN where both are 0."""
    return (y - x) - shift[..., None]


def _difference(x: Tensor, y: Tensor, p: Tensor, r: Tensor, of_policy: Tensor, shift: Tensor) -> Tensor:
    """q - p."""
    q = (y - (of_policy + shift)[..., None]).exp_()
    return torch.where(r.abs() < _CLOSE, p * torch.expm1(r), q - p)


def _times_log(p: Tensor, logarithm: Tensor) -> Tensor:
    """p * logarithm, which is 0 where p is."""
    return torch.where(p > 0, p * logarithm, 0.0)
