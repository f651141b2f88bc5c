"""The 16-point random Hadamard transform, which spreads outliers over 16 values before a cast to 4 bits.

Source: NVIDIA's NVFP4 pretraining recipe, arXiv:2509.25149, section 4.2. The transform is orthogonal: applied to both
operands of a product along the dimension that is summed over, it leaves the product as it is.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from narrowgauge.errors import RecipeError

POINTS = 16
# TransformerEngine's fixed signs
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


@dataclass(frozen=True)
class Hadamard:
    """x @ (diag(signs) H16 / 4) over every 16 values; signs: 16 of +1 or -1. Raises RecipeError for others."""

    signs: tuple[int, ...] = SIGNS

    def __post_init__(self) -> None:
        signs = tuple(self.signs) if isinstance(self.signs, (tuple, list)) else ()
        if len(signs) != POINTS or any(isinstance(s, bool) or s not in (1, -1) for s in signs):
            raise RecipeError(f"Hadamard signs={self.signs!r}: expected {POINTS} of 1 or -1")
        object.__setattr__(self, "signs", signs)

    @classmethod
    def seeded(cls, seed: int) -> Self:
        """Random signs, the same for a seed on every machine."""
        draw = random.Random(seed)
        return cls(tuple(draw.choice((1, -1)) for _ in range(POINTS)))


def transform(x: Tensor, signs: tuple[int, ...]) -> Tensor:
    """Transform the columns of a matrix [rows, columns] in groups of 16 rows: float32 [rows padded to 16s, columns].

    Missing rows count as zeros. Four rounds of sums and differences of rows 1, 2, 4 and 8 apart, in float32, then the
    exact factor 1/4: the same bits on every backend.
    """
    rows, columns = x.shape
    groups = -(-rows // POINTS)
    x = F.pad(x.float(), (0, 0, 0, groups * POINTS - rows)).reshape(groups, POINTS, columns)
    x = x * torch.tensor(signs, dtype=torch.float32, device=x.device)[:, None]
    for distance in (1, 2, 4, 8):
        pairs = x.view(groups, POINTS // (2 * distance), 2, distance, columns)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        x = torch.stack([first + second, first - second], dim=2).view(groups, POINTS, columns)
    return (x * 0.25).view(groups * POINTS, columns)
