"""Casts at speed: each call takes the fastest path for its tensor, and all paths give the same bits.

Compiled and traced code (torch.compile, FakeTensorMode, any dispatch mode) sees one opaque operator
of the `narrowgauge` namespace per call; eager code skips torch's dispatcher, which would cost more than a small cast.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.numerics import formats, scaling
from narrowgauge.numerics.formats import E4M3FN, E5M2, Format
from narrowgauge.numerics.kernels import twin

# below this many values a few torch operations are faster than the passage to Numba
MIN_NUMBA = 1024

_INPUTS = (torch.float32, torch.bfloat16, torch.float16)
_CARRIERS = (None, torch.float32, torch.bfloat16)


class Quantized(NamedTuple):
    """What `quantize` returns; None for what was not asked for. The counts are 0-dimensional int64 tensors."""

    codes: Tensor | None
    carrier: Tensor | None
    saturated: Tensor | None
    flushed: Tensor | None


def amax(x: Tensor) -> Tensor:
    """The largest magnitude of `x`, 0-dimensional float32: 0 for an empty tensor, NaN or infinity where `x` has it."""
    if _is_traced(x):
        return torch.ops.narrowgauge.amax(x)
    return _amax(x)


def quantize(
    x: Tensor,
    quant_scale: Tensor | None,
    fmt: Format,
    *,
    saturating: bool | None = None,
    codes: bool = True,
    carrier: torch.dtype | None = None,
    count: bool = False,
) -> Quantized:
    """Cast to codes of `fmt` by round to nearest even: codes = encode(x * quant_scale).

    x: float32, bfloat16 or float16 of any shape and strides. quant_scale: float32, 0-dimensional (or broadcastable
    against `x`); None means 1. saturating: as in `rounding.encode`, None for the format's own rule. codes: return codes
    (contiguous, of `fmt.dtype`). carrier: return the values of the codes, without the scale, in this dtype (float32 or
    bfloat16), which a matrix product can read. count: return the number of values with |x * quant_scale| > max, and of
    values that are not zero but whose code is.
    """
    if _is_traced(x):
        outputs = torch.ops.narrowgauge.quantize(x, quant_scale, fmt.name, saturating, codes, carrier, count)
        wanted = (codes, carrier is not None, count, count)
        return Quantized(*(out if want else None for out, want in zip(outputs, wanted, strict=True)))
    return _quantize(x, quant_scale, fmt, saturating, codes, carrier, count)


def dequantize(codes: Tensor, dequant_scale: Tensor | None, fmt: Format, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes * dequant_scale: the product in float32, then one rounding to `dtype`. None means a scale of 1."""
    if _is_traced(codes):
        return torch.ops.narrowgauge.dequantize(codes, dequant_scale, fmt.name, dtype)
    return _dequantize(codes, dequant_scale, fmt, dtype)


def _is_traced(x: Tensor) -> bool:
    """True where something watches the operators: a compiler, a dispatch mode, a tensor subclass."""
    if torch.compiler.is_compiling():
        return True
    return type(x) not in _PLAIN or torch._C._len_torch_dispatch_stack() > 0


_PLAIN = (Tensor, torch.nn.Parameter)


def _amax(x: Tensor) -> Tensor:
    if x.is_cpu and x.dtype in _INPUTS and x.numel() >= MIN_NUMBA:
        from narrowgauge.numerics.kernels import cpu

        return cpu.amax(x)
    return scaling.tensor_amax(x)


def _quantize(
    x: Tensor,
    quant_scale: Tensor | None,
    fmt: Format,
    saturating: bool | None,
    codes: bool,
    carrier: torch.dtype | None,
    count: bool,
) -> Quantized:
    x = x.detach()
    whole = quant_scale is None or quant_scale.numel() == 1
    if x.is_cpu and fmt in (E4M3FN, E5M2) and x.numel() >= MIN_NUMBA and x.dtype in _INPUTS and saturating is not False:
        if whole and carrier in _CARRIERS:
            from narrowgauge.numerics.kernels import cpu

            saturated, flushed = map(torch.tensor, cpu.count(x, quant_scale, fmt)) if count else (None, None)
            return Quantized(*cpu.quantize(x, quant_scale, fmt, codes, carrier), saturated, flushed)
    return Quantized(*twin.quantize(x.contiguous(), quant_scale, fmt, saturating, codes, carrier, count))


def _dequantize(codes: Tensor, dequant_scale: Tensor | None, fmt: Format, dtype: torch.dtype) -> Tensor:
    whole = dequant_scale is None or dequant_scale.numel() == 1
    if codes.is_cpu and fmt in (E4M3FN, E5M2) and codes.numel() >= MIN_NUMBA and whole and dtype in _CARRIERS:
        from narrowgauge.numerics.kernels import cpu

        return cpu.dequantize(codes, dequant_scale, fmt, dtype)
    return twin.dequantize(codes.contiguous(), dequant_scale, fmt, dtype)


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
    outputs = _quantize(x, quant_scale, formats.ALL[fmt], saturating, codes, carrier, count)
    return tuple(x.new_empty(0) if out is None else out for out in outputs)


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


_LIBRARY.impl("amax", _amax, "CompositeExplicitAutograd")
_LIBRARY.impl("quantize", _quantize_op, "CompositeExplicitAutograd")
_LIBRARY.impl(
    "dequantize",
    lambda codes, scale, fmt, dtype: _dequantize(codes, scale, formats.ALL[fmt], dtype),
    "CompositeExplicitAutograd",
)
torch.library.register_fake("narrowgauge::amax", lambda x: x.new_empty((), dtype=torch.float32), lib=_LIBRARY)
torch.library.register_fake("narrowgauge::quantize", _quantize_fake, lib=_LIBRARY)
torch.library.register_fake(
    "narrowgauge::dequantize", lambda codes, scale, fmt, dtype: codes.new_empty(codes.shape, dtype=dtype), lib=_LIBRARY
)
