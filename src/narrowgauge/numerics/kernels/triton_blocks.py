"""Casts of matrices on CUDA devices with one scale for each tile, and the way back: the bits of `twin`.

Tiles that fit a program are cast in one pass over the matrix. Larger ones, such as long rows and columns, take two:
their amax by atomic maxima, then the cast in pieces, so that a matrix of few tiles still fills the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from narrowgauge.numerics import scaling
from narrowgauge.numerics.companding import LINEAR, SQUARE_ROOT, Companding
from narrowgauge.numerics.formats import E4M3FN, E8M0FNU, Format
from narrowgauge.numerics.granularity import Block
from narrowgauge.numerics.kernels.triton_cast import amax
from narrowgauge.numerics.kernels.triton_round import bent_fields_of
from narrowgauge.numerics.kernels.triton_tiles import (
    block_amax_kernel,
    dequantize_blocks_kernel,
    quantize_blocks_kernel,
)
from narrowgauge.numerics.scaling import ScaleRule

MOST_VALUES = 16384  # of a program: 32 for each of 512 threads
USUAL_VALUES = 4096
ROW_VALUES = 64  # read side by side where the matrix has them: 128 bytes of bfloat16
DECODE_HEIGHT, DECODE_WIDTH = 16, 256


class Tiling(NamedTuple):
    """How programs share a matrix: tiles of a program down and across, and the piece of a tile that it holds.

    All are powers of two. A tile larger than its piece is cut into several, each of a program of its own.
    """

    blocks_down: int
    height: int
    blocks_across: int
    width: int

    @property
    def values(self) -> int:
        return self.blocks_down * self.height * self.blocks_across * self.width

    @property
    def warps(self) -> int:
        return max(self.values // 1024, 1)


def tiling_of(height: int, width: int, columns: int) -> Tiling:
    """The tiling for tiles of height x width in a matrix of so many columns."""
    tall, wide = triton.next_power_of_2(height), triton.next_power_of_2(width)
    side_by_side = min(ROW_VALUES, triton.next_power_of_2(columns))
    if tall * max(wide, side_by_side) > MOST_VALUES:
        wide = min(wide, 1024)
        tall = min(tall, max(USUAL_VALUES // max(wide, side_by_side), 1))
    enough = 256 if tall <= USUAL_VALUES // 256 else side_by_side
    blocks_across = max(min(enough, triton.next_power_of_2(columns)) // wide, 1)
    blocks_down = max(USUAL_VALUES // (tall * wide * blocks_across), 1)
    return Tiling(blocks_down, tall, blocks_across, wide)


class Plan(NamedTuple):
    """How a matrix is cast: its tiling, the programs, and the kernels' numbers and constants that follow."""

    tiling: Tiling
    grid: tuple[int]
    numbers: dict[str, int]
    constants: dict[str, Any]
    is_cut: bool

    @classmethod
    def of(cls, block: Block, rows: int, columns: int) -> Plan:
        """The plan of a matrix that is not empty."""
        tall, wide = block.size_in(rows, columns)
        height, width = min(tall, rows), min(wide, columns)
        down, across = block.grid_of(rows, columns)
        tiling = tiling_of(height, width, columns)
        pieces_down, pieces_across = triton.cdiv(height, tiling.height), triton.cdiv(width, tiling.width)
        programs_across = triton.cdiv(across, tiling.blocks_across) * pieces_across
        numbers = {
            "rows": rows, "columns": columns, "height": height, "width": width, "down": down, "across": across,
            "programs_across": programs_across, "pieces_down": pieces_down, "pieces_across": pieces_across,
        }  # fmt: skip
        constants = {name.upper(): size for name, size in tiling._asdict().items()}
        grid = (triton.cdiv(down, tiling.blocks_down) * pieces_down * programs_across,)
        return cls(tiling, grid, numbers, constants, pieces_down * pieces_across > 1)

    @property
    def in_quads(self) -> bool:
        """True where the columns of a program lie side by side and start at a multiple of four values."""
        width, columns = self.numbers["width"], self.numbers["columns"]
        starts = width % 4 == 0 or width == columns
        is_whole = starts if self.tiling.blocks_across == 1 else self.tiling.width == width
        return is_whole and columns % 4 == 0 and self.tiling.blocks_across * self.tiling.width % 4 == 0

    def run(self, kernel: Any, *tensors: Tensor | int, **constants: Any) -> None:
        """Start a kernel of `triton_tiles` on the current device."""
        kernel[self.grid](
            *tensors, **self.numbers, **constants, **self.constants, num_warps=self.tiling.warps, enable_fp_fusion=False
        )


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
    """`twin.quantize_blocks` of a float32, bfloat16 or float16 matrix that is not empty; carrier: float32, bfloat16.

    The casts are those that `paths.tile_module` says, with every rule of scales.
    """
    x = x.detach().contiguous()
    plan = Plan.of(block, *x.shape)
    encoded = torch.empty_like(x, dtype=torch.uint8) if codes else None
    carried = torch.empty_like(x, dtype=carrier) if carrier is not None else None
    dtype = scaling.stored_dtype(rule)
    stored = torch.empty(plan.numbers["down"], plan.numbers["across"], dtype=dtype, device=x.device)
    counts = torch.zeros(2, dtype=torch.int64, device=x.device) if count else x
    with torch.cuda.device_of(x):
        largest, whole = _amax_before(x, plan, rule)
        plan.run(
            quantize_blocks_kernel, x, largest, whole, x if encoded is None else encoded,
            x if carried is None else carried, _bytes(stored), counts, whole if key is None else key, stream,
            RULE=rule.name, **bent_fields_of(fmt, companding, nonzero), STOCHASTIC=key is not None, QUADS=plan.in_quads,
            CODES=codes, CARRIER=carrier is not None, COUNT=count, HAS_AMAX=plan.is_cut,
            HAS_WHOLE=plan.is_cut or rule is ScaleRule.NVFP4,
        )  # fmt: skip
    saturated, flushed = (counts[0], counts[1]) if count else (None, None)
    encoded = None if encoded is None else encoded.view(fmt.dtype)
    return encoded, carried, stored, whole.view(torch.float32), saturated, flushed


def _amax_before(x: Tensor, plan: Plan, rule: ScaleRule) -> tuple[Tensor, Tensor]:
    """Bits (int32) of the amax of tiles and of the whole, so far as a pass before the cast must find them; else 0."""
    if plan.is_cut:
        maxima = torch.zeros(plan.numbers["down"] * plan.numbers["across"] + 1, dtype=torch.int32, device=x.device)
        largest, whole = maxima[:-1], maxima[-1]
        plan.run(block_amax_kernel, x, largest, whole)
        return largest, whole
    if rule is ScaleRule.NVFP4:
        whole = amax(x).view(torch.int32)
    else:
        whole = torch.zeros((), dtype=torch.int32, device=x.device)
    return whole, whole


def _bytes(stored: Tensor) -> Tensor:
    """Scales as the kernels take them: Triton knows no E8M0."""
    return stored if stored.dtype is torch.float32 else stored.view(torch.uint8)


def dequantize_blocks(
    codes: Tensor,
    dequant_scale: Tensor,
    fmt: Format,
    block: Block,
    tensor_amax: Tensor | None,
    dtype: torch.dtype,
    companding: Companding = LINEAR,
) -> Tensor:
    """`twin.dequantize_blocks` of a matrix that is not empty, to float32 or bfloat16."""
    rows, columns = codes.shape
    out = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    kind = {E8M0FNU.dtype: "E8M0", E4M3FN.dtype: "E4M3"}.get(dequant_scale.dtype, "FLOAT32")
    if kind == "E4M3" and tensor_amax is not None:
        kind = "NVFP4"
    programs_across = triton.cdiv(columns, DECODE_WIDTH)
    constants: dict[str, Any] = {
        "KIND": kind, "EXPONENT": fmt.exponent_bits, "MANTISSA": fmt.mantissa_bits, "SIGNED": fmt.signed,
        "ROOT": companding is SQUARE_ROOT, "HEIGHT": DECODE_HEIGHT, "WIDTH": DECODE_WIDTH, "enable_fp_fusion": False,
    }  # fmt: skip
    with torch.cuda.device_of(codes):
        dequantize_blocks_kernel[(triton.cdiv(rows, DECODE_HEIGHT) * programs_across,)](
            codes.detach().contiguous().view(torch.uint8), _bytes(dequant_scale.contiguous()),
            out if tensor_amax is None else tensor_amax, out, rows, columns, *block.size_in(rows, columns),
            block.grid_of(rows, columns)[1], programs_across, **constants,
        )  # fmt: skip
    return out
