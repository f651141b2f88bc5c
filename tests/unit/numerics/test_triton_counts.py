"""The Triton kernel that counts codes: in the interpreter, compiled, and on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from triton_programs import run

import narrowgauge as ng
from narrowgauge.numerics.kernels import counts

pytest.importorskip("triton", reason="Triton comes with torch on Linux for GPUs, and not elsewhere")


def test_the_kernel_counts_as_the_twin_in_the_interpreter() -> None:
    run("triton_counts_interpreted.py", TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["90", "100"])
def test_the_kernel_compiles_without_a_gpu(architecture: str, tmp_path: Path) -> None:
    run("triton_counts_compiled.py", architecture, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.gpu
def test_a_gpu_counts_and_norms_as_the_cpu() -> None:
    x = torch.randn(3000, 1001, generator=torch.Generator().manual_seed(0))
    q = ng.quantize(x, ng.CastSpec(ng.formats.E4M3FN))
    on_gpu = q.cuda()
    assert torch.equal(counts.count_codes([on_gpu.codes]).cpu(), counts.count_codes([q.codes]))
    for order in (1.0, 2.0, torch.inf):
        assert torch.linalg.vector_norm(on_gpu, order).cpu() == torch.linalg.vector_norm(q, order)
