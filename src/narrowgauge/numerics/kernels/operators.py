"""The casts as operators of torch's `narrowgauge` namespace: opaque to compilers and visible to dispatch modes."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.numerics import formats
from narrowgauge.numerics.kernels import dispatch

_LIBRARY = torch.library.Library("narrowgauge", "DEF")
_LIBRARY.define("amax(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define(
    "quantize(Tensor x, Tensor? quant_scale, str fmt, bool? saturating, bool codes, ScalarType? carrier, bool count)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "dequantize(Tensor codes, Tensor? dequant_scale, str fmt, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _quantize_op(
    x: Tensor,
    quant_scale: Tensor | None,
    fmt: str,
    saturating: bool | None,
    codes: bool,
    carrier: torch.dtype | None,
    count: bool,
) -> tuple[Tensor, ...]:
    """An operator cannot return None: empty tensors stand for what was not asked for."""
    outputs = dispatch.quantize_eagerly(x, quant_scale, formats.ALL[fmt], saturating, codes, carrier, count)
    encoded, *others = (x.new_empty(0) if out is None else out for out in outputs)
    return (_apart(encoded, x), _apart(_apart(others[0], x), encoded), *others[1:])


def _dequantize_op(codes: Tensor, dequant_scale: Tensor | None, fmt: str, dtype: torch.dtype) -> Tensor:
    return _apart(dispatch.dequantize_eagerly(codes, dequant_scale, formats.ALL[fmt], dtype), codes)


def _apart(out: Tensor, other: Tensor) -> Tensor:
    """A copy where a wide cast changed nothing and gave back `other`: an operator may not alias its arguments."""
    return out.clone() if out.data_ptr() == other.data_ptr() else out


def _quantize_fake(
    x: Tensor,
    quant_scale: Tensor | None,
    fmt: str,
    saturating: bool | None,
    codes: bool,
    carrier: torch.dtype | None,
    count: bool,
) -> tuple[Tensor, ...]:
    counts = [x.new_empty((), dtype=torch.int64) if count else x.new_empty(0) for _ in range(2)]
    return (
        x.new_empty(x.shape, dtype=formats.ALL[fmt].dtype) if codes else x.new_empty(0),
        x.new_empty(x.shape, dtype=carrier) if carrier is not None else x.new_empty(0),
        *counts,
    )


_LIBRARY.impl("amax", dispatch.amax_eagerly, "CompositeExplicitAutograd")
_LIBRARY.impl("quantize", _quantize_op, "CompositeExplicitAutograd")
_LIBRARY.impl("dequantize", _dequantize_op, "CompositeExplicitAutograd")
torch.library.register_fake("narrowgauge::amax", lambda x: x.new_empty((), dtype=torch.float32), lib=_LIBRARY)
torch.library.register_fake("narrowgauge::quantize", _quantize_fake, lib=_LIBRARY)
torch.library.register_fake(
    "narrowgauge::dequantize", lambda codes, scale, fmt, dtype: codes.new_empty(codes.shape, dtype=dtype), lib=_LIBRARY
)
