"""What CUDA's scaled_mm demands and computes, written down apart from the code under test, for machines without a GPU.

The demands are those of ScaledBlas.cpp and of its kernels, which are stricter than torch's shape function and its CPU
path. The arithmetic reads codes and scales where the hardware reads them, in float64.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

T, W = F.ScalingType, F.SwizzleType
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FP4 = torch.float4_e2m1fn_x2
E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
BLOCKS_OF_128 = (T.BlockWise1x128, T.BlockWise128x128)


@dataclass
class Hardware:
    """Stands for `torch.nn.functional.scaled_mm`, and remembers the recipes it was called with.

    real, real_older: the functions that answer (torch's own, for fake tensors); None: the product is computed here.
    row_dtypes: the result dtypes that scales of rows are had with. poison: what the scale entries that the hardware
    never reads are overwritten with first.
    """

    real: Any = None
    real_older: Any = None
    row_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    poison: float | None = None
    seen: list[tuple[Any, ...]] = field(default_factory=list)

    def __call__(
        self, mat_a, mat_b, scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a=None, swizzle_b=None,
        bias=None, output_dtype=torch.bfloat16, contraction_dim=(), use_fast_accum=False,
    ) -> Tensor:  # fmt: skip
        assert not use_fast_accum and contraction_dim == ()
        sides = ((mat_a, scale_a, scale_recipe_a, swizzle_a), (mat_b.t(), scale_b, scale_recipe_b, swizzle_b))
        assert scale_recipe_a != [T.BlockWise1x32] or mat_a.dtype is mat_b.dtype is FP8[0]
        self._demand(sides, bias, output_dtype)
        if self.real is None:
            return self._computed(sides, bias, output_dtype)
        return self.real(
            mat_a, mat_b, scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a, swizzle_b, bias=bias,
            output_dtype=output_dtype, use_fast_accum=False,
        )  # fmt: skip

    def older(self, mat_a, mat_b, scale_a, scale_b, bias=None, out_dtype=None) -> Tensor:
        """For `torch._scaled_mm`, which takes the recipe from the scales: called for blocks of 32 of E5M2 alone."""
        assert torch.float8_e5m2 in (mat_a.dtype, mat_b.dtype) and out_dtype is not None
        how = ([T.BlockWise1x32], [W.SWIZZLE_32_4_4])
        sides = ((mat_a, [scale_a], *how), (mat_b.t(), [scale_b], *how))
        self._demand(sides, bias, out_dtype)
        if self.real_older is None:
            return self._computed(sides, bias, out_dtype)
        return self.real_older(mat_a, mat_b, scale_a, scale_b, bias=bias, out_dtype=out_dtype)

    def _computed(self, sides: Any, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        a, b = (self._values(*side) for side in sides)
        y = a @ b.t()
        return (y if bias is None else y + bias.double()).to(out_dtype)

    def _demand(self, sides: Any, bias: Tensor | None, out_dtype: torch.dtype) -> None:
        (a, scale_a, recipe_a, _), (b, scale_b, recipe_b, _) = sides
        recipes = (tuple(recipe_a), tuple(recipe_b))
        assert out_dtype in (torch.bfloat16, torch.float16, torch.float32)
        assert bias is None or (bias.shape == (b.shape[0],) and bias.dtype is out_dtype is not torch.float32)
        for at, (codes, scales, recipe, swizzles) in enumerate(sides):
            rows, row_bytes = codes.shape
            assert codes.stride() == (row_bytes, 1), "the left side is row-major, the right side column-major"
            assert rows % 16 == row_bytes % 16 == 0 and 0 not in (rows, row_bytes)
            assert len(scales) == len(recipe)
            k = row_bytes * (2 if codes.dtype is FP4 else 1)
            self._demand_scales(scales, tuple(recipe), swizzles, rows, k, at)
        if recipes == ((T.TensorWise,),) * 2 or recipes == ((T.RowWise,),) * 2:
            assert a.dtype in FP8 and b.dtype in FP8 and (a.dtype, b.dtype) != (FP8[1], FP8[1])
            if recipes[0] == (T.RowWise,):
                assert out_dtype in self.row_dtypes
                assert len(self.row_dtypes) == 3 or b.dtype is FP8[0]
        elif recipes == ((T.BlockWise1x16, T.TensorWise),) * 2:
            assert a.dtype is b.dtype is FP4
        else:
            assert a.dtype in FP8 and b.dtype in FP8 and (a.dtype, b.dtype) != (FP8[1], FP8[1])
            allowed = {tuple(((one,), (other,))) for one, other in itertools.product(BLOCKS_OF_128, repeat=2)}
            allowed -= {((T.BlockWise128x128,),) * 2}
            assert recipes in allowed | {((T.BlockWise1x32,),) * 2}
            assert recipes[0] == (T.BlockWise1x32,) or a.dtype is b.dtype is FP8[0]
        assert scale_a[0].device == scale_b[0].device == a.device
        self.seen.append((tuple(r.name for r in recipe_a), tuple(r.name for r in recipe_b), out_dtype))

    @staticmethod
    def _demand_scales(scales: Any, recipe: Any, swizzles: Any, rows: int, k: int, at: int) -> None:
        first = scales[0]
        width = {T.BlockWise1x32: 32, T.BlockWise1x16: 16}.get(recipe[0])
        if width is not None:
            assert swizzles[0] is W.SWIZZLE_32_4_4 and len(swizzles) == len(recipe)
            assert first.dtype is (torch.float8_e8m0fnu if width == 32 else torch.float8_e4m3fn)
            assert k % 32 == 0 and first.is_contiguous()
            assert first.numel() == -(-rows // 128) * 128 * (-(-k // (4 * width)) * 4)
            assert all(s.numel() == 1 and s.dtype is torch.float32 for s in scales[1:])
            return
        assert first.dtype is torch.float32 and list(swizzles) == [W.NO_SWIZZLE]
        if recipe == (T.TensorWise,):
            assert first.numel() == 1
        elif recipe == (T.RowWise,):
            assert first.shape == ((rows, 1) if at == 0 else (1, rows)) and first.stride(at) == first.stride(1) == 1
        elif recipe == (T.BlockWise1x128,):
            assert k % 128 == 0 and first.shape == (rows, k // 128) and first.stride() == (1, rows)
        else:
            assert recipe == (T.BlockWise128x128,) and k % 128 == rows % 128 == 0
            across = -(-k // 512) * 4
            assert first.shape == (across, rows // 128) and first.stride() == (1, across)

    def _values(self, codes: Tensor, scales: Any, recipe: Any, swizzles: Any) -> Tensor:
        """What the hardware multiplies: float64 [rows, k]."""
        values = self._decoded(codes)
        rows, k = values.shape
        first = scales[0]
        if recipe[0] is T.TensorWise:
            return values * first.double()
        if recipe[0] is T.RowWise:
            return values * first.double().reshape(rows, 1)
        if recipe[0] is T.BlockWise1x128:
            return values * first.double().repeat_interleave(128, 1)
        if recipe[0] is T.BlockWise128x128:
            used = first.clone()
            if self.poison is not None:
                used[k // 128 :] = self.poison
            return values * used[: k // 128].t().double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        width = 32 if recipe[0] is T.BlockWise1x32 else 16
        byte = first.view(torch.uint8)
        r, c = torch.arange(rows).unsqueeze(1), torch.arange(k // width)
        tile = r // 128 * -(-k // (4 * width)) + c // 4
        grid = byte[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4]
        decoded = grid.view(first.dtype).double() if width == 16 else _e8m0(grid)
        values = values * decoded.repeat_interleave(width, 1)
        return values if len(scales) == 1 else values * scales[1].double()

    @staticmethod
    def _decoded(codes: Tensor) -> Tensor:
        if codes.dtype is not FP4:
            return codes.double()
        byte = codes.view(torch.uint8)
        nibbles = torch.stack([byte & 15, byte >> 4], dim=-1).flatten(1).long()
        return torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=torch.float64)[nibbles]


def _e8m0(byte: Tensor) -> Tensor:
    value = torch.ldexp(torch.ones(byte.shape, dtype=torch.float64), byte.int() - 127)
    return torch.where(byte == 255, torch.nan, value)
