"""Codes of 4 and 6 bits, packed into bytes along the last dimension and back.

4 bits: two codes a byte, the even column in the low nibble. 6 bits: four codes in three bytes, the first code in the
lowest bits of the first byte. Every row starts on a byte of its own: an odd last column has code 0 beside it.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.numerics.formats import Format
from narrowgauge.numerics.kernels.paths import has_gpu_kernels
from narrowgauge.numerics.kernels.tracing import is_traced

# below this many codes a few torch operations are faster than the passage to Numba
MIN_NUMBA = 1024

# bits -> (codes of a group, bytes of a group)
_GROUPS = {4: (2, 1), 6: (4, 3)}


def packed_width(columns: int, bits: int) -> int:
    """Bytes of a row of that many codes. Raises NarrowgaugeError unless bits is 4 or 6."""
    if bits not in _GROUPS:
        raise NarrowgaugeError(
            f"expected codes of 4 or 6 bits to pack, found bits={bits!r}: codes of 8 bits are bytes already"
        )
    return (columns * bits + 7) // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes: uint8 [..., columns], one a byte in the low bits, to uint8 [..., packed_width(columns, bits)].

    Higher bits of a byte are ignored. Raises NarrowgaugeError for another dtype, a tensor without a dimension, and
    bits other than 4 and 6.
    """
    packed_width(0, bits)
    _check_bytes(codes, "codes")
    return torch.ops.narrowgauge.pack(codes, bits) if is_traced(codes) else _pack(codes, bits)


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """The codes that `pack` packed: uint8 [..., columns].

    Raises NarrowgaugeError as `pack` does, and where the width is not that of so many columns.
    """
    width = packed_width(columns, bits)
    _check_bytes(packed, "packed codes")
    if packed.shape[-1] != width:
        raise NarrowgaugeError(
            f"{columns} columns of {bits}-bit codes take {width} bytes a row, found {packed.shape[-1]}: pass the "
            "columns of the tensor that was packed"
        )
    return torch.ops.narrowgauge.unpack(packed, bits, columns) if is_traced(packed) else _unpack(packed, bits, columns)


def pack_codes(codes: Tensor, fmt: Format) -> Tensor:
    """Codes of a format of 4 or 6 bits, one a byte, packed along their rows: `pack` of whatever dtype they have."""
    return pack(codes.view(torch.uint8), fmt.bits)


def unpack_codes(packed: Tensor, fmt: Format, columns: int) -> Tensor:
    """The inverse of `pack_codes`: of `fmt.dtype`, in two's complement of a byte where the format is of integers."""
    codes = unpack(packed, fmt.bits, columns)
    if fmt.dtype is not torch.int8:
        return codes
    sign = 1 << (fmt.bits - 1)
    return (codes.view(torch.int8) ^ sign) - sign


def pack_in_torch(codes: Tensor, bits: int) -> Tensor:
    """`pack` in plain torch operations: the slow twin."""
    per_group, bytes_of_group = _GROUPS[bits]
    columns = codes.shape[-1]
    groups = F.pad(codes & ((1 << bits) - 1), (0, -columns % per_group)).unflatten(-1, (-1, per_group)).int()
    shifts = torch.arange(0, per_group * bits, bits, dtype=torch.int32, device=codes.device)
    together = (groups << shifts).sum(dim=-1, dtype=torch.int32)
    shifts = torch.arange(0, bytes_of_group * 8, 8, dtype=torch.int32, device=codes.device)
    spread = (together.unsqueeze(-1) >> shifts).to(torch.uint8)
    return spread.flatten(-2)[..., : packed_width(columns, bits)].contiguous()


def unpack_in_torch(packed: Tensor, bits: int, columns: int) -> Tensor:
    """`unpack` in plain torch operations: the slow twin."""
    per_group, bytes_of_group = _GROUPS[bits]
    groups = F.pad(packed, (0, -packed.shape[-1] % bytes_of_group)).unflatten(-1, (-1, bytes_of_group)).int()
    shifts = torch.arange(0, bytes_of_group * 8, 8, dtype=torch.int32, device=packed.device)
    together = (groups << shifts).sum(dim=-1, dtype=torch.int32)
    shifts = torch.arange(0, per_group * bits, bits, dtype=torch.int32, device=packed.device)
    spread = ((together.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).to(torch.uint8)
    return spread.flatten(-2)[..., :columns].contiguous()


def _check_bytes(x: Tensor, what: str) -> None:
    if x.dtype is not torch.uint8 or x.ndim == 0:
        found = f"{str(x.dtype).removeprefix('torch.')} of shape {list(x.shape)}"
        raise NarrowgaugeError(f"expected {what} in uint8 with at least one dimension, found {found}")


def _pack(codes: Tensor, bits: int) -> Tensor:
    fast = _fast_module(codes)
    return pack_in_torch(codes, bits) if fast is None else fast.pack(codes, bits, packed_width(codes.shape[-1], bits))


def _unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    fast = _fast_module(packed)
    return unpack_in_torch(packed, bits, columns) if fast is None else fast.unpack(packed, bits, columns)


def _fast_module(x: Tensor) -> ModuleType | None:
    """The module whose kernels pack this tensor, loaded on first use; None for the torch operations."""
    if has_gpu_kernels(x):
        from narrowgauge.numerics.kernels import triton_packing

        return triton_packing
    if x.is_cpu and x.numel() >= MIN_NUMBA:
        from narrowgauge.numerics.kernels import cpu_packing

        return cpu_packing
    return None


_LIBRARY = torch.library.Library("narrowgauge", "FRAGMENT")
_LIBRARY.define("pack(Tensor codes, int bits) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define("unpack(Tensor packed, int bits, int columns) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("pack", _pack, "CompositeExplicitAutograd")
_LIBRARY.impl("unpack", _unpack, "CompositeExplicitAutograd")
torch.library.register_fake(
    "narrowgauge::pack",
    lambda codes, bits: codes.new_empty(*codes.shape[:-1], packed_width(codes.shape[-1], bits)),
    lib=_LIBRARY,
)
torch.library.register_fake(
    "narrowgauge::unpack",
    lambda packed, bits, columns: packed.new_empty(*packed.shape[:-1], columns),
    lib=_LIBRARY,
)
