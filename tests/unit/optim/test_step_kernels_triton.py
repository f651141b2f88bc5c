"""The Triton step: interpreted, compiled without a GPU, and on one."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from step_items import (
    GRADS,
    HALF_NONZERO,
    HYPERS,
    KEY,
    PARAMS,
    SCALED_PARAMS,
    SIGNED,
    UNSIGNED,
    WHOLE_E4M3,
    make,
    moved,
    same_bits,
)
from triton_programs import interpret

from narrowgauge.optim.kernels import Plan
from narrowgauge.optim.rules import Hyper, Rule
from narrowgauge.optim.update import update
from narrowgauge.recipes.cast_spec import CastSpec

pytest.importorskip("triton", reason="Triton comes with torch on Linux for GPUs, and not elsewhere")
HERE = Path(__file__).parent


def test_the_step_gives_the_bits_of_the_twin_in_the_interpreter() -> None:
    interpret(HERE / "triton_step_interpreted.py")


@pytest.mark.slow
def test_the_step_compiles_without_a_gpu(gpu_build) -> None:
    from triton_step_compiled import build_all

    build_all(gpu_build)


@pytest.mark.gpu
@pytest.mark.parametrize("specs", [(SIGNED, UNSIGNED), (WHOLE_E4M3, HALF_NONZERO)], ids=["tiles", "whole"])
@pytest.mark.parametrize("param", [*PARAMS, *SCALED_PARAMS])
@pytest.mark.parametrize(("rule", "hyper", "moments"), [case for case in HYPERS if case[0] is not Rule.MUON])
def test_a_gpu_steps_to_the_bits_of_the_cpu(
    rule: Rule, hyper: Hyper, moments: int, param: str, specs: tuple[CastSpec, ...]
) -> None:
    for grad, shape in zip(GRADS, ((1, 4096), (300, 333), (64, 256), (7, 1000), (3, 5)), strict=True):
        twin = make(param, grad, specs[:moments], hyper, shape, 3)
        item = moved(copy.deepcopy(twin), "cuda")
        assert Plan(rule).run([item], KEY) == []
        update(rule, twin, KEY)
        found = moved(item, "cpu")
        assert same_bits(found.param, twin.param)
        assert same_bits(found.master, twin.master)
        assert all(map(same_bits, found.moments, twin.moments))
