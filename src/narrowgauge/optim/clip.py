"""Clipping of gradients by their total norm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.ops.reduce import GroupReducer, Reducer
from narrowgauge.optim.guard import by_device
from narrowgauge.tensors.local import local_grad
from narrowgauge.tensors.quantized import QuantizedTensor
from narrowgauge.tensors.shares import Share, share_of

Shares = Sequence[tuple[Share, Tensor | None]]  # of each parameter, and its local gradient


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale gradients in place so that their total norm is at most `max_norm`; return the norm before.

    Gradients of any dtype, dense or sparse; the norm is taken in float32 (in float64 where that overflows, and of
    float64 gradients) and returned as a 0-dimensional float32 tensor on the first gradient's device. Of quantized
    gradients with one scale it is taken from the codes, and the factor goes into the scale: the codes stay. A parameter
    that is listed twice counts once. A norm that is infinite or NaN leaves all gradients as they are and is returned,
    so that the step's guard sees them. Call it after `LossScaler.unscale_`. As torch.nn.utils.clip_grad_norm_:
    grad * min(1, max_norm / (norm + 1e-6)).

    With parameters that are parted over processes, or over the stages of a pipeline, all processes call it together:
    each value counts once, and the norm, of which single values travel, has the same bits on all of them.
    """
    if not max_norm > 0.0 or not norm_type > 0.0:
        raise NarrowgaugeError(f"expected max_norm and norm_type above 0, found {max_norm} and {norm_type}")
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    unique = {id(p): p for p in listed}.values()
    shares = [(share_of(p), local_grad(p)) for p in unique]
    grads = [grad for _, grad in shares if grad is not None and grad.numel()]
    if not grads and not any(share.groups for share, _ in shares):
        return torch.zeros(())
    norm = total_norm(shares, norm_type, grads[0].device if grads else next(iter(unique)).device)
    # no branch on the norm: multiplying by one leaves every value as it is, without waiting for the device
    factor = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
    for device, group in by_device(grads).items():
        torch._foreach_mul_([_stored(g) for g in group], factor.to(device))
    return norm


def total_norm(shares: Shares, norm_type: float, device: torch.device) -> Tensor:
    """The norm of all gradients together, on all processes, as `clip_grad_norm_` returns it, on `device`."""
    norm = _norm_in(shares, norm_type, torch.float32, device)
    if not bool(norm.isfinite()):
        # finite gradients whose squares overflow float32 still have a norm
        norm = _norm_in(shares, norm_type, torch.float64, device).float()
    return norm


def _norm_in(shares: Shares, norm_type: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The local norms of what is parted over the same groups, brought together group by group.

    A group's members have the same parameters but for the last group, that of all processes or of a pipeline's stages,
    where one number is left of them. So all members of a group send as many numbers, in the same order.
    """
    found: dict[tuple[Any, ...], list[Tensor]] = {}
    for share, grad in shares:
        counted = found.setdefault(share.groups, [])
        if grad is not None and grad.numel() and share.counted:
            counted.append(grad)
    norms = {groups: _norm_of_all(grads, norm_type, dtype, device) for groups, grads in found.items()}
    while any(norms):
        norms = _combined(norms, norm_type)
    return norms[()]


def _combined(norms: dict[tuple[Any, ...], Tensor], norm_type: float) -> dict[tuple[Any, ...], Tensor]:
    """The norms without the first group of those with most of them, over which they have been brought together."""
    first = max(norms, key=len)[0]
    with_it = [groups for groups in norms if first in groups]
    gathered = _reducer(first).gather(torch.stack([norms[groups] for groups in with_it]))
    reduced: dict[tuple[Any, ...], list[Tensor]] = {}
    for groups, norm in norms.items():
        if first not in groups:
            reduced[groups] = [norm]
    for groups, ranks in zip(with_it, gathered.unbind(dim=1), strict=True):
        rest = tuple(group for group in groups if group is not first)
        reduced.setdefault(rest, []).append(torch.linalg.vector_norm(ranks, norm_type))
    return {groups: torch.linalg.vector_norm(torch.stack(parts), norm_type) for groups, parts in reduced.items()}


def _reducer(group: Any) -> Reducer:
    return group if hasattr(group, "max_") else GroupReducer(group)  # a process group has a `gather` of its own


def _norm_of_all(grads: list[Tensor], norm_type: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    quantized: list[Tensor] = [g for g in grads if isinstance(g, QuantizedTensor)]
    parts = [_norm_of(g, norm_type, dtype) for g in grads if not isinstance(g, QuantizedTensor)]
    if quantized:  # together: there may be thousands
        parts += torch._foreach_norm(quantized, norm_type, dtype=dtype)
    if not parts:
        return torch.zeros((), dtype=dtype, device=device)
    return torch.linalg.vector_norm(torch.stack([part.to(device, dtype) for part in parts]), norm_type)


def _norm_of(grad: Tensor, norm_type: float, dtype: torch.dtype) -> Tensor:
    values = grad.coalesce().values() if grad.is_sparse else grad  # entries of one row add up before they count
    values = values.abs() if values.is_complex() else values
    wide = torch.float64 if values.dtype is torch.float64 else dtype
    return torch.linalg.vector_norm(values, norm_type, dtype=wide)


def _stored(grad: Tensor) -> Tensor:
    """The values that scale with `grad`: for a sparse one its entries, also those that have yet to be added up."""
    return grad._values() if grad.is_sparse else grad
