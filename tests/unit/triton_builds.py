"""Builds Triton kernels for a GPU architecture, which needs no GPU, and checks the PTX."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

# a contracted product would round once where the twin rounds twice; subnormals count; quotients and roots are IEEE's
FORBIDDEN = ("fma.rn.f32", ".ftz", "div.full", "div.approx", "rcp.approx", "sqrt.approx")


class Builder:
    """Builds kernels for one architecture: the first form of each as far as ptxas, the others as far as PTX."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture
        self.forms: dict[str, int] = {}  # of every kernel by name, how many

    def __call__(self, kernel: Any, signature: dict[str, str], constants: dict[str, Any], warps: int = 4) -> None:
        signature = {**signature, **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(
            kernel, signature, constexprs={(kernel.arg_names.index(k),): v for k, v in constants.items()}
        )
        target = GPUTarget("cuda", self.architecture, 32)
        options = {"enable_fp_fusion": False, "num_warps": warps}
        name = kernel.__name__
        with contextlib.ExitStack() as without_ptxas:
            if name in self.forms:
                without_ptxas.enter_context(mock.patch.object(CUDABackend, "make_cubin", return_value=b""))
            asm = triton.compile(source, target=target, options=options).asm
        assert name in self.forms or asm["cubin"].startswith(b"\x7fELF")
        self.forms[name] = self.forms.get(name, 0) + 1
        ptx = asm["ptx"]
        assert f".target sm_{self.architecture}" in ptx
        found = [word for word in FORBIDDEN if word in ptx]
        assert not found, (name, constants, found)
