"""Values to bytes for the wire and back: rows of codes, each followed by the scales of its blocks.

A row of n values is ceil(n * bits / 8) bytes of codes (formats below 8 bits are packed), then its scales as they are
stored: a byte a block for E8M0, four for float32. Wide formats are their own bytes. A block that holds NaN or an
infinity arrives with at least one value that is not finite, so that the sum shows it on every rank.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics import packing
from narrowgauge.numerics.formats import BF16, FP32
from narrowgauge.numerics.granularity import Block
from narrowgauge.numerics.scaling import E8M0_RULES, NVFP4, stored_dtype
from narrowgauge.recipes.casts import WIRE
from narrowgauge.recipes.spec import CastSpec, Recipe
from narrowgauge.tensors import tiles
from narrowgauge.tensors.cast import cast_storage

EXPECTED = "blocks along rows, e.g. CastSpec(E4M3FN, Block(1, 128), E8M0_UP), or CastSpec(BF16), CastSpec(FP32) or None"


def check(role: str, spec: CastSpec) -> None:
    """Raise RecipeError for a cast that cannot travel: its scales would be those of parts that no rank has whole."""
    if spec in (CastSpec(FP32), CastSpec(BF16)):
        return
    granularity = spec.granularity
    along_rows = spec.in_blocks and granularity.rows == 1 and granularity.columns is not None
    if not along_rows or not spec.format.is_narrow or spec.scale is NVFP4:
        raise RecipeError(f"{role}=({spec}): expected {EXPECTED}")


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
    return _code_bytes(numel, spec) + _scale_bytes(numel, spec)


def encode(values: Tensor, spec: CastSpec, key: Tensor | None = None) -> Tensor:
    """Rows of values, floating [rows, n], as bytes: uint8 [rows, wire_bytes(n)]. key: random bits, if stochastic."""
    if not spec.in_blocks:
        return values.to(spec.format.dtype).contiguous().view(torch.uint8)
    codes, scales, _ = cast_storage(values, spec, key=key)
    if spec.format.bits < 8:
        codes = packing.pack_codes(codes, spec.format)
    stored = _marked(scales, values, spec).view(torch.uint8)
    return torch.cat([codes.view(torch.uint8), stored.reshape(len(values), -1)], dim=1)


def decode(buffer: Tensor, numel: int, spec: CastSpec, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of `numel` values in `dtype` from their bytes, uint8 [rows, wire_bytes(numel)]."""
    if not spec.in_blocks:
        return buffer.contiguous().view(spec.format.dtype).to(dtype)
    at = _code_bytes(numel, spec)
    codes = buffer[:, :at].contiguous()
    codes = packing.unpack_codes(codes, spec.format, numel) if spec.format.bits < 8 else codes.view(spec.format.dtype)
    stored = buffer[:, at:].contiguous().view(stored_dtype(spec.scale))  # type: ignore[arg-type]
    amax = torch.zeros((), device=buffer.device)  # of NVFP4 only
    return tiles.dequantize(codes, stored, amax, dataclasses.replace(spec, granularity=Block(1, block_of(spec))), dtype)


def reduce(buffers: Tensor, numel: int, spec: CastSpec, divisor: int = 1) -> Tensor:
    """The sum over rows, in float32 and in their order, divided by `divisor`: float32 [numel]."""
    total = torch.zeros(numel, dtype=torch.float32, device=buffers.device)
    for row in buffers.split(1):
        total += decode(row, numel, spec)[0]
    return total / divisor if divisor != 1 else total


def _marked(scales: Tensor, values: Tensor, spec: CastSpec) -> Tensor:
    """The scales, NaN where a block holds what is not finite; E8M0's say so by themselves."""
    if spec.scale in E8M0_RULES:
        return scales
    block = block_of(spec)
    padded = torch.nn.functional.pad(values.detach().float(), (0, -values.shape[1] % block))
    finite = padded.reshape(len(values), -1, block).isfinite().all(dim=-1)
    return torch.where(finite.reshape(scales.shape), scales, torch.nan)


def _code_bytes(numel: int, spec: CastSpec) -> int:
    bits = spec.format.bits
    return packing.packed_width(numel, bits) if bits < 8 else numel * spec.format.dtype.itemsize


def _scale_bytes(numel: int, spec: CastSpec) -> int:
    if not spec.in_blocks:
        return 0
    return -(-numel // block_of(spec)) * stored_dtype(spec.scale).itemsize  # type: ignore[arg-type]
