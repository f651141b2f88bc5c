"""The part of a tensor that shares one scale."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from narrowgauge.errors import RecipeError


@dataclass(frozen=True, repr=False)
class Block:
    """A tile of `rows` x `columns` values that shares one scale; None means all of them.

    A tensor is a matrix of its last two dimensions, and those before them are a batch of matrices; a vector is one row.
    Tiles are laid in logical order from the first row and column of each matrix, and never straddle two matrices. Where
    the sizes are no multiples of the tile's, the last tiles are smaller, as if padded with zeros. Source of the usual
    sizes: 1x32 OCP MX v1.0; 1x128 and 128x128 DeepSeek-V3, arXiv:2412.19437; 1x16 and 16x16 NVFP4, arXiv:2509.25149.
    Raises RecipeError for a size that is no whole number of at least 1.
    """

    rows: int | None
    columns: int | None

    def __post_init__(self) -> None:
        for name, size in (("rows", self.rows), ("columns", self.columns)):
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise RecipeError(f"Block {name}={size!r}: expected a whole number of at least 1, or None for all")

    @property
    def transposed(self) -> Self:
        """The tile of the transposed matrix that holds the same values."""
        return type(self)(self.columns, self.rows)

    @property
    def is_square(self) -> bool:
        """True where a matrix and its transpose have the same tiles, so that one copy of codes serves both."""
        return self.rows == self.columns

    def size_in(self, rows: int, columns: int) -> tuple[int, int]:
        """Rows and columns of the first tile of a matrix of that size: no more than it has, at least 1 each."""
        height, width = self._full_size(rows, columns)
        return max(min(height, rows), 1), max(min(width, columns), 1)

    def grid_of(self, rows: int, columns: int) -> tuple[int, int]:
        """How many tiles a matrix of that size has down and across."""
        # not of the first tile, whose comparisons would fix sizes that are symbols to a compiler
        height, width = self._full_size(rows, columns)
        return -(-rows // height), -(-columns // width)

    def _full_size(self, rows: int, columns: int) -> tuple[int, int]:
        return self.rows or max(rows, 1), self.columns or max(columns, 1)

    @property
    def name(self) -> str:
        """The name in files: PER_TENSOR, PER_ROW, PER_COLUMN or e.g. 1x128."""
        return _NAMES.get(self) or "x".join("all" if size is None else str(size) for size in (self.rows, self.columns))

    @classmethod
    def of_name(cls, name: str) -> Self | None:
        """The granularity whose `name` it is, or None."""
        found = next((block for block, known in _NAMES.items() if known == name), None)
        match = re.fullmatch(r"(all|[1-9]\d*)x(all|[1-9]\d*)", name)
        if found is not None or match is None:
            return found  # type: ignore[return-value]
        return cls(*(None if size == "all" else int(size) for size in match.groups()))

    def __repr__(self) -> str:
        return _NAMES.get(self) or f"Block({self.rows}, {self.columns})"

    def __str__(self) -> str:
        return _NAMES[self].lower().replace("_", " ") if self in _NAMES else f"{self.name} blocks"


PER_TENSOR = Block(None, None)
PER_ROW = Block(1, None)
PER_COLUMN = Block(None, 1)
_NAMES = {PER_TENSOR: "PER_TENSOR", PER_ROW: "PER_ROW", PER_COLUMN: "PER_COLUMN"}
