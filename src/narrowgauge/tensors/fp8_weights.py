"""Weights that other programs stored in FP8 beside scales: back to values, and never raw codes in their place.

Every name known here holds what codes are to be multiplied by, `scale_inv` too: it is the inverse of what the weights
were multiplied by before their cast (DeepSeek-V3, transformers' FineGrainedFP8, compressed-tensors, ModelOpt).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from narrowgauge.errors import CheckpointError
from narrowgauge.tensors.quantized import QuantizedTensor

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
BLOCK = (128, 128)  # rows, columns: DeepSeek-V3
_MX_BLOCK = (1, 32)  # OCP MX v1.0
# endings of a parameter's name, and, where that is `weight`, what stands in its place
_ENDINGS = ("_scale_inv", "_scale")
_INSTEAD = ("scale_inv", "scale", "qscale_weight")
_CODES, _OWN_SCALE, _OWN_AMAX = ".codes", ".dequant_scale", ".amax"  # as `narrowgauge.save` names them
_OF_ACTIVATIONS = (
    "input_scale", "activation_scale", "output_scale", "q_scale", "k_scale", "v_scale", "kv_scale", "qscale_act",
)  # fmt: skip
# Of a weight with amax a in E4M3 the scale is a / 448 and its inverse makes 448^2 / a of it: what lies beyond 448 was
# multiplied by the wrong one of the two, unless the weights themselves are as large as none ever are.
PLAUSIBLE_AMAX = 448.0


@dataclass(frozen=True)
class WideState:
    """A state dict without codes. ignored: names that were left out, and why."""

    state: dict[str, Tensor]
    ignored: dict[str, str] = field(default_factory=dict)


def is_fp8(value: object) -> bool:
    """True for a plain tensor of FP8 codes; a QuantizedTensor has the dtype that it stands for, and its scales."""
    return isinstance(value, Tensor) and not isinstance(value, QuantizedTensor) and value.dtype in FP8_DTYPES


def dequantize_state(
    state: Mapping[str, Tensor], block: tuple[int, int] = BLOCK, own: Mapping[str, Tensor] | None = None
) -> WideState:
    """Replace every weight in FP8 by `codes * scale`, multiplied in float32; all other tensors stay as they are.

    The scale of `layer.weight` is `layer.weight_scale_inv`, `layer.weight_scale`, `layer.scale_inv`, `layer.scale` or
    `layer.qscale_weight`; that of `layer.weight.codes` is `layer.weight.dequant_scale`. Its shape: () or (1,) for the
    whole, (N, 1) or (N,) for rows, (ceil(N / rows), ceil(K / columns)) for blocks, which may be cut off at the edges,
    with the dimensions of a stack of matrices before these. Its dtype: a floating one, or uint8 for E8M0 bytes, whose
    blocks may be of 1x32. Scales of activations are left out: a recipe takes them itself.

    block: (rows, columns) of a block. own: the model's own state dict: what it names is no scale, and what is in FP8
    there is left in FP8.

    Raises CheckpointError, with the tensor's name, for a weight without a scale or with two, a scale of another shape,
    or one that is not finite and positive, and for values beyond what weights can be: 1 / scale was stored.
    """
    own = own or {}
    wide: dict[str, Tensor] = {}
    ignored: dict[str, str] = {}
    used: set[str] = set()
    for name, value in state.items():
        if is_fp8(value) and not is_fp8(own.get(name)):
            used.add(name)
            target, scale_name = _scale_of(name, state, own)
            wide[target] = _dequantize(name, value, scale_name, state[scale_name], block)
            used.add(scale_name)
            if name.endswith(_CODES):
                used.add(f"{target}{_OWN_AMAX}")
    for name, value in state.items():
        if name in used:
            continue
        if used and name not in own and name.rpartition(".")[2] in _OF_ACTIVATIONS:
            ignored[name] = "it scales activations, whose scales a recipe takes itself"
        else:
            wide[name] = value
    return WideState(wide, ignored)


def _scale_of(name: str, state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> tuple[str, str]:
    """(the parameter's name, its scale's)."""
    if name.endswith(_CODES):
        target = name.removesuffix(_CODES)
        candidates = [f"{target}{_OWN_SCALE}"]
    else:
        target = name
        candidates = [f"{name}{ending}" for ending in _ENDINGS]
        if name == "weight" or name.endswith(".weight"):
            candidates += [f"{name.removesuffix('weight')}{instead}" for instead in _INSTEAD]
    found = [candidate for candidate in candidates if candidate in state and candidate not in own]
    if not found:
        raise CheckpointError(
            f"'{name}' is in FP8 and its scale is missing: expected one of {', '.join(candidates)}: without it the "
            "codes mean nothing; take the weights from a file that holds the scale"
        )
    if len(found) > 1:
        raise CheckpointError(f"'{name}' is in FP8 and has more than one scale: {', '.join(found)}: remove all but one")
    return target, found[0]


def _dequantize(name: str, codes: Tensor, scale_name: str, scale: Tensor, block: tuple[int, int]) -> Tensor:
    in_bytes = scale.dtype is torch.uint8
    if in_bytes:
        scale = scale.view(torch.float8_e8m0fnu)
    if not scale.is_floating_point():
        raise CheckpointError(
            f"'{scale_name}': expected floating values, or uint8 for E8M0 bytes, found {scale.dtype}: it is no scale"
        )
    is_power = scale.dtype is torch.float8_e8m0fnu
    scale = scale.float()
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise CheckpointError(
            f"'{scale_name}': expected finite scales above 0, found {_first_bad(scale)!r}: the file is damaged, or it "
            "is no scale"
        )
    blocks = (block, _MX_BLOCK) if is_power else (block,)
    plain = codes.float()
    values = plain * _expand(name, codes.shape, scale_name, scale, blocks)
    amax = torch.where(plain.isfinite(), values.abs(), 0.0).max().item() if values.numel() else 0.0
    if amax > PLAUSIBLE_AMAX:
        raise CheckpointError(
            f"'{name}' times '{scale_name}' reaches {amax:.4g}, expected weights of at most {PLAUSIBLE_AMAX:g}: the "
            "scale is probably what the weights were multiplied by before their cast: store 1 / scale"
        )
    return values


def _first_bad(scale: Tensor) -> float:
    return scale[~(scale.isfinite() & (scale > 0))].flatten()[0].item()


def _expand(
    name: str, shape: torch.Size, scale_name: str, scale: Tensor, blocks: tuple[tuple[int, int], ...]
) -> Tensor:
    """The scale of every value, as a tensor that broadcasts to `shape`."""
    if scale.numel() == 1:
        return scale.reshape(())
    grids: list[tuple[int, ...]] = []
    if len(shape) >= 2:
        *batch, rows, columns = shape
        for whole, short in (((*batch, rows, 1), (*batch, rows)), ((*batch, 1, 1), tuple(batch))):
            if scale.shape in (whole, short):
                return scale.reshape(whole)
            grids.append(whole)
        for tile_rows, tile_columns in blocks:
            grid = (*batch, math.ceil(rows / tile_rows), math.ceil(columns / tile_columns))
            if scale.shape == grid:
                over_rows = scale.repeat_interleave(tile_rows, -2)[..., :rows, :]
                return over_rows.repeat_interleave(tile_columns, -1)[..., :columns]
            grids.append(grid)
    known = ", ".join(str(grid) for grid in dict.fromkeys(grids) if math.prod(grid) > 1)
    tiles = " or ".join(f"{rows}x{columns}" for rows, columns in blocks)
    raise CheckpointError(
        f"'{scale_name}': expected a scale for '{name}' of shape {tuple(shape)}: one value"
        + (f", or shape {known} (whole matrices, rows, blocks of {tiles})" if known else "")
        + f"; found shape {tuple(scale.shape)}: give the block size that the file was written with"
    )
