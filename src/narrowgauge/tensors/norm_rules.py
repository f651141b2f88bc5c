"""What norms and a loss scaler's check do with a QuantizedTensor: they read codes, scale and amax, and no values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.numerics.companding import LINEAR
from narrowgauge.numerics.formats import Format
from narrowgauge.numerics.kernels.counts import count_codes
from narrowgauge.numerics.norms import ORDERS, norms
from narrowgauge.tensors.values import values_of

aten = torch.ops.aten


def _vector_norm(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    q: Any = args[0]
    order, dim = _argument(args, kwargs, 1, "ord", 2), _argument(args, kwargs, 2, "dim", None)
    keeps_dims = _argument(args, kwargs, 3, "keepdim", False)
    dims = range(q.ndim) if dim is None else {d % max(q.ndim, 1) for d in dim}
    if keeps_dims or len(dims) != q.ndim or not _can_count(q, order):
        return NotImplemented
    return _norms_of([q], order)[0].to(kwargs.get("dtype") or q.dtype)


def _argument(args: tuple, kwargs: dict[str, Any], at: int, name: str, default: Any) -> Any:
    return args[at] if len(args) > at else kwargs.get(name, default)


def _foreach_norm(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """As a list of vector norms, in one go for all tensors whose codes can be counted."""
    tensors: Sequence[Any] = args[0]
    order, dtype = _argument(args, kwargs, 1, "ord", 2), _argument(args, kwargs, 2, "dtype", None)
    counted = [isinstance(x, cls) and _can_count(x, order) for x in tensors]
    others = [x for x, is_counted in zip(tensors, counted, strict=True) if not is_counted]
    plain = iter(
        func([values_of(x) if isinstance(x, cls) else x for x in others], order, dtype=dtype) if others else ()
    )
    found = iter(_norms_of([x for x, is_counted in zip(tensors, counted, strict=True) if is_counted], order))
    return [
        next(found).to(dtype or x.dtype) if is_counted else next(plain)
        for x, is_counted in zip(tensors, counted, strict=True)
    ]


def _check_and_unscale(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """torch.amp.GradScaler's: look for non-finite values, and multiply by the inverse of the loss scale."""
    tensors, found_inf, inverse_scale = args
    plain = [x for x in tensors if not isinstance(x, cls)]
    quantized = [x for x in tensors if isinstance(x, cls)]
    if plain:
        func(plain, found_inf, inverse_scale)
    bad = torch.stack([~q.amax.isfinite() for q in quantized]).any()
    found_inf.copy_(torch.where(bad, torch.ones_like(found_inf), found_inf))
    for q in quantized:
        q.mul_(inverse_scale.reshape(()))


RULES = {
    aten.linalg_vector_norm.default: _vector_norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _check_and_unscale,
}


def _can_count(q: Any, order: Any) -> bool:
    """True where the norm follows from how often each code occurs."""
    spec = q.spec
    one_byte = spec.format.dtype.itemsize == 1 and not spec.in_blocks and spec.companding is LINEAR
    # a compiler sees the values, and torch says what it makes of no values
    is_real = type(q.codes) is Tensor and not q.is_meta and not torch.compiler.is_compiling()
    return one_byte and is_real and order in ORDERS and q.codes.numel() > 0


def _norms_of(tensors: list[Any], order: float) -> list[Tensor]:
    """Norms of tensors that can be counted, each float64, on its own device."""
    groups: defaultdict[tuple[Format, torch.device], list[int]] = defaultdict(list)
    for i, q in enumerate(tensors):
        groups[q.spec.format, q.device].append(i)
    found: list[Tensor] = [torch.empty(0)] * len(tensors)
    for (fmt, _), places in groups.items():
        group = [tensors[i] for i in places]
        counts = count_codes([q.codes for q in group])
        scales, largest = torch.stack([q.dequant_scale for q in group]), torch.stack([q.amax for q in group])
        for i, norm in zip(places, norms(counts, scales, largest, fmt, float(order)).unbind(), strict=True):
            found[i] = norm
    return found
