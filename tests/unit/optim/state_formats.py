"""Formats of moments, masters and weights that tests of several files go through."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.numerics.formats import BF16, E4M3FN, E5M2, FP16, FP32, INT4, INT8, INT16, UINT4, UINT8
from narrowgauge.tensors.packed import PackedTensor

SCALED_FP16 = ng.CastSpec(FP16, scale=ng.TENSOR_POW2)
ROW_256, ROW_128 = ng.Block(1, 256), ng.Block(1, 128)

# name -> (exp_avg, exp_avg_sq)
MOMENTS = {
    "fp32": (ng.CastSpec(FP32), ng.CastSpec(FP32)),
    "bf16": (ng.CastSpec(BF16), ng.CastSpec(BF16)),
    "scaled fp16": (SCALED_FP16, SCALED_FP16),
    "E4M3": (ng.CastSpec(E4M3FN), ng.CastSpec(E4M3FN)),
    "E5M2": (ng.CastSpec(E5M2), ng.CastSpec(E5M2)),
    "FP8-LM": (ng.CastSpec(E4M3FN), SCALED_FP16),
    "E4M3 blocks": (ng.CastSpec(E4M3FN, ROW_128), ng.CastSpec(E4M3FN, ROW_128)),
    "COAT": (ng.CastSpec(E4M3FN, ROW_128, companding=ng.RANGE_EXPANSION),) * 2,
    "int8 square root": (
        ng.CastSpec(INT8, ROW_256, companding=ng.SQUARE_ROOT),
        ng.CastSpec(UINT8, ROW_256, companding=ng.SQUARE_ROOT),
    ),
    "int8 dynamic": (
        ng.CastSpec(INT8, ROW_256, companding=ng.DYNAMIC),
        ng.CastSpec(UINT8, ROW_256, companding=ng.DYNAMIC),
    ),
    "int8": (ng.CastSpec(INT8, ROW_128), ng.CastSpec(UINT8, ROW_128)),
    "4 bits": (ng.CastSpec(INT4, ROW_128), ng.CastSpec(UINT4, ROW_128)),
    "4 bits square root": (
        ng.CastSpec(INT4, ROW_128, companding=ng.SQUARE_ROOT),
        ng.CastSpec(UINT4, ROW_128, companding=ng.SQUARE_ROOT),
    ),
}
MASTERS = {
    "none": None,
    "fp32": ng.CastSpec(FP32),
    "bf16": ng.CastSpec(BF16),
    "scaled fp16": SCALED_FP16,
    "8-bit residual": ng.CastSpec(INT8, scale=ng.ULP),
    "16-bit remainder": ng.CastSpec(INT16, scale=ng.ULP),
}
WEIGHTS = ("fp32", "bf16", "scaled fp16", "E4M3")
GRADS = ("fp32", "bf16", "E4M3", "E5M2")


def parameter(values: Tensor, weight: str) -> nn.Parameter:
    """A parameter of float32 `values` in one of WEIGHTS."""
    if weight == "scaled fp16":
        return nn.Parameter(ng.quantize(values, SCALED_FP16))
    if weight == "E4M3":
        return nn.Parameter(ng.quantize(values, ng.CastSpec(E4M3FN)))
    return nn.Parameter(values.to(torch.bfloat16) if weight == "bf16" else values.clone())


def set_grad(p: Tensor, values: Tensor, grad: str) -> None:
    """Give `p` float32 `values` as its gradient in one of GRADS."""
    if grad in ("E4M3", "E5M2"):
        p.grad = ng.quantize(values.to(p.dtype), ng.CastSpec(E4M3FN if grad == "E4M3" else E5M2))
        return
    p.grad_dtype = torch.bfloat16 if grad == "bf16" else torch.float32
    p.grad = values.to(p.grad_dtype)


def bits(x: Tensor) -> list[Tensor]:
    """The plain tensors that hold all bits of a stored tensor, as integers; copies."""
    if isinstance(x, ng.QuantizedTensor | PackedTensor):
        codes = x.codes if isinstance(x, ng.QuantizedTensor) else x.packed
        parts = [codes, x.dequant_scale, x.amax]
    else:
        parts = [x]
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [part.detach().clone().view(kinds[part.element_size()]) for part in parts]


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert type(a.data) is type(b.data) and a.dtype is b.dtype and a.shape == b.shape
    for one, other in zip(bits(a), bits(b), strict=True):
        assert torch.equal(one, other)
