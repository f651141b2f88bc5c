"""The Numba kernels for casts with a scale for each tile, on torch tensors."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from narrowgauge.numerics import scaling
from narrowgauge.numerics.companding import LINEAR, Companding
from narrowgauge.numerics.formats import Format
from narrowgauge.numerics.granularity import Block
from narrowgauge.numerics.kernels import cpu, numba_bits, numba_decode, numba_scales, numba_tiles
from narrowgauge.numerics.kernels.cpu_arrays import array, new_array
from narrowgauge.numerics.kernels.cpu_threads import in_threads
from narrowgauge.numerics.scaling import NVFP4, ScaleRule

# bytes of a part that is read twice: half of a common second-level cache
_PART_BYTES = 1 << 19
_NO_CODES, _NO_CARRIER, _NO_WORDS = (np.empty(0, d) for d in (np.uint8, np.uint16, np.int32))
# any rule that stores its scales so
_RULE_OF_STORED = {
    torch.float32: numba_scales.CURRENT,
    torch.float8_e8m0fnu: numba_scales.E8M0_UP,
    torch.float8_e4m3fn: numba_scales.NVFP4,
}

layout = functools.cache(numba_bits.layout)


class Plan(NamedTuple):
    """How a matrix is cut: its shape as the kernels see it, the tile's, columns of a part, number of parts."""

    shape: tuple[int, int]
    tile: tuple[int, int]
    part: int
    parts: int


@functools.lru_cache(maxsize=1024)
def plan(rows: int, columns: int, block: Block) -> Plan:
    """The parts of a matrix that is not empty. Rows whose tiles all are whole are one long row."""
    height, width = block.size_in(rows, columns)
    height, width = min(height, rows), min(width, columns)
    if height == 1 and columns % width == 0:
        rows, columns = 1, rows * columns
    wanted = max(_PART_BYTES // (4 * height), 512) if height > 1 else 4 * numba_tiles.RUN
    part = max(min(wanted, columns) // width, 1) * width
    return Plan((rows, columns), (height, width), part, -(-rows // height) * -(-columns // part))


def quantize_blocks(
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
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor | None, Tensor | None]:
    """`twin.quantize_blocks` of a matrix that is not empty, one of those that `paths.tile_module` says."""
    shape, tile, part, parts = plan(*x.shape, block)
    encoded, code_bits = new_array(x.shape, fmt.dtype) if codes else (None, _NO_CODES)
    carried, carrier_bits = new_array(x.shape, carrier) if carrier is not None else (None, _NO_CARRIER)
    stored, scale_bits = new_array(block.grid_of(*x.shape), scaling.stored_dtype(rule))
    is_float = stored.dtype is torch.float32
    arguments = (
        numba_scales.RULES[rule],
        layout(fmt, companding, nonzero),
        int(cpu.amax(x).view(torch.int32).item()) if rule is NVFP4 else 0,
        (False, 0, 0) if key is None else (True, int(key.item()), stream),
        code_bits,
        carrier_bits,
        scale_bits if is_float else _NO_WORDS,
        _NO_CODES if is_float else scale_bits,
    )
    bits = array(x)

    def cast(first: int, last: int) -> tuple[int, np.ndarray]:
        counts = np.zeros(2 if count else 0, np.int64)
        return numba_tiles.cast_tiles(bits, shape, tile, part, first, last, *arguments, counts), counts

    largest, counted = zip(*in_threads(cast, parts, (2 if key is None else 5) * x.numel()), strict=True)
    amax = torch.from_numpy(np.array(max(largest), np.int32)).view(torch.float32)
    saturated, flushed = map(torch.tensor, np.sum(counted, axis=0).tolist()) if count else (None, None)
    return encoded, carried, stored, amax, saturated, flushed


def dequantize_blocks(
    codes: Tensor,
    dequant_scale: Tensor,
    fmt: Format,
    block: Block,
    tensor_amax: Tensor | None,
    dtype: torch.dtype,
    companding: Companding = LINEAR,
) -> Tensor:
    """`twin.dequantize_blocks` of a matrix that is not empty, one of those that `paths.tile_module` says."""
    shape, tile, part, parts = plan(*codes.shape, block)
    out, value_bits = new_array(codes.shape, dtype)
    is_float = dequant_scale.dtype is torch.float32
    rule = _RULE_OF_STORED[dequant_scale.dtype]
    arguments = (
        rule,
        layout(fmt, companding),
        -1.0 if tensor_amax is None or rule != numba_scales.NVFP4 else tensor_amax.item(),
        array(dequant_scale) if is_float else _NO_WORDS,
        _NO_CODES if is_float else array(dequant_scale),
        value_bits,
    )
    bits = array(codes)
    in_threads(
        lambda first, last: numba_decode.decode_tiles(bits, shape, tile, part, first, last, *arguments),
        parts,
        2 * codes.numel(),
    )
    return out
