"""The Numba kernels that pack codes, on torch tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.numerics.kernels import numba_packing

_PACK = {4: numba_packing.pack4, 6: numba_packing.pack6}
_UNPACK = {4: numba_packing.unpack4, 6: numba_packing.unpack6}
_PER_GROUP = {4: 2, 6: 4}


def pack(codes: Tensor, bits: int, width: int) -> Tensor:
    """`packing.pack` of a tensor that is not empty; width: bytes of a row."""
    out = torch.empty(*codes.shape[:-1], width, dtype=torch.uint8)
    _PACK[bits](_flat(codes), _columns(codes, bits), _flat(out))
    return out


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """`packing.unpack` of a tensor that is not empty."""
    out = torch.empty(*packed.shape[:-1], columns, dtype=torch.uint8)
    _UNPACK[bits](_flat(packed), _columns(out, bits), _flat(out))
    return out


def _columns(codes: Tensor, bits: int) -> int:
    """The length of a row; rows of whole groups are one long row."""
    columns = codes.shape[-1]
    return codes.numel() if columns % _PER_GROUP[bits] == 0 else columns


def _flat(x: Tensor):
    return x.detach().contiguous().numpy().reshape(-1)
