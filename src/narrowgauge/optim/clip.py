"""Clipping of gradients by their total norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.optim.guard import by_device
from narrowgauge.tensors.quantized import QuantizedTensor


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale gradients in place so that their total norm is at most `max_norm`; return the norm before.

    Gradients of any dtype, dense or sparse; the norm is taken in float32 (in float64 where that overflows, and of
    float64 gradients) and returned as a 0-dimensional float32 tensor on the first gradient's device. Of quantized
    gradients with one scale it is taken from the codes, and the factor goes into the scale: the codes stay. A parameter
    that is listed twice counts once. A norm that is infinite or NaN leaves all gradients as they are and is returned,
    so that the step's guard sees them. Call it after `LossScaler.unscale_`. As torch.nn.utils.clip_grad_norm_:
    grad * min(1, max_norm / (norm + 1e-6)).
    """
    if not max_norm > 0.0 or not norm_type > 0.0:
        raise NarrowgaugeError(f"expected max_norm and norm_type above 0, found {max_norm} and {norm_type}")
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    unique = {id(p): p for p in listed}.values()
    grads = [p.grad for p in unique if p.grad is not None and p.grad.numel()]
    if not grads:
        return torch.zeros(())
    norm = total_norm(grads, norm_type)
    # no branch on the norm: multiplying by one leaves every value as it is, without waiting for the device
    factor = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
    for device, group in by_device(grads).items():
        torch._foreach_mul_([_stored(g) for g in group], factor.to(device))
    return norm


def total_norm(grads: list[Tensor], norm_type: float) -> Tensor:
    """The norm of all values of `grads` (at least one) together, as `clip_grad_norm_` returns it."""
    norm = _norm_in(grads, norm_type, torch.float32)
    if not bool(norm.isfinite()):
        # finite gradients whose squares overflow float32 still have a norm
        norm = _norm_in(grads, norm_type, torch.float64).float()
    return norm


def _norm_in(grads: list[Tensor], norm_type: float, dtype: torch.dtype) -> Tensor:
    device = grads[0].device
    quantized: list[Tensor] = [g for g in grads if isinstance(g, QuantizedTensor)]
    parts = [_norm_of(g, norm_type, dtype) for g in grads if not isinstance(g, QuantizedTensor)]
    if quantized:  # together: there may be thousands
        parts += torch._foreach_norm(quantized, norm_type, dtype=dtype)
    return torch.linalg.vector_norm(torch.stack([part.to(device, dtype) for part in parts]), norm_type)


def _norm_of(grad: Tensor, norm_type: float, dtype: torch.dtype) -> Tensor:
    values = grad.coalesce().values() if grad.is_sparse else grad  # entries of one row add up before they count
    values = values.abs() if values.is_complex() else values
    wide = torch.float64 if values.dtype is torch.float64 else dtype
    return torch.linalg.vector_norm(values, norm_type, dtype=wide)


def _stored(grad: Tensor) -> Tensor:
    """The values that scale with `grad`: for a sparse one its entries, also those that have yet to be added up."""
    return grad._values() if grad.is_sparse else grad
