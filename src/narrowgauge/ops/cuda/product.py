"""A product of narrow operands by torch's scaled_mm: padding, layouts and scales as the hardware wants them.

The hardware takes the left side row-major, the right side column-major, and sizes that are multiples of 16, 32 or 128.
Other layouts are copied; other sizes are padded with code 0, which adds exactly 0, and the result is trimmed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from narrowgauge.numerics import kernels, scaling
from narrowgauge.numerics.formats import E4M3FN, E8M0FNU, Format
from narrowgauge.numerics.granularity import Block
from narrowgauge.ops.cuda.routes import Route, Scaling
from narrowgauge.ops.cuda.swizzle import swizzle

# multiples of the outer dimension and of the one that is summed over: 16 for cuBLASLt, whole blocks for the others; two
# codes of NVFP4 are a byte, and a row is a multiple of 16 bytes
MULTIPLES = {
    Scaling.TENSOR: (16, 16),
    Scaling.ROW: (16, 16),
    Scaling.BLOCK_1X128: (16, 128),
    Scaling.BLOCK_128X128: (128, 128),
    Scaling.MX: (16, 32),
    Scaling.NVFP4: (16, 32),
}
# the tile that one scale of the hardware is for
UNITS = {
    Scaling.ROW: (1, None),
    Scaling.BLOCK_1X128: (1, 128),
    Scaling.BLOCK_128X128: (128, 128),
    Scaling.MX: (1, 32),
    Scaling.NVFP4: (1, 16),
}
COLUMNS_OF_128X128 = 4  # the scales of 128x128 blocks along the sum are padded to a multiple of it


class Side(NamedTuple):
    """One operand as a matrix [outer, summed over], of any strides: x ~ codes * scale of the tile * tensor_factor.

    codes: of format.dtype. block: its tiles. block_scale: [tiles down, tiles across], as `kernels.quantize_blocks`
    stores it; None for one scale per tensor. tensor_factor: 0-dimensional float32; None for 1.
    """

    codes: Tensor
    format: Format
    block: Block
    block_scale: Tensor | None
    tensor_factor: Tensor | None


class Packed(NamedTuple):
    """One operand as scaled_mm takes it: codes [outer, summed over], padded and contiguous, and its scales."""

    codes: Tensor
    scales: list[Tensor]
    recipes: list[str]
    swizzles: list[str]


def scaled_product(left: Side, right: Side, route: Route, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """left @ right.T + bias in the hardware: [rows of left, rows of right] in `out_dtype`, contiguous.

    bias: [rows of right], rounded to `out_dtype` before it is added in float32. The sum is float32's, without fast
    accumulation, which keeps fewer bits. Sizes of 0 give zeros and the bias.
    """
    (m, k), n = left.codes.shape, right.codes.shape[0]
    if 0 in (m, k, n):
        empty = torch.zeros(m, n, dtype=out_dtype, device=left.codes.device)
        return empty if bias is None else empty + bias.to(out_dtype)
    if route.left is Scaling.ROW and out_dtype not in route.row_dtypes:
        return _scaled_after(left, right, route, out_dtype, bias)
    after = _product(left, right) if route.left is Scaling.MX else None
    # cuBLASLt adds no bias to float32 results
    fused = bias is not None and after is None and out_dtype in (torch.bfloat16, torch.float16)
    y = _scaled_mm(
        _pack(left, route.left, route.formats[0]),
        _pack(right, route.right, route.formats[1]),
        F.pad(bias.to(out_dtype), (0, -n % MULTIPLES[route.right][0])) if fused and bias is not None else None,
        out_dtype if after is None else torch.float32,
    )
    return _finish(y.narrow(0, 0, m).narrow(1, 0, n), after, None if fused else bias, out_dtype)


def _scaled_after(left: Side, right: Side, route: Route, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Scales of rows where the hardware has none for this dtype: they are applied to the float32 sum."""
    bare = [
        _pack(side._replace(block_scale=None, tensor_factor=None), Scaling.TENSOR, fmt)
        for side, fmt in zip((left, right), route.formats, strict=True)
    ]
    m, n = left.codes.shape[0], right.codes.shape[0]
    y = _scaled_mm(bare[0], bare[1], None, torch.float32).narrow(0, 0, m).narrow(1, 0, n)
    return _finish(y * _float_scales(left, Scaling.ROW), _float_scales(right, Scaling.ROW).t(), bias, out_dtype)


def _scaled_mm(a: Packed, b: Packed, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """The one call into the hardware."""
    if a.recipes == [Scaling.MX.value] and torch.float8_e5m2 in (a.codes.dtype, b.codes.dtype):
        # the same kernel, behind the older function: the newer one lets only E4M3FN through
        return torch._scaled_mm(a.codes, b.codes.t(), a.scales[0], b.scales[0], bias=bias, out_dtype=out_dtype)
    scale_b = [scale.t() for scale in b.scales] if b.recipes == [Scaling.ROW.value] else b.scales  # [1, outer]
    return F.scaled_mm(
        a.codes,
        b.codes.t(),
        a.scales,
        [getattr(F.ScalingType, name) for name in a.recipes],
        scale_b,
        [getattr(F.ScalingType, name) for name in b.recipes],
        swizzle_a=[getattr(F.SwizzleType, name) for name in a.swizzles],
        swizzle_b=[getattr(F.SwizzleType, name) for name in b.swizzles],
        bias=bias,
        output_dtype=out_dtype,
        use_fast_accum=False,
    )


def _finish(y: Tensor, factor: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    if factor is not None:
        y = y * factor
    if bias is not None:
        y = y + bias.to(out_dtype)
    y = y.to(out_dtype)
    # unlike Tensor.contiguous, clone works on fake CUDA tensors where torch is built without CUDA
    return y if y.is_contiguous() else y.clone(memory_format=torch.contiguous_format)


def _pack(side: Side, scaling_: Scaling, fmt: Format) -> Packed:
    codes = side.codes
    if side.format is not fmt:
        codes = kernels.dequantize(codes, None, side.format, torch.bfloat16).to(fmt.dtype)  # exact: `fmt` holds them
    codes = _padded(codes, *MULTIPLES[scaling_])
    if scaling_ is Scaling.NVFP4:
        even, odd = codes.view(codes.shape[0], -1, 2).unbind(-1)
        codes = (even | odd << 4).view(torch.float4_e2m1fn_x2)
    recipes, swizzles = [scaling_.value], ["NO_SWIZZLE"]
    if scaling_ is Scaling.TENSOR:
        scales = [_factor_or_one(side)]
    elif scaling_ is Scaling.MX:
        scales, swizzles = [swizzle(_e8m0_bytes(side)).view(E8M0FNU.dtype)], ["SWIZZLE_32_4_4"]
    elif scaling_ is Scaling.NVFP4:
        assert side.block_scale is not None
        bytes_ = _repeated(side.block_scale.view(torch.uint8), side, Scaling.NVFP4)
        scales, recipes = [swizzle(bytes_).view(E4M3FN.dtype), _factor_or_one(side)], [*recipes, Scaling.TENSOR.value]
        swizzles = ["SWIZZLE_32_4_4", "NO_SWIZZLE"]
    else:
        scales = [_float_layout(_float_scales(side, scaling_), scaling_, codes.shape[0])]
    return Packed(codes, scales, recipes, swizzles)


def _padded(codes: Tensor, rows: int, columns: int) -> Tensor:
    """`codes` with contiguous rows, padded with zero codes to multiples of `rows` and `columns`."""
    pad = (0, -codes.shape[1] % columns, 0, -codes.shape[0] % rows)
    if not any(pad):
        return codes if codes.is_contiguous() else codes.clone(memory_format=torch.contiguous_format)
    # padded as bytes: float8 tensors have no constant_pad, and byte 0 is code 0 is 0.0
    return F.pad(codes.view(torch.uint8), pad).view(codes.dtype)


def _float_scales(side: Side, scaling_: Scaling) -> Tensor:
    """One float32 factor for each tile of the hardware: [tiles down, tiles across]."""
    if side.block_scale is None:
        return _factor_or_one(side).expand(_unit(scaling_).grid_of(*side.codes.shape))
    factors = _repeated(scaling.block_factors(side.block_scale), side, scaling_)
    return factors if side.tensor_factor is None else factors * side.tensor_factor


def _float_layout(factors: Tensor, scaling_: Scaling, outer: int) -> Tensor:
    """Float32 scales where scaled_mm looks for them; what it pads with 1 belongs to zero codes or is never read.

    Rows: [outer, 1]. 1x128: [outer, blocks] with the outer dimension contiguous. 128x128: [blocks, blocks of the outer
    dimension], the first contiguous and a multiple of 4.
    """
    if scaling_ is Scaling.BLOCK_128X128:
        return _standard(F.pad(factors, (0, -factors.shape[1] % COLUMNS_OF_128X128), value=1.0)).t()
    rows = (0, outer - factors.shape[0])
    if scaling_ is Scaling.ROW:
        return _standard(F.pad(factors, (0, 0, *rows), value=1.0))
    return _standard(F.pad(factors.t(), rows, value=1.0)).t()


def _e8m0_bytes(side: Side) -> Tensor:
    """The byte of each block of 32: [outer, blocks], uint8. A factor that is infinite or NaN gives the byte of NaN."""
    stored = _factor_or_one(side).expand(1, 1) if side.block_scale is None else side.block_scale
    if stored.dtype is E8M0FNU.dtype:
        return _repeated(stored.view(torch.uint8), side, Scaling.MX)
    # a power of two is its exponent field; 2^-127 is subnormal and has field 0, as it has byte 0
    return _repeated((stored.view(torch.int32) >> 23 & 0xFF).to(torch.uint8), side, Scaling.MX)


def _repeated(scales: Tensor, side: Side, scaling_: Scaling) -> Tensor:
    """One scale for each tile of the hardware, from one for each tile of the cast, which is a multiple of it."""
    shape, unit = side.codes.shape, _unit(scaling_)
    for dimension, (tile, own) in enumerate(zip(side.block.size_in(*shape), unit.size_in(*shape), strict=True)):
        count = unit.grid_of(*shape)[dimension]
        if scales.shape[dimension] == 1:
            scales = scales.expand(count, -1) if dimension == 0 else scales.expand(-1, count)
        elif tile != own:
            scales = scales.repeat_interleave(tile // own, dimension).narrow(dimension, 0, count)
    return scales


def _unit(scaling_: Scaling) -> Block:
    return Block(*UNITS[scaling_])


def _standard(x: Tensor) -> Tensor:
    """Contiguous, with the strides that a new tensor has: scaled_mm looks at those of dimensions of size 1 too."""
    return x.reshape(-1).view(x.shape)


def _factor_or_one(side: Side) -> Tensor:
    factor = side.tensor_factor
    return torch.ones((), dtype=torch.float32, device=side.codes.device) if factor is None else factor


def _product(left: Side, right: Side) -> Tensor | None:
    """The factors that scales of blocks do not hold; None where there are none."""
    factors = [s.tensor_factor for s in (left, right) if s.block_scale is not None and s.tensor_factor is not None]
    return None if not factors else factors[0] if len(factors) == 1 else factors[0] * factors[1]
