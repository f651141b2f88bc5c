"""Column sums and transposed copies: every path gives the same values."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowgauge.ops import kernels

SHAPES = [(2, 3), (256, 256), (512, 1028), (1000, 301), (70000, 1), (1, 70000), (0, 5), (130, 512)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_transposed_copy_has_the_bits_of_the_transpose(shape, dtype):
    x = torch.randn(shape).to(dtype)
    y = kernels.transposed(x)
    assert y.is_contiguous() and torch.equal(y, x.t())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_column_sums_are_float32_sums(shape, dtype):
    x = torch.randn(shape).to(dtype)
    found = kernels.column_sum(x)
    assert found.dtype is torch.float32 and found.shape == (shape[1],)
    # blocks of 64 rows and the blocks' total: so many roundings at most, of the sum of magnitudes
    bound = (64 + shape[0] // 64 + 1) * 2**-24 * x.double().abs().sum(0)
    assert ((found.double() - x.double().sum(0)).abs() <= bound).all()


def test_column_sums_do_not_depend_on_the_number_of_threads():
    x = torch.randn(900, 1000).bfloat16()  # enough for three threads
    threads = torch.get_num_threads()
    try:
        sums = []
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            sums.append(kernels.column_sum(x))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(s, sums[0]) for s in sums)


# case 51
@pytest.mark.parametrize("shape", [(40, 30), (300, 1000)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_column_sums_do_not_depend_on_strides(shape, dtype):
    x = torch.randn(shape).to(dtype)
    for strided in (x.t().contiguous().t(), torch.cat([x, x], 1)[:, : shape[1]], x[:1].expand(shape)):
        assert torch.equal(kernels.column_sum(strided), kernels.column_sum(strided.contiguous()))


def test_column_sums_keep_nan_and_infinity_in_their_columns():
    x = torch.ones(256, 512)
    x[3, 5], x[4, 6] = float("nan"), float("inf")
    found = kernels.column_sum(x.bfloat16())
    assert found[5].isnan() and found[6].isinf()
    assert found.isfinite().sum() == 510


def test_columns_are_summed_on_fake_tensors():
    with FakeTensorMode():
        assert kernels.column_sum(torch.empty(7, 9, dtype=torch.bfloat16, device="cuda")).shape == (9,)
