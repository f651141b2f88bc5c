"""The Triton kernel that counts codes: in the interpreter, compiled, and on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from triton_programs import interpret

import narrowgauge as ng
from narrowgauge.numerics.kernels import counts

pytest.importorskip("triton", reason="Triton comes with torch on Linux for GPUs, and not elsewhere")
HERE = Path(__file__).parent


def test_the_kernel_counts_as_the_twin_in_the_interpreter() -> None:
    interpret(HERE / "triton_counts_interpreted.py")


@pytest.mark.slow
def test_the_kernel_compiles_without_a_gpu(gpu_build) -> None:
    from triton_counts_compiled import build_all

    build_all(gpu_build)


@pytest.mark.gpu
def test_a_gpu_counts_and_norms_as_the_cpu() -> None:
    x = torch.randn(3000, 1001, generator=torch.Generator().manual_seed(0))
    q = ng.quantize(x, ng.CastSpec(ng.formats.E4M3FN))
    on_gpu = q.cuda()
    assert torch.equal(counts.count_codes([on_gpu.codes]).cpu(), counts.count_codes([q.codes]))
    for order in (1.0, 2.0, torch.inf):
        assert torch.linalg.vector_norm(on_gpu, order).cpu() == torch.linalg.vector_norm(q, order)
