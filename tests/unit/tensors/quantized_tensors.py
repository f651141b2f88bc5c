"""What the tests of QuantizedTensor share: specifications, tensors, layers, and their bits."""

from __future__ import annotations

import torch
from torch import nn

from narrowgauge import CURRENT_POW2, TENSOR_POW2, CastSpec
from narrowgauge.numerics.formats import BF16, E2M1FN, E4M3FN, E5M2, FP16, FP32
from narrowgauge.tensors.quantized import QuantizedTensor, quantize

FP8 = CastSpec(E4M3FN)
SCALED_FP16 = CastSpec(FP16, scale=TENSOR_POW2)
FP8_POW2 = CastSpec(E4M3FN, scale=TENSOR_POW2)
PARAMETER_SPECS = [FP8, SCALED_FP16, FP8_POW2]
SPECS = [FP8, CastSpec(E5M2, scale=CURRENT_POW2), SCALED_FP16, CastSpec(E2M1FN), CastSpec(BF16), CastSpec(FP32)]


def make(spec: CastSpec = FP8, *shape: int, seed: int = 0) -> QuantizedTensor:
    """A tensor of normal values, of shape (6, 8) by default."""
    generator = torch.Generator().manual_seed(seed)
    return quantize(torch.randn(*(shape or (6, 8)), generator=generator), spec)


def layer(spec: CastSpec, seed: int = 0, bias: bool = True) -> nn.Linear:
    """A plain layer with a quantized weight of shape (6, 8)."""
    torch.manual_seed(seed)
    module = nn.Linear(8, 6, bias=bias)
    module.weight = nn.Parameter(quantize(module.weight, spec))
    return module


def weight_of(module: nn.Linear) -> QuantizedTensor:
    """The layer's weight, which must be a quantized parameter."""
    weight = module.weight
    assert isinstance(weight, QuantizedTensor) and isinstance(weight, nn.Parameter) and weight.is_leaf
    return weight


def bits(q: torch.Tensor) -> tuple[list[int], float, float]:
    """All that is stored: the bytes of the codes in logical order, scale, amax."""
    assert isinstance(q, QuantizedTensor)
    return q.codes.contiguous().view(torch.uint8).flatten().tolist(), q.dequant_scale.item(), q.amax.item()


def values(q: torch.Tensor) -> torch.Tensor:
    """What the codes stand for, as a plain tensor without gradient."""
    assert isinstance(q, QuantizedTensor)
    return q.detach().dequantize()


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal values of that shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def scale_bits(q: QuantizedTensor) -> list[int]:
    """The bytes of the scales in logical order."""
    return q.dequant_scale.contiguous().view(-1).view(torch.uint8).tolist()


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    """Equal in every bit of codes, scales and amax."""
    assert isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor) and a.spec == b.spec
    assert a.codes.contiguous().view(torch.uint8).tolist() == b.codes.contiguous().view(torch.uint8).tolist()
    assert scale_bits(a) == scale_bits(b) and a.dequant_scale.shape == b.dequant_scale.shape
    assert torch.equal(a.amax.view(torch.int32), b.amax.view(torch.int32))
