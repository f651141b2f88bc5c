"""Which products of narrow formats run in CUDA hardware, by machine, and the reasons of those that do not."""

from __future__ import annotations

import itertools

import pytest
import torch

from narrowgauge.numerics.formats import E2M1FN, E2M3FN, E3M2FN, E4M3FN, E5M2, INT8
from narrowgauge.numerics.granularity import PER_COLUMN, PER_ROW, Block
from narrowgauge.numerics.scaling import CURRENT_POW2, E8M0_UP, NVFP4, Delayed
from narrowgauge.ops.cuda.product import MULTIPLES, UNITS
from narrowgauge.ops.cuda.routes import Machine, Route, Scaling, machine_of, native_of
from narrowgauge.recipes.spec import CastSpec

AMPERE, ADA, HOPPER, BLACKWELL, THOR, CONSUMER = (
    Machine(c, (12, 9)) for c in ((8, 0), (8, 9), (9, 0), (10, 0), (11, 0), (12, 0))
)
TENSOR, ROW = CastSpec(E4M3FN), CastSpec(E4M3FN, PER_ROW)
DEEPSEEK, DEEPSEEK_WEIGHT = CastSpec(E4M3FN, Block(1, 128)), CastSpec(E4M3FN, Block(128, 128))
POW2, POW2_WEIGHT = (CastSpec(E4M3FN, b, CURRENT_POW2) for b in (Block(1, 128), Block(128, 128)))
MX8, MX6, MX4 = (CastSpec(fmt, Block(1, 32), E8M0_UP) for fmt in (E4M3FN, E3M2FN, E2M1FN))
MX16, MX8_E5M2 = CastSpec(E4M3FN, Block(1, 16), E8M0_UP), CastSpec(E5M2, Block(1, 32), E8M0_UP)
E5M2_128 = CastSpec(E5M2, Block(1, 128), CURRENT_POW2)
NV8 = CastSpec(E2M1FN, Block(1, 8), NVFP4)
NV, NV_WEIGHT = CastSpec(E2M1FN, Block(1, 16), NVFP4), CastSpec(E2M1FN, Block(16, 16), NVFP4)

# left, right, and the machines that have it
TABLE = {
    "FP8 per tensor": (TENSOR, TENSOR, {ADA, HOPPER, BLACKWELL, THOR, CONSUMER}),
    "E5M2 by E4M3FN": (CastSpec(E5M2, scale=Delayed()), TENSOR, {ADA, HOPPER, BLACKWELL, THOR, CONSUMER}),
    "rows": (ROW, ROW, {ADA, HOPPER, BLACKWELL, THOR, CONSUMER}),
    "rows by tensor": (CastSpec(E5M2, PER_ROW), TENSOR, {ADA, HOPPER, BLACKWELL, THOR, CONSUMER}),
    "blocks of 128, float32 scales": (DEEPSEEK, DEEPSEEK_WEIGHT, {HOPPER}),
    "blocks of 128, powers of two": (POW2, POW2_WEIGHT, {HOPPER, BLACKWELL, THOR, CONSUMER}),
    "128x128 by 128x128": (DEEPSEEK_WEIGHT, DEEPSEEK_WEIGHT, {HOPPER}),
    "MXFP8": (MX8, MX8, {BLACKWELL, THOR, CONSUMER}),
    "MXFP6": (MX6, CastSpec(E2M3FN, Block(1, 32), E8M0_UP), {BLACKWELL, THOR, CONSUMER}),
    "MXFP4": (MX4, MX4, {BLACKWELL, THOR, CONSUMER}),
    "NVFP4": (NV, NV_WEIGHT, {BLACKWELL, THOR, CONSUMER}),
    "E5M2 by E5M2": (CastSpec(E5M2), CastSpec(E5M2), set()),
    "MXFP8 with E5M2": (MX8_E5M2, MX8, {BLACKWELL, THOR, CONSUMER}),
    "MXFP8, E5M2 by E5M2": (MX8_E5M2, MX8_E5M2, set()),
    "INT8": (CastSpec(INT8), CastSpec(INT8), set()),
    "NVFP4 by MXFP8": (NV, MX8, set()),
    "scales that change along the sum": (CastSpec(E4M3FN, PER_COLUMN), TENSOR, set()),
    "blocks of 64": (CastSpec(E4M3FN, Block(1, 64)), CastSpec(E4M3FN, Block(1, 64)), set()),
}


@pytest.mark.parametrize("name", TABLE)
def test_which_machine_has_which_product(name):
    left, right, have = TABLE[name]
    for machine in (AMPERE, ADA, HOPPER, BLACKWELL, THOR, CONSUMER):
        route = native_of(left, right, machine)
        assert isinstance(route, Route) == (machine in have), (machine, route)


SMALL = "(9.0 has those of 128, 10.0 and later those of 32 and 16)"
REASONS = [
    (TENSOR, TENSOR, AMPERE, "compute capability 8.0 has no FP8 products (8.9 and later have)"),
    (
        TENSOR,
        TENSOR,
        Machine((9, 4), None),
        "this torch is built for ROCm, whose products of narrow formats are not used",
    ),
    (CastSpec(E5M2), CastSpec(E5M2), ADA, "the hardware multiplies no E5M2 by E5M2"),
    (CastSpec(INT8), TENSOR, ADA, "scaled_mm multiplies no INT8"),
    (POW2, POW2, ADA, f"compute capability 8.9 has no products in blocks {SMALL}"),
    (MX8, MX8, HOPPER, "compute capability 9.0 multiplies blocks of 128 along the sum, not of 32"),
    (DEEPSEEK, DEEPSEEK, Machine((9, 0), (12, 8)), "CUDA 12.8 has no products in blocks of 128 (12.9 and later have)"),
    (DEEPSEEK, DEEPSEEK, BLACKWELL, "compute capability 10.0 scales blocks by powers of two, not by float32 numbers"),
    (MX8, MX16, BLACKWELL, "compute capability 10.0 multiplies blocks of 32 along the sum, not of 32 and 16"),
    (MX8, MX8, Machine((10, 0), (12, 6)), "CUDA 12.6 has no products in blocks of 32 (12.8 and later have)"),
    (E5M2_128, POW2, HOPPER, "scaled_mm multiplies blocks of 128 of E4M3FN and what it holds, not of E5M2"),
    (NV, MX4, BLACKWELL, "the hardware multiplies NVFP4 by NVFP4 only"),
    (NV, NV, HOPPER, "compute capability 9.0 has no NVFP4 products (10.0 and later have)"),
    (NV, NV8, BLACKWELL, "compute capability 10.0 multiplies NVFP4 blocks of 16 along the sum, not of 16 and 8"),
    (NV, NV, Machine((10, 0), (12, 6)), "CUDA 12.6 has no NVFP4 products (12.8 and later have)"),
]


@pytest.mark.parametrize("left, right, machine, reason", REASONS)
def test_the_reason_says_what_is_missing_and_where_it_is(left, right, machine, reason):
    assert native_of(left, right, machine) == reason


def test_the_one_pair_that_the_hardware_lacks_gets_the_scales_of_one_side_repeated():
    sizes = (Block(1, 128), Block(128, 128))
    pairs = {}
    for one, other in itertools.product(sizes, repeat=2):
        route = native_of(CastSpec(E4M3FN, one), CastSpec(E4M3FN, other), HOPPER)
        assert isinstance(route, Route)
        pairs[one.name, other.name] = (route.left, route.right)
    assert pairs == {
        ("1x128", "1x128"): (Scaling.BLOCK_1X128, Scaling.BLOCK_1X128),
        ("1x128", "128x128"): (Scaling.BLOCK_1X128, Scaling.BLOCK_128X128),
        ("128x128", "1x128"): (Scaling.BLOCK_128X128, Scaling.BLOCK_1X128),
        ("128x128", "128x128"): (Scaling.BLOCK_1X128, Scaling.BLOCK_128X128),
    }


def test_scales_of_rows_are_applied_in_the_kernels_where_torch_has_one():
    every = (torch.bfloat16, torch.float16, torch.float32)
    wanted = {ADA: every[:1], HOPPER: every, BLACKWELL: every[:1], CONSUMER: every[:1], THOR: ()}
    for machine, dtypes in wanted.items():
        assert native_of(ROW, ROW, machine).row_dtypes == dtypes
    assert native_of(ROW, ROW, Machine((9, 0), (12, 8))).row_dtypes == every[:1]
    assert native_of(ROW, CastSpec(E5M2, PER_ROW), ADA).row_dtypes == ()
    assert native_of(ROW, CastSpec(E5M2, PER_ROW), HOPPER).row_dtypes == every


@pytest.mark.parametrize("fmt", [E2M1FN, E2M3FN, E3M2FN])
def test_a_format_is_multiplied_as_one_that_holds_its_values(fmt):
    from narrowgauge.numerics import rounding

    route = native_of(CastSpec(fmt, Block(1, 32), E8M0_UP), MX8, BLACKWELL)
    assert isinstance(route, Route) and route.formats == (E4M3FN, E4M3FN)
    values = rounding.decode(torch.arange(2**fmt.bits, dtype=torch.uint8), fmt)
    assert torch.equal(rounding.decode(rounding.encode(values, E4M3FN), E4M3FN), values)


def test_every_scaling_has_a_name_of_torchs_and_a_size():
    names = {member.name for member in torch.nn.functional.ScalingType.__members__.values()}
    assert {scaling.value for scaling in Scaling} == names
    assert set(MULTIPLES) == set(Scaling) == {*UNITS, Scaling.TENSOR}


def test_a_device_that_is_not_there_is_the_least_with_fp8(monkeypatch):
    assert not torch.cuda.is_available()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert machine_of(torch.device("cuda")) == Machine((8, 9), (12, 9))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert machine_of(torch.device("cuda")) == Machine((8, 9), (13, 0))
    monkeypatch.setattr(torch.version, "hip", "7.0.1")
    assert machine_of(torch.device("cuda")).cuda is None
