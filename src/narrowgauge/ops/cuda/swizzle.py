"""The layout that the hardware reads the scales of blocks of 32 and 16 in.

Source: cuBLAS documentation, "1D Block Scaling Factors Layout", for the scale modes VEC32_UE8M0 and VEC16_UE4M3.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

TILE_ROWS, TILE_COLUMNS = 128, 4  # one tile of scales is 512 bytes: 4 groups of 32 rows, side by side
GROUP_ROWS = 32


def swizzle(scales: Tensor) -> Tensor:
    """Scales [rows, columns] (uint8) as the hardware reads them: one dimension, tiles of 128 x 4 in row-major order.

    Within a tile the scale of row r and column c stands at (r % 32) * 16 + (r // 32) * 4 + c. Ragged tiles are filled
    with byte 0.
    """
    rows, columns = scales.shape
    padded = F.pad(scales, (0, -columns % TILE_COLUMNS, 0, -rows % TILE_ROWS))
    down, across = padded.shape[0] // TILE_ROWS, padded.shape[1] // TILE_COLUMNS
    tiles = padded.reshape(down, TILE_ROWS // GROUP_ROWS, GROUP_ROWS, across, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle(blocked: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse: scales [rows, columns] of what `swizzle` made of them."""
    down, across = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
    tiles = blocked.reshape(down, across, GROUP_ROWS, TILE_ROWS // GROUP_ROWS, TILE_COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(down * TILE_ROWS, across * TILE_COLUMNS)[:rows, :columns]
