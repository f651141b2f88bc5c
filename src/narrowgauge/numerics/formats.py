"""Number formats as data.

A format is described by its field widths; everything else (extremes, code tables) follows. Sources: OCP OFP8 1.0 for
E4M3FN and E5M2, OCP MX 1.0 for E2M1FN, E3M2FN, E2M3FN and E8M0FNU, IEEE 754 for FP16 and FP32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """One number format.

    `max` is the largest finite value, `dtype` the torch dtype that stores one code (formats below 8 bits are stored
    unpacked in `uint8`, TF32 in `float32`). `saturating` says what a cast does beyond `max`: clamp (narrow formats) or
    overflow to infinity as IEEE 754 does.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    has_inf: bool
    has_nan: bool
    dtype: torch.dtype
    signed: bool = True
    saturating: bool = True

    @property
    def is_integer(self) -> bool:
        return self.exponent_bits == 0

    @property
    def is_narrow(self) -> bool:
        """True for formats of at most 8 bits, which need a scale."""
        return self.bits <= 8

    @property
    def bytes(self) -> float:
        """Bytes that one packed code takes."""
        return self.bits / 8

    @property
    def smallest_normal(self) -> float:
        if self.is_integer:
            return 1.0
        lowest_field = 1 if self.mantissa_bits else 0  # E8M0 has no subnormals, so exponent field 0 is like the others
        return 2.0 ** (lowest_field - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value; E8M0 has no subnormals and gives its smallest power of two."""
        return self.smallest_normal if self.is_integer else self.smallest_normal * 2.0**-self.mantissa_bits

    @property
    def nan_code(self) -> int | None:
        """One code that means NaN, or None where the format has none."""
        return (1 << (self.bits - int(self.signed))) - 1 if self.has_nan else None

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> str:
        return self.name  # copies and pickles are the module's own object, so that `is` holds for them


# name, bits, exponent bits, mantissa bits, bias, max, inf, nan, dtype
E4M3FN = Format("E4M3FN", 8, 4, 3, 7, 448.0, False, True, torch.float8_e4m3fn)
E5M2 = Format("E5M2", 8, 5, 2, 15, 57344.0, True, True, torch.float8_e5m2)
E2M1FN = Format("E2M1FN", 4, 2, 1, 1, 6.0, False, False, torch.uint8)
E3M2FN = Format("E3M2FN", 6, 3, 2, 3, 28.0, False, False, torch.uint8)
E2M3FN = Format("E2M3FN", 6, 2, 3, 1, 7.5, False, False, torch.uint8)
E8M0FNU = Format("E8M0FNU", 8, 8, 0, 127, 2.0**127, False, True, torch.float8_e8m0fnu, signed=False)
INT8 = Format("INT8", 8, 0, 7, 0, 127.0, False, False, torch.int8)  # -128 is not used: the grid is symmetric
UINT8 = Format("UINT8", 8, 0, 8, 0, 255.0, False, False, torch.uint8, signed=False)
INT4 = Format("INT4", 4, 0, 3, 0, 7.0, False, False, torch.int8)  # -8 is not used
UINT4 = Format("UINT4", 4, 0, 4, 0, 15.0, False, False, torch.uint8, signed=False)
INT16 = Format("INT16", 16, 0, 15, 0, 32767.0, False, False, torch.int16)
FP16 = Format("FP16", 16, 5, 10, 15, 65504.0, True, True, torch.float16, saturating=False)
BF16 = Format("BF16", 16, 8, 7, 127, float.fromhex("0x1.fep127"), True, True, torch.bfloat16, saturating=False)
TF32 = Format("TF32", 19, 8, 10, 127, float.fromhex("0x1.ffcp127"), True, True, torch.float32, saturating=False)
FP32 = Format("FP32", 32, 8, 23, 127, float.fromhex("0x1.fffffep127"), True, True, torch.float32, saturating=False)

ALL: dict[str, Format] = {
    f.name: f
    for f in (
        E4M3FN, E5M2, E2M1FN, E3M2FN, E2M3FN, E8M0FNU, INT8, UINT8, INT4, UINT4, INT16, FP16, BF16, TF32, FP32,
    )
}  # fmt: skip

_BY_DTYPE = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}


def of_dtype(dtype: torch.dtype) -> Format:
    """The wide format that a torch dtype stores: float32, bfloat16 or float16.

    Raises KeyError for any other dtype.
    """
    return _BY_DTYPE[dtype]
