"""What each product of a linear layer takes of its operands: streams, transforms, copies that are shared, and books."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import narrowgauge as ng
from narrowgauge.numerics.formats import BF16, E2M1FN, E4M3FN, E5M2, FP16, FP32
from narrowgauge.numerics.granularity import PER_ROW, Block
from narrowgauge.numerics.hadamard import Hadamard
from narrowgauge.numerics.scaling import CURRENT, CURRENT_POW2, E8M0_UP, NONE, NVFP4
from narrowgauge.ops import operands
from narrowgauge.ops.backends import FAST_BF16
from narrowgauge.ops.linear import LinearCasts, linear
from narrowgauge.ops.matmul import GEMMS, GRAD_INPUT, GRAD_WEIGHT
from narrowgauge.ops.shared import SharedInputs
from narrowgauge.ops.smoothing import channel_factors
from narrowgauge.recipes.spec import CastSpec, Emulation

FP8 = LinearCasts(CastSpec(E4M3FN), CastSpec(E4M3FN), CastSpec(E5M2), FP32, emulation=Emulation.EXACT)
MX = LinearCasts(*[CastSpec(E4M3FN, Block(1, 32), E8M0_UP)] * 3, FP32, emulation=Emulation.EXACT)
ROWS = LinearCasts(*[CastSpec(E4M3FN, PER_ROW, CURRENT_POW2)] * 3, FP32, emulation=Emulation.EXACT)
BLOCKS = replace(ROWS, input=CastSpec(E4M3FN, Block(1, 128), CURRENT), weight=CastSpec(E4M3FN, Block(128, 128)))
FP4 = LinearCasts(
    CastSpec(E2M1FN, Block(1, 16), NVFP4),
    CastSpec(E2M1FN, Block(16, 16), NVFP4),
    CastSpec(E2M1FN, Block(1, 16), NVFP4, ng.STOCHASTIC),
    FP32,
    emulation=Emulation.EXACT,
    hadamard=Hadamard(),
)
M, K, N = 48, 64, 40


def leaves(m: int = M, k: int = K, n: int = N) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=draw).requires_grad_() for shape in ((m, k), (n, k), (n,)))  # type: ignore


def step(casts: LinearCasts, parts: tuple[Tensor, ...] | None = None, **options: Any) -> list[Tensor]:
    """The output and all gradients of one call."""
    x, weight, bias = parts or leaves()
    y = linear(x, weight, bias, casts, out_dtype=torch.float32, **options)
    draw = torch.Generator().manual_seed(1)
    grads = torch.autograd.grad(y, (x, weight, bias), torch.randn(y.shape, generator=draw))
    return [y.detach(), *grads]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_every_cast_of_a_recipe_reaches_the_layer():
    roles = ("input", "weight", "grad_output", "activation", "weight_for_grad_input", "grad_output_for_grad_weight")
    # each of them another
    specs = {role: CastSpec(E4M3FN, Block(1, 16 << at), E8M0_UP) for at, role in enumerate(roles)}
    recipe = ng.recipe("fp8_current", compute="BF16", hadamard=Hadamard.seeded(3), emulation="exact", **specs)
    recipe = recipe.replace(override_linear_precision=(True, False, False))
    casts = LinearCasts.of(recipe, quantized=True, smooth=True)
    renamed = {"in_compute": recipe.override_linear_precision, "smooth": True, "emulation": Emulation.EXACT}
    for field in fields(LinearCasts):
        assert getattr(casts, field.name) == renamed.get(field.name, getattr(recipe, field.name, None)), field.name
    taken = {(gemm.name, role): casts.spec(gemm, role) for gemm in GEMMS for role in (gemm.left, gemm.right)}
    wide = CastSpec(BF16)
    assert taken == {
        ("output", "input"): wide, ("output", "weight"): wide,
        ("grad_input", "grad_output"): specs["grad_output"],
        ("grad_input", "weight"): specs["weight_for_grad_input"].transposed,
        ("grad_weight", "grad_output"): specs["grad_output_for_grad_weight"].transposed,
        ("grad_weight", "input"): specs["activation"].transposed,
    }  # fmt: skip


def test_every_operand_of_every_product_has_random_bits_of_its_own():
    # the errors of both sides of a product, and of one operand in two products, are independent
    streams = [FP4.operand(gemm, role).stream for gemm in GEMMS for role in (gemm.left, gemm.right)]
    assert len(set(streams)) == 6


def test_a_product_in_the_compute_dtype_takes_operands_as_they_are():
    casts = replace(FP4, in_compute=(False, False, True))
    assert {casts.operand(GRAD_WEIGHT, role).hadamard for role in ("input", "grad_output")} == {None}
    x, weight, bias = leaves()
    grad = torch.randn(M, N, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(step(casts, (x, weight, bias))[2], grad.t() @ x.detach())


@pytest.mark.parametrize(
    ("casts", "made"),
    [
        (FP8, ["grad_output", "input", "weight"]),
        (
            replace(MX, weight=CastSpec(E4M3FN, Block(32, 32), E8M0_UP)),
            ["grad_output"] * 2 + ["input"] * 2 + ["weight"],
        ),
        (MX, ["grad_output"] * 2 + ["input"] * 2 + ["weight"] * 2),
        (replace(FP8, hadamard=Hadamard()), ["grad_output"] * 2 + ["input"] * 2 + ["weight"]),
        # transformed for grad_weight, but the weight is not
        (FP4, ["grad_output"] * 2 + ["input"] * 2 + ["weight"]),
    ],
    ids=["tensor", "square", "rows", "tensor, transformed", "blocks, transformed"],
)
def test_one_copy_serves_two_products_where_scale_and_transform_allow_it(monkeypatch, casts, made):
    seen: list[str] = []
    real = operands.cast_by
    role_of = {M * K: "input", N * K: "weight", M * N: "grad_output"}
    monkeypatch.setattr(
        operands, "cast_by", lambda x, *given, **options: seen.append(role_of[x.numel()]) or real(x, *given, **options)
    )
    step(casts)
    assert sorted(seen) == made


@pytest.mark.parametrize(
    "casts", [FP8, MX, FP4, replace(MX, in_compute=(True, False, False))], ids=["tensor", "mx", "nvfp4", "output wide"]
)
def test_each_role_is_counted_once_however_often_it_is_cast(casts):
    calls: list[tuple[str, int]] = []

    class Count:
        has_bins = False

        def add(self, role, tally):
            calls.append((role, tally.read().sums["values"]))

    counted, plain = (
        step(casts, counter=counter, generator=torch.Generator().manual_seed(0)) for counter in (Count(), None)
    )
    assert_same(counted, plain)
    assert sorted(calls) == [("grad_output", M * N), ("input", M * K), ("weight", N * K)]


def test_ranks_of_a_process_group_round_by_other_bits(monkeypatch):
    alone = step(FP4, generator=torch.Generator().manual_seed(0))
    found = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank in (0, 1):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        found.append(step(FP4, generator=torch.Generator().manual_seed(0)))
    assert_same(found[0], alone)
    assert torch.equal(found[1][0], alone[0])  # nothing stochastic in the forward product
    assert not torch.equal(found[1][1], alone[1]) and not torch.equal(found[1][2], alone[2])


@pytest.mark.parametrize("stored", [MX.weight, BLOCKS.weight, FP4.weight, CastSpec(E4M3FN, PER_ROW)], ids=str)
def test_a_weight_stored_in_tiles_is_cast_by_its_values(stored):
    x, weight, bias = leaves()
    kept = ng.quantize(weight.detach(), stored)
    for spec in (stored, CastSpec(stored.format, scale=NONE), CastSpec(E4M3FN)):
        casts = replace(FP8, weight=spec)
        expected = step(casts, (x, kept.dequantize().requires_grad_(), bias))
        found = step(casts, (x, torch.nn.Parameter(kept), bias))
        if spec == stored and not spec.has_pow2_scale and spec.scale is not NVFP4:
            # the codes are multiplied as they are; a cast of their values would round the scale once more
            assert all(torch.allclose(a, b, rtol=2**-7, atol=1e-3) for a, b in zip(found, expected, strict=True))
        else:
            assert_same(found, expected)


@pytest.mark.parametrize("casts", [FP8, ROWS, MX, FP4], ids=["tensor", "rows", "mx", "nvfp4"])
@pytest.mark.parametrize("other", ["smooth", "not transformed", "other format"])
def test_siblings_share_only_what_is_the_same(casts, other):
    second = {
        "smooth": replace(casts, smooth=True),
        "not transformed": replace(casts, hadamard=None if casts.hadamard else Hadamard()),
        "other format": replace(casts, input=replace(MX.input, format=E5M2)),
    }[other]
    parts = leaves()
    # channels of very different magnitude: smoothing changes every bit of what is cast
    parts[0].data *= torch.ldexp(torch.ones(K), torch.arange(K) % 7 - 3)
    for first, then in ((casts, second), (second, casts)):
        shared: SharedInputs = SharedInputs()
        for which in (first, then):
            expected = step(which, parts, generator=torch.Generator().manual_seed(0))
            assert_same(step(which, parts, generator=torch.Generator().manual_seed(0), shared=shared), expected)


@pytest.mark.parametrize("in_compute", [(False, True, False), (True, True, True)], ids=str)
def test_smoothing_leaves_products_in_the_compute_dtype_as_they_are(in_compute):
    parts = leaves()
    smooth, plain = (step(replace(FP8, smooth=smooth, in_compute=in_compute), parts) for smooth in (True, False))
    for at, runs_wide in ((0, in_compute[0]), (1, in_compute[1]), (2, in_compute[2])):
        if runs_wide:  # powers of two go in and come out: not a bit changes but by the order of the sum
            torch.testing.assert_close(smooth[at], plain[at], rtol=1e-5, atol=1e-4)


# case 53
@pytest.mark.parametrize(
    "casts",
    [FP8, ROWS, BLOCKS, MX, replace(FP4, grad_output=FP4.input)],
    ids=["tensor", "rows", "blocks", "mx", "nvfp4"],
)
def test_uninitialised_memory_and_what_lies_around_a_matrix_are_never_read(casts):
    m, k, n = 130, 70, 33
    parts = leaves(m, k, n)
    clean = step(casts, parts)
    without = step(casts, (parts[0], parts[1], torch.zeros(n, requires_grad=True)))
    torch.testing.assert_close(clean[0] - without[0], parts[2].detach().expand(m, n), rtol=0, atol=1e-4)
    for poison in (torch.nan, 1e30):
        framed = []
        for part in parts[:2]:
            frame = torch.full((part.shape[0] + 5, part.shape[1] + 9), poison)
            frame[2:-3, 4:-5] = part.detach()
            framed.append(frame[2:-3, 4:-5].requires_grad_())
        torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
        try:
            assert torch.empty(4).isnan().all()
            poisoned = step(casts, (*framed, parts[2]))
        finally:
            torch.use_deterministic_algorithms(False)
        assert_same(poisoned, clean)


def test_one_grad_output_goes_to_products_that_are_carried_in_different_dtypes():
    # E5M2 by E4M3 is carried in bfloat16, by float16 in float32
    fast = replace(FP8, emulation=Emulation.FAST, activation=CastSpec(FP16))
    cpu = torch.device("cpu")
    assert len({fast.backend(gemm, cpu).carrier for gemm in (GRAD_INPUT, GRAD_WEIGHT)}) == 2 or not FAST_BF16
    exact = step(replace(fast, emulation=Emulation.EXACT))
    for found, expected in zip(step(fast), exact, strict=True):
        assert (found - expected).norm() <= 2**-8 * expected.norm()


def test_a_weight_that_grad_input_multiplies_as_it_is_is_kept_by_reference():
    x, weight, bias = leaves()
    for compute, in_compute in ((BF16, (False, True, False)), (BF16, (True, True, True))):
        kept: list[Tensor] = []
        casts = replace(FP8, compute=compute, in_compute=in_compute)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            linear(x, weight, bias, casts, out_dtype=torch.float32)
        of_weight = [t for t in kept if t.numel() == weight.numel() and t.shape == weight.shape]
        assert [t.data_ptr() for t in of_weight] == [weight.data_ptr()]


def test_factors_of_channels_are_the_powers_of_two_at_or_below_their_largest_magnitude():
    x = torch.tensor([[1.0, -3.0, 0.0, 0.5, torch.inf, torch.nan, 1e-40, 3e38], [0.5, 1.0, 0.0, -0.75, 1.0, 1.0, 0, 0]])
    assert channel_factors(x).tolist() == [1.0, 2.0, 1.0, 0.5, 1.0, 1.0, 1.0, 2.0**127]
    assert channel_factors(x[:0]).tolist() == [1.0] * 8
    assert channel_factors(x.half()[:, :2]).dtype is torch.float32
