"""A layer on CUDA, by recipe and machine: its three products in the hardware against the emulation of the same."""

from __future__ import annotations

import pytest
import torch
from cuda_hardware import Hardware
from torch import Tensor
from torch.nn import functional as F

import narrowgauge as ng
from narrowgauge.ops import backends
from narrowgauge.ops import casts as casts_module
from narrowgauge.ops.cuda.routes import Machine
from narrowgauge.ops.linear import LinearCasts, linear

ADA, HOPPER, BLACKWELL = (Machine(c, (12, 9)) for c in ((8, 9), (9, 0), (10, 0)))
EVERY = (torch.bfloat16, torch.float16, torch.float32)
ALL, NONE = ("scaled_mm",) * 3, ("emulated",) * 3
# recipe and options, machine, what runs output, grad_input and grad_weight; whether the hardware has the formats itself
CASES = {
    "current, Ada": ("fp8_current", {}, ADA, ALL, True),
    "rowwise, Ada": ("fp8_rowwise", {}, ADA, ALL, True),
    "rowwise, Hopper": ("fp8_rowwise", {}, HOPPER, ALL, True),
    "rowwise, float32 scales, Blackwell": ("fp8_rowwise", {"scale": "CURRENT"}, BLACKWELL, ALL, True),
    "rowwise, wide grad_weight": ("fp8_rowwise_gw_hp", {}, HOPPER, ("scaled_mm", "scaled_mm", "native"), True),
    "block, Ada": ("fp8_block", {}, ADA, NONE, False),
    "block, Hopper": ("fp8_block", {}, HOPPER, ALL, True),
    "block, float32 scales, Hopper": ("fp8_block", {"scale": "CURRENT"}, HOPPER, ALL, True),
    "block, Blackwell": ("fp8_block", {}, BLACKWELL, ALL, True),
    "block, float32 scales, Blackwell": ("fp8_block", {"scale": "CURRENT"}, BLACKWELL, NONE, False),
    "MXFP8, Hopper": ("mxfp8", {}, HOPPER, NONE, False),
    "MXFP8, Blackwell": ("mxfp8", {}, BLACKWELL, ALL, True),
    "MXFP8 with E5M2, Blackwell": ("mxfp8", {"fp8_format": "HYBRID"}, BLACKWELL, ALL, True),
    "MXFP6, Blackwell": ("mxfp6", {}, BLACKWELL, ALL, False),
    "MXFP4, Blackwell": ("mxfp4", {"stochastic": False}, BLACKWELL, ALL, False),
    "NVFP4, Hopper": ("nvfp4", {"stochastic": False}, HOPPER, NONE, False),
    "NVFP4, Blackwell": ("nvfp4", {"stochastic": False}, BLACKWELL, ALL, True),
}


def casts_of(name: str) -> LinearCasts:
    recipe, options, *_ = CASES[name]
    return LinearCasts.of(ng.recipe(recipe, **options, compute="BF16", emulation="exact"), quantized=True)


def set_machine(monkeypatch: pytest.MonkeyPatch, name: str) -> Hardware:
    """Let layers on this CPU decide as on the machine of that case, whose hardware is written down in the tests."""
    machine = CASES[name][2]
    monkeypatch.setattr(backends, "machine_of", lambda device: machine)
    hardware = Hardware(row_dtypes=EVERY if machine is HOPPER else EVERY[:1])
    monkeypatch.setattr(F, "scaled_mm", hardware)
    monkeypatch.setattr(torch, "_scaled_mm", hardware.older)
    return hardware


@pytest.mark.parametrize("name", CASES)
def test_which_products_run_in_the_hardware(monkeypatch, name):
    set_machine(monkeypatch, name)
    casts, cuda = casts_of(name), torch.device("cuda")
    found = [casts.backend(gemm, cuda) for gemm in casts_module.GEMMS]
    wanted, formats_are_native = CASES[name][3:]
    assert tuple(backend.name for backend in found) == wanted
    assert all(backend.native for backend in found) == formats_are_native
    for backend in found:
        assert (backend.route is None) == (backend.name != "scaled_mm") == (backend.carrier is not None)


# case 49
@pytest.mark.parametrize("shape", [(7, 17, 31), (130, 300, 150)], ids=str)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "scaled_mm" in case[3]])
def test_the_hardware_gives_what_the_emulation_gives(monkeypatch, name, shape):
    emulated = gradients(casts_of(name), *shape)
    hardware = set_machine(monkeypatch, name)
    cuda = torch.device("cuda")
    monkeypatch.setattr(casts_module, "backend_of", lambda *given: backends.backend_of(*given[:2], cuda, given[3]))
    native = gradients(casts_of(name), *shape)
    assert len(hardware.seen) == sum(each == "scaled_mm" for each in CASES[name][3])
    for role, value in native.items():
        # both have the same operands, and sum in float32: roundings of 300 terms, far below those of the casts
        torch.testing.assert_close(
            value, emulated[role], rtol=2.0**-7, atol=float(emulated[role].abs().max()) * 2.0**-12
        )


def gradients(casts: LinearCasts, rows: int, inputs: int, outputs: int) -> dict[str, Tensor]:
    """The output of a layer, and the gradients of what it takes."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(s, generator=generator) for s in ((rows, inputs), (outputs, inputs), (outputs,)))
    leaves = {"grad_input": x, "grad_weight": weight, "grad_bias": bias}
    for leaf in leaves.values():
        leaf.requires_grad_()
    y = linear(x, weight, bias, casts, out_dtype=torch.float32)
    y.backward(torch.randn(y.shape, generator=generator))
    return {"output": y.detach(), **{role: leaf.grad for role, leaf in leaves.items() if leaf.grad is not None}}
