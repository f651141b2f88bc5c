"""Values to bytes for the wire and back: rows of codes, each followed by the scales of its blocks.

A row of n values is ceil(n * bits / 8) bytes of codes (formats below 8 bits are packed), then its scales as they are
stored: a byte a block for E8M0, four for float32. Wide formats are their own bytes. A block that holds NaN or an
infinity arrives as NaN, so that the sum shows it on every rank. `numerics.kernels.wire` has the bytes and the kernels.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from narrowgauge.distributed import wire_watch
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.companding import LINEAR
from narrowgauge.numerics.formats import BF16, FP32
from narrowgauge.numerics.kernels import wire
from narrowgauge.numerics.kernels.wire import WireFormat
from narrowgauge.numerics.rounding import NONZERO
from narrowgauge.numerics.scaling import ScaleRule
from narrowgauge.recipes.casts import WIRE
from narrowgauge.recipes.spec import CastSpec, Recipe

EXPECTED = "blocks along rows, e.g. CastSpec(E4M3FN, Block(1, 128), E8M0_UP), or CastSpec(BF16), CastSpec(FP32) or None"


def check(role: str, spec: CastSpec) -> None:
    """Raise RecipeError for a cast that cannot travel.

    Scales of parts that no rank has whole; FP16, in which sums and scaled storage overflow or saturate unseen; curves,
    and rounding that is biased; formats that `numerics.kernels.wire` has no rows of.
    """
    if spec in (CastSpec(FP32), CastSpec(BF16)):
        return
    granularity = spec.granularity
    along_rows = spec.in_blocks and granularity.rows == 1 and granularity.columns is not None
    if not along_rows or not spec.format.is_narrow or spec.companding is not LINEAR or spec.rounding is NONZERO:
        raise RecipeError(f"{role}=({spec}): expected {EXPECTED}")
    try:
        _format(spec)
    except RecipeError as error:
        raise RecipeError(f"{role}=({spec}): {error}") from None


def spec_of(recipe: Recipe, role: str) -> CastSpec:
    """What travels for a communication role of a resolved recipe, also where it has no cast of its own.

    grad_comm: as `grad`, a narrow one in WIRE's blocks. param_comm: as `param`, likewise. activation_comm and
    pipeline_comm: in the compute dtype. What is FP16 there travels in float32.
    """
    spec = getattr(recipe, role)
    if spec is not None:
        return spec
    stored = {"grad_comm": recipe.grad.format, "param_comm": recipe.param.format}.get(role, recipe.compute_format)
    if stored.is_narrow:
        return dataclasses.replace(WIRE, format=stored)
    return CastSpec(BF16) if stored is BF16 else CastSpec(FP32)


def block_of(spec: CastSpec) -> int:
    """Values that share a scale; 1 for a wide spec."""
    return spec.granularity.columns or 1 if spec.in_blocks else 1


def dtype_of(spec: CastSpec) -> torch.dtype:
    """What the wire carries, as it is counted: bytes for codes and scales, else the format's dtype."""
    return torch.uint8 if spec.in_blocks else spec.format.dtype


def wire_bytes(numel: int, spec: CastSpec) -> int:
    """Bytes of a row of `numel` values."""
    return _format(spec).row_bytes(numel) if spec.in_blocks else numel * spec.format.dtype.itemsize


def encode(
    values: Tensor,
    spec: CastSpec,
    key: Tensor | None = None,
    *,
    stream: int = 0,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Rows of values, floating [rows, n], as bytes: uint8 [rows, wire_bytes(n)].

    key, stream: random bits of a stochastic spec, see `philox`; others ignore them. residual: float32 [rows, n]: added
    to the values, and then what the bytes lack of the sum. out: contiguous bytes to write into.
    """
    rows, n = values.shape
    return encode_flat(values, rows, n, spec, key, stream=stream, residual=residual, out=out)


def encode_flat(
    values: Tensor,
    rows: int,
    n: int,
    spec: CastSpec,
    key: Tensor | None = None,
    *,
    stream: int = 0,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As `encode`, of values of any shape, at most rows * n: the rows are filled up with zeros."""
    wanted = wire_watch.before(values, residual, spec)
    sent = _encoded(values, rows, n, spec, key, stream, residual, out)
    if wanted is not None:
        _tell(wanted, sent, rows, n, spec)
    return sent


def _tell(wanted: Tensor, sent: Tensor, rows: int, n: int, spec: CastSpec) -> None:
    sent = sent.view(rows, -1)
    wire_watch.after(
        wanted,
        lambda: decode_flat(sent, wanted.numel(), n, spec),
        lambda: wire_watch.largest_scale(sent, n, _format(spec)) if spec.in_blocks else None,
    )


def _encoded(
    values: Tensor,
    rows: int,
    n: int,
    spec: CastSpec,
    key: Tensor | None,
    stream: int,
    residual: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    if spec.in_blocks:
        key = _key_for(spec, key)
        return wire.encode(values, rows, n, _format(spec), key=key, stream=stream, residual=residual, out=out)
    sent = values.detach().reshape(-1).to(spec.format.dtype)
    if residual is not None:
        wanted = values.detach().reshape(-1).float() + residual.view(-1)
        sent = wanted.to(spec.format.dtype)
        residual.copy_((wanted - sent.float()).nan_to_num(0.0, 0.0, 0.0).view(residual.shape))
    if sent.numel() < rows * n:
        sent = torch.cat([sent, sent.new_zeros(rows * n - sent.numel())])
    found = sent.contiguous().view(torch.uint8).view(rows, -1)
    return found if out is None else out.copy_(found.view(out.shape))


def decode(
    buffer: Tensor,
    numel: int,
    spec: CastSpec,
    dtype: torch.dtype = torch.float32,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Rows of `numel` values in `dtype` from their bytes, uint8 [rows, wire_bytes(numel)].

    The bytes of a row lie side by side, rows may lie apart. out: a contiguous tensor to write into, which sets dtype.
    """
    total = len(buffer) * numel
    return decode_flat(buffer, total, numel, spec, dtype, out=out).view(len(buffer), numel)


def decode_flat(
    buffer: Tensor,
    numel: int,
    n: int,
    spec: CastSpec,
    dtype: torch.dtype = torch.float32,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The first `numel` values of rows of `n`: [numel]. As `decode`."""
    if spec.in_blocks:
        return wire.decode(buffer, numel, n, _format(spec), dtype, out=out)
    values = buffer.contiguous().view(-1).view(spec.format.dtype)[:numel]
    return values.to(dtype) if out is None else out.copy_(values.view(out.shape))


def reduce(buffers: Tensor, numel: int, spec: CastSpec, divisor: int = 1) -> Tensor:
    """The sum over rows, in float32 and in their order, divided by `divisor`: float32 [numel]."""
    if spec.in_blocks:
        return wire.reduce(buffers, numel, _format(spec), divisor)
    first, *others = buffers.contiguous().view(-1).view(spec.format.dtype).view(len(buffers), numel).unbind(0)
    total = first.to(torch.float32, copy=True)
    for row in others:
        total += row
    # tensor by tensor: a division by a number is a product with its inverse on some devices
    return total if divisor == 1 else total.div_(torch.full_like(total, divisor))


def reduce_and_encode(
    buffers: Tensor,
    numel: int,
    spec: CastSpec,
    divisor: int = 1,
    key: Tensor | None = None,
    *,
    stream: int = 0,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`encode` of `reduce` in one pass: uint8 [wire_bytes(numel)]."""
    if not spec.in_blocks:
        total = reduce(buffers, numel, spec, divisor)
        return encode_flat(total, 1, numel, spec, residual=residual, out=out).view(-1)
    key = _key_for(spec, key)
    wanted = wire_watch.before(reduce(buffers, numel, spec, divisor), residual, spec) if wire_watch.looks() else None
    sent = wire.reduce_and_encode(
        buffers, numel, _format(spec), divisor, key=key, stream=stream, residual=residual, out=out
    )
    if wanted is not None:
        _tell(wanted, sent, 1, numel, spec)
    return sent


@functools.lru_cache(maxsize=64)
def _format(spec: CastSpec) -> WireFormat:
    assert isinstance(spec.scale, ScaleRule)
    return WireFormat(spec.format, block_of(spec), spec.scale)


def _key_for(spec: CastSpec, key: Tensor | None) -> Tensor | None:
    if spec.is_stochastic and key is None:
        raise RecipeError(
            f"{spec}: stochastic rounding needs random bits, and no key was given: draw one from a generator"
        )
    return key if spec.is_stochastic else None
