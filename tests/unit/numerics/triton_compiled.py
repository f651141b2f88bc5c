"""The forms in which the Triton kernels of whole tensors are compiled for a GPU."""

from __future__ import annotations

import itertools

from triton_builds import Builder

from narrowgauge.numerics.formats import E4M3FN, E5M2
from narrowgauge.numerics.kernels import triton_cast as kernels
from narrowgauge.numerics.kernels.triton_round import fields_of

# every dtype with either format, and each of them with either carrier
DTYPES = ("*fp32", "*bf16", "*fp16")
FORMATS = ((E4M3FN, "*bf16"), (E5M2, "*fp32"))


def build_all(build: Builder) -> None:
    """Every kernel in forms that between them have each dtype, format and carrier that quantize and dequantize use."""
    block = {"BLOCK": kernels.BLOCK}
    for x in DTYPES:
        build(kernels.amax_kernel, {"x": x, "out": "*i32", "length": "i64"}, block)
    for x, (fmt, carrier) in itertools.product(DTYPES, FORMATS):
        signature = {
            "x": x,
            "scale": "*fp32",
            "codes": "*u8",
            "carrier": carrier,
            "counts": "*i64",
            "key": "*i64",
            "stream": "i32",
            "length": "i64",
        }
        flags = {"STOCHASTIC": x == "*fp32", "CODES": True, "CARRIER": True, "COUNT": True}
        build(kernels.cast_kernel, signature, {**fields_of(fmt), **flags, **block})
    for fmt, out in FORMATS:
        signature = {"codes": "*u8", "scale": "*fp32", "out": out, "length": "i64"}
        fields = {"EXPONENT": fmt.exponent_bits, "MANTISSA": fmt.mantissa_bits}
        build(kernels.decode_kernel, signature, {**fields, **block})
