"""The 16-point Hadamard transform: its bits, its matrix, and that it leaves products as they are."""

from __future__ import annotations

import pytest
import torch
from block_cases import to_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics import hadamard, kernels, reference, reference_blocks
from narrowgauge.numerics.hadamard import SIGNS, Hadamard


def matrix(signs: tuple[int, ...]) -> Tensor:
    """diag(signs) H16 / 4 by Sylvester's construction, float64; a row of 16 values is multiplied from the left."""
    h = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return torch.diag(torch.tensor(signs, dtype=torch.float64)) @ h / 4


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=16, max_size=16),
    st.lists(st.sampled_from([1, -1]), min_size=16, max_size=16),
)
def test_any_16_values_are_transformed_as_the_scalar_twin_says(values: list[float], signs: list[int]) -> None:
    x = torch.tensor(values)[:, None]
    expected = reference_blocks.hadamard([reference.bits_of(v) for v in values], tuple(signs))
    found = [bits for (bits,) in to_bits(kernels.transform(x, tuple(signs)))]
    assert found == expected


def test_columns_are_transformed_in_groups_of_16_rows_by_the_matrix_of_the_recipe() -> None:
    x = randn(48, 5)
    found = kernels.transform(x, SIGNS)
    expected = torch.cat([(group.double().t() @ matrix(SIGNS)).t() for group in x.split(16)])
    assert found.dtype is torch.float32
    # four rounds of one rounding each: 4 * 2^-24 of values that are at most 16 / 4 times the largest
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=4 * 2**-24 * 4 * x.abs().max().item())


def test_a_single_value_is_spread_over_16_with_the_signs_of_its_row() -> None:
    for row in range(16):
        x = torch.zeros(16, 1)
        x[row] = 8
        assert torch.equal(kernels.transform(x, SIGNS)[:, 0].double(), 8 * matrix(SIGNS)[row])
        assert set(kernels.transform(x, SIGNS).abs().flatten().tolist()) == {2.0}
    assert SIGNS == (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)  # TransformerEngine's


@pytest.mark.parametrize("hadamard", [Hadamard(), Hadamard.seeded(3)], ids=["fixed", "seeded"])
@pytest.mark.parametrize("tokens", [16, 37, 1, 0])
def test_both_operands_transformed_leave_the_product_as_it_is(hadamard: Hadamard, tokens: int) -> None:
    a, b = randn(tokens, 7), randn(tokens, 5, seed=1)
    left, right = (kernels.transform(x, hadamard.signs) for x in (a, b))
    assert left.shape[0] == -(-tokens // 16) * 16
    product = left.double().t() @ right.double()
    # every transformed value is off by at most 4 roundings of 2^-24 of the norm of its 16 values
    scale = float(a.double().norm() * b.double().norm())
    torch.testing.assert_close(product, a.double().t() @ b.double(), rtol=0, atol=max(scale, 1) * 2**-20)


def test_integers_are_transformed_exactly_and_twice_with_plain_signs_gives_them_back() -> None:
    x = torch.randint(-1000, 1000, (32, 3), generator=torch.Generator().manual_seed(0)).float()
    once = kernels.transform(x, (1,) * 16)
    assert torch.equal(once.double(), torch.cat([(g.double().t() @ matrix((1,) * 16)).t() for g in x.split(16)]))
    assert torch.equal(kernels.transform(once, (1,) * 16), x)


def test_missing_rows_count_as_zeros_and_any_layout_and_dtype_gives_the_same() -> None:
    x = randn(21, 6)
    padded = torch.cat([x, torch.zeros(11, 6)])
    assert torch.equal(kernels.transform(x, SIGNS), kernels.transform(padded, SIGNS))
    assert torch.equal(kernels.transform(x.t().contiguous().t(), SIGNS), kernels.transform(x, SIGNS))
    assert torch.equal(kernels.transform(x.bfloat16(), SIGNS), kernels.transform(x.bfloat16().float(), SIGNS))


def test_an_outlier_no_longer_sets_the_scale_alone() -> None:
    x = randn(16, 64)
    x[5] *= 100
    assert kernels.transform(x, SIGNS).abs().amax() < 0.5 * x.abs().amax()


def test_seeded_signs_repeat_and_differ_between_seeds() -> None:
    assert Hadamard.seeded(1) == Hadamard.seeded(1)
    assert len({Hadamard.seeded(seed).signs for seed in range(20)}) == 20
    assert set(Hadamard.seeded(0).signs) == {1, -1}


@pytest.mark.parametrize("signs", [(1,) * 15, (1,) * 17, (2,) * 16, (0,) * 16, (True,) * 16, 3, "1" * 16], ids=str)
def test_other_signs_are_refused(signs) -> None:
    with pytest.raises(RecipeError, match="expected 16 of 1 or -1"):
        Hadamard(signs)


@pytest.mark.parametrize("shape", [(5, 0), (0, 3), (0, 0)])
def test_a_matrix_without_values_has_its_padded_rows(shape) -> None:
    rows = -(-shape[0] // 16) * 16
    assert hadamard.transform(torch.ones(shape), SIGNS).shape == (rows, shape[1])
