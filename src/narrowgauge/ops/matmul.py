"""The three GEMMs of a linear layer as data, and the functions that run one on each backend.

With input [M, K], weight [N, K] and grad_output [M, N]:

    output      [M, N] = input @ weight.T
    grad_input  [M, K] = grad_output @ weight
    grad_weight [N, K] = grad_output.T @ input
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.ops import kernels
from narrowgauge.ops.backends import Backend
from narrowgauge.ops.cuda.product import Side, scaled_product
from narrowgauge.recipes.spec import CastSpec

# oneDNN multiplies a transposed bf16 left side up to 1.6 times slower than a plain one; from this many columns of the
# right side on, that costs more than a copy does (measured with AMX, one thread)
MIN_COLUMNS_TO_TRANSPOSE = 512


@dataclass(frozen=True)
class Gemm:
    """One of the three products: which role stands on which side, and whether it is transposed there."""

    name: str
    left: str
    right: str
    left_transposed: bool = False
    right_transposed: bool = False


OUTPUT = Gemm("output", "input", "weight", right_transposed=True)
GRAD_INPUT = Gemm("grad_input", "grad_output", "weight")
GRAD_WEIGHT = Gemm("grad_weight", "grad_output", "input", left_transposed=True)
GEMMS = (OUTPUT, GRAD_INPUT, GRAD_WEIGHT)  # the order of override_linear_precision


class Factor(NamedTuple):
    """One side of a product: 2-dimensional values as the backend takes them, standing for `values * dequant_scale`.

    values: codes for scaled_mm, else the values of the codes, times those of their tiles' scales, in the backend's
    carrier dtype, or in a dtype that goes into it exactly. dequant_scale: 0-dimensional float32, or None for 1.
    block_scale: with codes, the scales of the tiles that `spec` says, as they are stored.
    """

    values: Tensor
    dequant_scale: Tensor | None
    spec: CastSpec
    block_scale: Tensor | None = None


def multiply(
    gemm: Gemm, left: Factor, right: Factor, backend: Backend, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """Run `gemm` on `backend`: (left @ right) * scales + bias in `out_dtype`.

    bias: [columns], rounded to `out_dtype` before it is added in float32. The result overflows as IEEE 754 does.
    """
    if backend.route is not None:
        sides = _side(left, gemm.left_transposed), _side(right, not gemm.right_transposed)
        return scaled_product(*sides, backend.route, out_dtype, bias)
    assert backend.carrier is not None
    a = left.values.t() if gemm.left_transposed else left.values
    b = right.values.t() if gemm.right_transposed else right.values
    result = out_dtype if backend.result is None else backend.result
    y = emulated_gemm(a, b, left.dequant_scale, right.dequant_scale, result, bias, backend.carrier)
    return y.to(out_dtype)


def _side(factor: Factor, is_transposed: bool) -> Side:
    """The operand as [outer dimension, dimension that is summed over]."""
    codes, scale, spec = factor.values, factor.block_scale, factor.spec
    if is_transposed:
        codes, scale, spec = codes.t(), None if scale is None else scale.t(), spec.transposed
    return Side(codes, spec.format, spec.granularity, scale, factor.dequant_scale)


def emulated_gemm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    carrier: torch.dtype,
) -> Tensor:
    """(a @ b) * scale_a * scale_b + bias: a [M, K], b [K, N], any strides, multiplied in `carrier` (bfloat16, float32).

    The product accumulates in float32. From float32 carriers it is scaled in float32 and rounded to `out_dtype` once;
    from bf16 carriers on a CPU it is scaled in float32 and rounded to bf16 first.
    """
    if a.device.type == "cpu":
        return torch.ops.narrowgauge.carried_mm(a, b, scale_a, scale_b, bias, out_dtype, carrier)
    a, b = a.to(carrier), b.to(carrier)
    scale = _product_scale(scale_a, scale_b)
    with _outside_autocast(a.device.type):
        if scale is None and bias is None:
            return torch.mm(a, b).to(out_dtype)
        wide = torch.mm(a, b, out_dtype=torch.float32) if a.device.type == "cuda" else torch.mm(a.float(), b.float())
    if scale is not None:
        wide = wide * scale
    if bias is not None:
        wide = wide + bias.to(out_dtype).float()
    return wide.to(out_dtype)


def _outside_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """The carrier is chosen: an autocast region around the call must not recast it."""
    if device_type != "meta" and torch.is_autocast_enabled(device_type):  # the meta device has no autocast
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def _product_scale(scale_a: Tensor | None, scale_b: Tensor | None) -> Tensor | None:
    if scale_a is None or scale_b is None:
        return scale_b if scale_a is None else scale_a
    return scale_a * scale_b


def _carried_mm_cpu(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    carrier: torch.dtype,
) -> Tensor:
    a, b = a.to(carrier), b.to(carrier)
    scale = _product_scale(scale_a, scale_b)
    # alpha is applied to the float32 sum, before it is rounded to the carrier: one rounding, and no pass of its own
    alpha = 1.0 if scale is None else scale.item()
    fused = bias is not None and (a.dtype is torch.float32 or a.dtype is dtype)
    addend = a.new_empty(()).expand(a.shape[0], b.shape[1])
    if fused and bias is not None:
        addend = bias.to(dtype).to(a.dtype)
    if a.dtype is torch.bfloat16 and a.stride(0) == 1 and a.stride(1) > 1 and b.shape[1] >= MIN_COLUMNS_TO_TRANSPOSE:
        a = kernels.transposed(a.t())
    with _outside_autocast("cpu"):
        y = torch.addmm(addend, a, b, beta=1 if fused else 0, alpha=alpha).to(dtype)
    return y if fused or bias is None else y + bias.to(dtype)


def _carried_mm_shape(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    carrier: torch.dtype,
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


# one opaque operator: torch.compile sees neither the host read of the scale, which is free on a CPU, nor the way from a
# rounded operand to its carrier: Inductor drops a rounding that is followed by a widening
_library = torch.library.Library("narrowgauge", "FRAGMENT")
_library.define(
    "carried_mm(Tensor a, Tensor b, Tensor? scale_a, Tensor? scale_b, Tensor? bias, ScalarType dtype,"
    " ScalarType carrier) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("carried_mm", _carried_mm_cpu, "CPU")
torch.library.register_fake("narrowgauge::carried_mm", _carried_mm_shape, lib=_library)
