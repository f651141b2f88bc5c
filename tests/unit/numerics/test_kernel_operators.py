"""How the kernels behave under compilers and dispatch modes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowgauge.numerics import formats, kernels, rounding, scaling
from narrowgauge.numerics.formats import E4M3FN, Format


def current_scaling(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scale = scaling.quant_scale_of(kernels.amax(x), E4M3FN, scaling.CURRENT)
    result = kernels.quantize(x, scale, E4M3FN, carrier=torch.bfloat16, count=True)
    assert result.codes is not None and result.carrier is not None and result.saturated is not None
    return result.codes, result.carrier, result.saturated, kernels.dequantize(result.codes, 1 / scale, E4M3FN)


def test_compiled_code_is_one_graph_and_gives_the_same_bits() -> None:
    x = torch.randn(300, 40, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(current_scaling, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(x), current_scaling(x), strict=True):
        assert torch.equal(a.float(), b.float())


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_fake_tensors_get_the_right_shapes_and_dtypes(device: str) -> None:
    with FakeTensorMode():
        codes, carrier, saturated, values = current_scaling(torch.empty(300, 40, device=device))
    assert (codes.dtype, carrier.dtype, values.dtype) == (E4M3FN.dtype, torch.bfloat16, torch.float32)
    assert codes.shape == carrier.shape == values.shape == (300, 40)
    assert saturated.shape == () and codes.device.type == device


def test_operators_pass_torchs_own_check() -> None:
    # torch's own check of aliasing multiplies the outputs, which float8 tensors cannot: see the test after this one
    x, scale = torch.randn(64, 32), torch.tensor(1.5)
    codes, checks = rounding.encode(x, E4M3FN), ("test_faketensor",)
    torch.library.opcheck(torch.ops.narrowgauge.amax.default, (x,), test_utils=checks)
    arguments = (x, scale, "E4M3FN", None, True, torch.bfloat16, True)
    torch.library.opcheck(torch.ops.narrowgauge.quantize.default, arguments, test_utils=checks)
    arguments = (codes, scale, "E4M3FN", torch.float32)
    torch.library.opcheck(torch.ops.narrowgauge.dequantize.default, arguments, test_utils=checks)


@pytest.mark.parametrize("fmt", [formats.FP32, formats.BF16, formats.TF32, E4M3FN], ids=repr)
def test_operators_never_return_their_arguments(fmt: Format) -> None:
    x = torch.randn(64).to(fmt.dtype if fmt.bits > 8 else torch.float32)
    outputs = torch.ops.narrowgauge.quantize(x, None, fmt.name, None, True, x.dtype, True)
    values = torch.ops.narrowgauge.dequantize(outputs[0], None, fmt.name, outputs[0].dtype if fmt.bits > 8 else x.dtype)
    addresses = [t.data_ptr() for t in (x, values, *outputs)]
    assert len(set(addresses)) == len(addresses)
