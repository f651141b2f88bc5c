"""Which backend multiplies two formats on a device, and why.

`native`: the hardware multiplies these formats. `emulated`: the codes are carried in a wider dtype that holds them
exactly, so the products are the same numbers, without the speed or memory of the narrow hardware. `scaled_mm` is
native, but for formats of 4 and 6 bits whose codes are carried in FP8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowgauge.numerics.formats import BF16, FP32, TF32, Format
from narrowgauge.numerics.scaling import NVFP4
from narrowgauge.ops.cuda.routes import Route, Scaling, machine_of, native_of
from narrowgauge.recipes.spec import CastSpec, Emulation

BF16_CAPABILITY: tuple[int, int] = (8, 0)  # Ampere: the first with bf16 and TF32 tensor cores
FAST_BF16_FEATURES = ("amx_bf16", "avx512_bf16", "sve_bf16", "bf16")  # names of torch.cpu.get_capabilities()

SCALED_MM = "scaled_mm"
NATIVE = "native"
EMULATED = "emulated"


@dataclass(frozen=True)
class Backend:
    """How one product runs.

    name: "scaled_mm", "native" or "emulated". native: True where the hardware multiplies the formats themselves.
    reason: why, in words. carrier: the dtype that the operands' values are held in for the product (for scaled_mm None:
    it takes the codes). result: the dtype that the product is rounded to before the caller's, as hardware of these
    formats would; None: straight to the caller's. route: for scaled_mm, how it is called.
    """

    name: str
    native: bool
    reason: str
    carrier: torch.dtype | None
    result: torch.dtype | None = None
    route: Route | None = None


# The CPU feature that multiplies bf16 in hardware, or None. Read once: torch.compile cannot trace the probe.
FAST_BF16: str | None = next((f for f in FAST_BF16_FEATURES if torch.cpu.get_capabilities().get(f)), None)


def backend_of(
    left: CastSpec | Format, right: CastSpec | Format, device: torch.device, emulation: Emulation = Emulation.FAST
) -> Backend:
    """The backend of the product of two operands on `device`, each given by its cast, or by its format alone.

    The casts are those of matrices [outer dimension, dimension that is summed over].
    """
    left_spec = left if isinstance(left, CastSpec) else CastSpec(left)
    right_spec = right if isinstance(right, CastSpec) else CastSpec(right)
    left, right = left_spec.format, right_spec.format
    narrow = left.is_narrow or right.is_narrow
    result = None if left.is_narrow and right.is_narrow else _result_dtype(left, right)
    if device.type == "cuda":
        return _on_cuda(left_spec, right_spec, device, emulation, result)
    if left is FP32 and right is FP32:
        return Backend(NATIVE, True, "float32 product", torch.float32, result)
    feature = FAST_BF16 if device.type == "cpu" else None
    where = "this CPU" if device.type == "cpu" else f"device type '{device.type}'"
    if left is BF16 and right is BF16 and feature:
        return Backend(NATIVE, True, f"bf16 product ({feature})", torch.bfloat16, result)
    carrier = _carrier(left_spec, right_spec, feature is not None, emulation)
    why = f"{where} multiplies no {_pair(left, right)}"
    if not narrow and BF16 not in (left, right):
        # on CPUs native fp16 products are hundreds of times slower, and TF32 is a silent no-op
        why = f"{where} has no fast {_pair(left, right)} product"
    how = "rounded operands, float32 products" if not narrow else f"codes carried in {_short(carrier)}"
    detail = f" ({feature})" if carrier is torch.bfloat16 and feature else ""
    return Backend(EMULATED, False, f"{why}: {how}{detail}", carrier, result)


def _on_cuda(
    left_spec: CastSpec, right_spec: CastSpec, device: torch.device, emulation: Emulation, result: torch.dtype | None
) -> Backend:
    left, right = left_spec.format, right_spec.format
    machine = machine_of(device)
    assumed = "" if torch.cuda.is_available() else "no CUDA device here, assumed: "
    found = f"{assumed}{machine}"
    if left.is_narrow and right.is_narrow:
        route = native_of(left_spec, right_spec, machine)
        if isinstance(route, Route):
            return _in_hardware(route, left, right, found)
        why = f"{assumed}{route}"
    else:
        wide = _native_wide(left, right, machine.capability, found, result)
        if wide is not None:
            return wide
        why = f"{found} multiplies no {_pair(left, right)}"
    carrier = _carrier(left_spec, right_spec, machine.capability >= BF16_CAPABILITY, emulation)
    return Backend(EMULATED, False, f"{why}: codes carried in {_short(carrier)}", carrier, result)


def _in_hardware(route: Route, left: Format, right: Format, found: str) -> Backend:
    blocks = "" if route.left is Scaling.TENSOR else f" {route.left.value} by {route.right.value}"
    others = [fmt for fmt, own in zip(route.formats, (left, right), strict=True) if fmt is not own]
    carried = f", codes carried in {others[0]}" if others else ""
    return Backend(SCALED_MM, not others, f"scaled_mm{blocks} ({found}){carried}", None, None, route)


def _native_wide(
    left: Format, right: Format, capability: tuple[int, int], found: str, result: torch.dtype | None
) -> Backend | None:
    """The native backend of two equal wide formats, or None where the device has none."""
    if left is not right or left.is_narrow:
        return None
    if left is TF32:
        # the operands are already TF32 values, so the flag decides the speed and not the numbers
        allowed = torch.backends.cuda.matmul.fp32_precision == "tf32"
        if capability < BF16_CAPABILITY or not allowed:
            how = "set torch.backends.cuda.matmul.fp32_precision = 'tf32' for tensor cores"
            why = how if capability >= BF16_CAPABILITY else f"{found} has no TF32 tensor cores"
            return Backend(EMULATED, False, f"rounded operands, float32 products: {why}", torch.float32, result)
        return Backend(NATIVE, True, f"TF32 tensor cores ({found})", torch.float32, result)
    if left is BF16 and capability < BF16_CAPABILITY:
        return None
    return Backend(NATIVE, True, f"{_short(left.dtype)} product ({found})", left.dtype, result)


def _carrier(left: CastSpec, right: CastSpec, fast_bf16: bool, emulation: Emulation) -> torch.dtype:
    """bf16 where it is fast and holds every value of both operands, else float32."""
    if emulation is Emulation.FAST and fast_bf16 and _fits_bf16(left) and _fits_bf16(right):
        return torch.bfloat16
    return torch.float32


def _fits_bf16(spec: CastSpec) -> bool:
    fmt = spec.format
    # tiles are multiplied by their scales in the carrier: exact by powers of two, and for E2M1 by E4M3 (6 bits)
    if spec.in_blocks and not (spec.has_pow2_scale or spec.scale is NVFP4):
        return False
    if fmt.is_integer:
        return fmt.bits <= BF16.mantissa_bits + 1
    return fmt.mantissa_bits <= BF16.mantissa_bits and fmt.exponent_bits <= BF16.exponent_bits


def _result_dtype(left: Format, right: Format) -> torch.dtype:
    """The dtype that hardware rounds a product with a wide operand to: the wide formats' own, float32 for a mixture."""
    wide = {fmt.dtype for fmt in (left, right) if not fmt.is_narrow}
    return wide.pop() if len(wide) == 1 else torch.float32


def _pair(left: Format, right: Format) -> str:
    return left.name if left is right else f"{left.name} by {right.name}"


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "float32"}[dtype]
