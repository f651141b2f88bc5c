"""Casts at speed: each call takes the fastest path for its tensor, and all paths give the same bits.

Compiled and traced code (torch.compile, FakeTensorMode, any dispatch mode) sees one opaque operator
of the `narrowgauge` namespace per call; eager code skips torch's dispatcher, which would cost more than a small cast.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.numerics import hadamard, scaling
from narrowgauge.numerics.companding import LINEAR, Companding
from narrowgauge.numerics.formats import BF16, E4M3FN, E5M2, FP16, Format
from narrowgauge.numerics.granularity import Block
from narrowgauge.numerics.kernels import paths, twin
from narrowgauge.numerics.kernels.tracing import is_traced
from narrowgauge.numerics.scaling import ScaleRule

_FAST_FORMATS = (E4M3FN, E5M2)
_INPUTS = (torch.float32, torch.bfloat16, torch.float16)
_CARRIERS = (None, torch.float32, torch.bfloat16)
_CONTIGUOUS = torch.contiguous_format


class Quantized(NamedTuple):
    """What `quantize` returns; None for what was not asked for. The counts are 0-dimensional int64 tensors."""

    codes: Tensor | None
    carrier: Tensor | None
    saturated: Tensor | None
    flushed: Tensor | None


class BlockQuantized(NamedTuple):
    """What `quantize_blocks` returns; None for what was not asked for.

    dequant_scale: as it is stored, one for every block. amax: of the whole tensor, 0-dimensional float32.
    """

    codes: Tensor | None
    carrier: Tensor | None
    dequant_scale: Tensor
    amax: Tensor
    saturated: Tensor | None
    flushed: Tensor | None


def amax(x: Tensor) -> Tensor:
    """The largest magnitude of `x`, 0-dimensional float32: 0 for an empty tensor, NaN or infinity where `x` has it."""
    if is_traced(x):
        return torch.ops.narrowgauge.amax(x)
    return amax_eagerly(x)


def quantize(
    x: Tensor,
    quant_scale: Tensor | None,
    fmt: Format,
    *,
    saturating: bool | None = None,
    codes: bool = True,
    carrier: torch.dtype | None = None,
    count: bool = False,
    key: Tensor | None = None,
    stream: int = 0,
    nonzero: bool = False,
) -> Quantized:
    """Cast to codes of `fmt`: codes = encode(x * quant_scale).

    x: any floating dtype (float64 is rounded to float32 first), any shape and strides.
    quant_scale: float32, 0-dimensional, or broadcastable against `x`; None means 1.
    saturating: as in `rounding.encode`; None for the format's own rule.
    codes: return codes, contiguous, of `fmt.dtype`. As with Tensor.to, a wide cast that changes nothing may return `x`.
    carrier: return the values of the codes, without the scale, in this dtype, which a matrix product can read.
    count: return how many values had |x * quant_scale| > max, and how many that are not zero have a code that is.
    key: int64, 0-dimensional: round stochastically by `philox.random_words(key, stream)`; None: to nearest even.
    nonzero: a value that is not zero, and would have a code that is, takes the smallest code of its sign.
    Raises RecipeError as `rounding.encode` does.
    """
    if is_traced(x):
        outputs = torch.ops.narrowgauge.quantize(
            x, quant_scale, fmt.name, saturating, codes, carrier, count, key, stream, nonzero
        )
        wanted = (codes, carrier is not None, count, count)
        return Quantized(*(out if want else None for out, want in zip(outputs, wanted, strict=True)))
    return quantize_eagerly(x, quant_scale, fmt, saturating, codes, carrier, count, key, stream, nonzero)


def dequantize(
    codes: Tensor,
    dequant_scale: Tensor | None,
    fmt: Format,
    dtype: torch.dtype = torch.float32,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """codes * dequant_scale: the product in float32, then one rounding to `dtype`. None means a scale of 1.

    out: a tensor of the shape of `codes` to write into instead of a new one; it then sets the dtype.
    """
    if out is not None:
        return _dequantize_into(codes, dequant_scale, fmt, out)
    if is_traced(codes):
        return torch.ops.narrowgauge.dequantize(codes, dequant_scale, fmt.name, dtype)
    return dequantize_eagerly(codes, dequant_scale, fmt, dtype)


def quantize_blocks(
    x: Tensor,
    fmt: Format,
    block: Block,
    rule: ScaleRule,
    *,
    codes: bool = True,
    carrier: torch.dtype | None = None,
    count: bool = False,
    key: Tensor | None = None,
    stream: int = 0,
    companding: Companding = LINEAR,
    nonzero: bool = False,
) -> BlockQuantized:
    """Cast a matrix to codes of a narrow `fmt` with one scale for each tile.

    x: [rows, columns] of any floating dtype and strides; the tiles are those of the logical order. rule: as in
    `scaling.block_scales`; NVFP4's amax of the whole is taken from `x`. codes, carrier, count, key, stream, nonzero: as
    in `quantize`, but for the carrier: the values of the codes times their stored scales (for NVFP4 times the byte
    alone), rounded once to its dtype. companding: the curve, with CURRENT scales. RANGE_EXPANSION stores [down, across,
    2], a scale and an exponent for each tile. Saturates; NaN where the format has none is code 0 in a block whose scale
    is NaN.
    """
    arguments = (codes, carrier, count, key, stream)
    if is_traced(x):
        outputs = torch.ops.narrowgauge.quantize_blocks(
            x, fmt.name, block.rows, block.columns, rule.name, *arguments, companding.name, nonzero
        )
        encoded, carried, scale, largest, saturated, flushed = outputs
        return BlockQuantized(
            encoded if codes else None,
            None if carrier is None else carried,
            scale,
            largest,
            saturated if count else None,
            flushed if count else None,
        )
    return quantize_blocks_eagerly(x, fmt, block, rule, *arguments, companding, nonzero)


def dequantize_blocks(
    codes: Tensor,
    dequant_scale: Tensor,
    fmt: Format,
    block: Block,
    dtype: torch.dtype = torch.float32,
    tensor_amax: Tensor | None = None,
    companding: Companding = LINEAR,
) -> Tensor:
    """codes * factor of their tile, for a matrix: the product in float32, then one rounding to `dtype`.

    dequant_scale: as `quantize_blocks` stores it. tensor_amax: for NVFP4; left out, the values lack the tensor's
    factor `scaling.nvfp4_tensor_factor`. companding: the curve that is undone before the product.
    """
    if is_traced(codes):
        return torch.ops.narrowgauge.dequantize_blocks(
            codes, dequant_scale, fmt.name, block.rows, block.columns, dtype, tensor_amax, companding.name
        )
    return dequantize_blocks_eagerly(codes, dequant_scale, fmt, block, dtype, tensor_amax, companding)


def transform(x: Tensor, signs: tuple[int, ...]) -> Tensor:
    """`hadamard.transform`: the columns of a matrix in groups of 16 rows, float32 [rows padded to 16s, columns]."""
    return torch.ops.narrowgauge.hadamard(x, list(signs)) if is_traced(x) else transform_eagerly(x, signs)


def amax_eagerly(x: Tensor) -> Tensor:
    """`amax` of a real tensor: Numba, Triton or torch."""
    fast = paths.fast_module(x, x.dtype in _INPUTS)
    return scaling.tensor_amax(x) if fast is None else fast.amax(x)


def quantize_eagerly(
    x: Tensor,
    quant_scale: Tensor | None,
    fmt: Format,
    saturating: bool | None,
    codes: bool,
    carrier: torch.dtype | None,
    count: bool,
    key: Tensor | None,
    stream: int,
    nonzero: bool = False,
) -> Quantized:
    """`quantize` of a real tensor: Numba, Triton or torch."""
    x = x.detach()
    suits = x.dtype in _INPUTS and carrier in _CARRIERS and _is_single(quant_scale)
    if fmt is BF16 and key is not None and saturating is not True and codes and carrier is None and not count:
        fast = paths.fast_module(x, suits, least=1)
        if fast is not None:
            return Quantized(fast.round_to_bfloat16(x, quant_scale, key, stream), None, None, None)
    if fmt == FP16 and saturating and key is None and codes and carrier is None and not count and x.is_cpu:
        fast = paths.fast_module(x, suits)
        if fast is not None:
            return Quantized(fast.quantize_to_half(x, quant_scale, nonzero), None, None, None)
    suits = suits and fmt in _FAST_FORMATS and saturating is not False and not nonzero
    fast = paths.fast_module(x, suits, least=paths.MIN_NUMBA if key is None else 1)
    if fast is None:
        return Quantized(
            *twin.quantize(x.contiguous(), quant_scale, fmt, saturating, codes, carrier, count, key, stream, nonzero)
        )
    counts = fast.count(x, quant_scale, fmt, key, stream) if count else (None, None)
    return Quantized(*fast.quantize(x, quant_scale, fmt, codes, carrier, key, stream), *counts)


def quantize_blocks_eagerly(
    x: Tensor,
    fmt: Format,
    block: Block,
    rule: ScaleRule,
    codes: bool,
    carrier: torch.dtype | None,
    count: bool,
    key: Tensor | None,
    stream: int,
    companding: Companding = LINEAR,
    nonzero: bool = False,
) -> BlockQuantized:
    """`quantize_blocks` of a real tensor: Numba, Triton or torch."""
    x = x.detach().contiguous()
    if x.dtype not in _INPUTS:
        x = x.float()
    fast = paths.tile_module(x, carrier in _CARRIERS, fmt, companding, key is not None)
    if fast is None:
        return BlockQuantized(
            *twin.quantize_blocks(x, fmt, block, rule, key, stream, codes, carrier, count, companding, nonzero)
        )
    arguments = (codes, carrier, count, key, stream, companding, nonzero)
    return BlockQuantized(*fast.quantize_blocks(x, fmt, block, rule, *arguments))


def dequantize_blocks_eagerly(
    codes: Tensor,
    dequant_scale: Tensor,
    fmt: Format,
    block: Block,
    dtype: torch.dtype,
    tensor_amax: Tensor | None,
    companding: Companding = LINEAR,
) -> Tensor:
    """`dequantize_blocks` of a real tensor: Numba, Triton or torch."""
    codes = codes.contiguous()
    fast = paths.tile_module(codes, dtype in _CARRIERS, fmt, companding, False)
    if fast is None:
        return twin.dequantize_blocks(codes, dequant_scale, fmt, block, tensor_amax, dtype, companding)
    return fast.dequantize_blocks(codes, dequant_scale, fmt, block, tensor_amax, dtype, companding)


def transform_eagerly(x: Tensor, signs: tuple[int, ...]) -> Tensor:
    """`transform` of a real tensor: Numba, Triton or torch."""
    fast = paths.hadamard_module(x, x.dtype in _INPUTS)
    return hadamard.transform(x.detach(), signs) if fast is None else fast.transform(x, signs)


def dequantize_eagerly(codes: Tensor, dequant_scale: Tensor | None, fmt: Format, dtype: torch.dtype) -> Tensor:
    """`dequantize` of a real tensor: Numba, Triton or torch."""
    fast = paths.fast_module(codes, _is_decoded_fast(codes, dequant_scale, fmt, dtype))
    if fast is None:
        return twin.dequantize(codes.contiguous(), dequant_scale, fmt, dtype)
    return fast.dequantize(codes, dequant_scale, fmt, torch.empty_like(codes, dtype=dtype, memory_format=_CONTIGUOUS))


def _dequantize_into(codes: Tensor, dequant_scale: Tensor | None, fmt: Format, out: Tensor) -> Tensor:
    suits = _is_decoded_fast(codes, dequant_scale, fmt, out.dtype)
    fast = paths.fast_module(codes, suits and out.is_contiguous() and out.device == codes.device)
    if fast is None or is_traced(codes) or is_traced(out):
        return out.copy_(dequantize(codes, dequant_scale, fmt, out.dtype))
    fast.dequantize(codes, dequant_scale, fmt, out)
    torch.autograd.graph.increment_version(out)  # autograd cannot see the kernel's writes
    return out


def _is_decoded_fast(codes: Tensor, dequant_scale: Tensor | None, fmt: Format, dtype: torch.dtype) -> bool:
    known = fmt in _FAST_FORMATS or (fmt == FP16 and codes.is_cpu)
    return known and dtype in _CARRIERS and _is_single(dequant_scale)


def _is_single(scale: Tensor | None) -> bool:
    return scale is None or scale.numel() == 1
