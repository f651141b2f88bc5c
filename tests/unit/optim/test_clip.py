"""Clipping by the total norm."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import narrowgauge as ng


def parameters(*gradients: torch.Tensor) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(g.shape, dtype=g.dtype)) for g in gradients]
    for p, g in zip(made, gradients, strict=True):
        p.grad = g.clone()
    return made


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e6, math.inf])
def test_it_agrees_with_torch(norm_type: float, max_norm: float) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(7, 5), torch.randn(3), torch.zeros(0)]
    ours, theirs = parameters(*gradients), parameters(*gradients)
    norm = ng.clip_grad_norm_(ours, max_norm, norm_type)
    # torch refuses the infinity norm of an empty tensor
    assert torch.allclose(norm, torch.nn.utils.clip_grad_norm_(theirs[:2], max_norm, norm_type))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a.grad, b.grad)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_leaves_gradients_alone(bad: float) -> None:
    gradients = [torch.tensor([1.0, bad]), torch.tensor([2.0])]
    ps = parameters(*gradients)
    assert not ng.clip_grad_norm_(ps, 1.0).isfinite()
    for p, g in zip(ps, gradients, strict=True):
        assert torch.equal(p.grad, g) or (math.isnan(bad) and torch.equal(p.grad.isnan(), g.isnan()))


def test_the_norm_of_float16_gradients_does_not_overflow() -> None:
    ps = parameters(torch.full((100,), 60000.0, dtype=torch.float16))
    assert ng.clip_grad_norm_(ps, 1.0).item() == pytest.approx(600000.0, rel=1e-6)
    assert torch.allclose(ps[0].grad.float(), torch.full((100,), 0.1), atol=1e-4)


def test_a_norm_beyond_float32s_squares_is_real() -> None:
    ps = parameters(torch.tensor([3e30]), torch.tensor([4e30]))
    assert ng.clip_grad_norm_(ps, 1.0).item() == pytest.approx(5e30)
    assert ps[0].grad.item() == pytest.approx(0.6)


def test_a_parameter_listed_twice_counts_once_and_others_not_at_all() -> None:
    p, q = parameters(torch.tensor([3.0, 4.0]), torch.tensor([1.0]))
    q.grad = None
    assert ng.clip_grad_norm_([p, p, q], 1.0).item() == 5.0
    assert p.grad.norm().item() == pytest.approx(1.0, abs=1e-5)
    assert ng.clip_grad_norm_(p, 1.0).item() == pytest.approx(1.0, abs=1e-5)
    assert ng.clip_grad_norm_([q], 1.0).item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.bfloat16])
def test_gradients_of_every_dtype_are_clipped(dtype: torch.dtype) -> None:
    values = torch.full((4,), 3 + 4j if dtype is torch.complex64 else 5.0, dtype=dtype)
    (p,) = parameters(values)
    norm = ng.clip_grad_norm_([p], 1.0)
    assert norm.item() == 10.0 and norm.dtype is torch.float32
    assert torch.allclose(p.grad, values / 10, rtol=4e-3)


def test_sparse_gradients_are_clipped_by_what_their_entries_add_up_to() -> None:
    table = nn.Embedding(5, 4, sparse=True)
    (3.0 * table(torch.tensor([1, 1]))).sum().backward()
    dense = torch.zeros(5, 4)
    dense[1] = 6.0
    assert torch.equal(table.weight.grad.to_dense(), dense)
    assert ng.clip_grad_norm_(table.parameters(), 1.0).item() == 12.0
    assert torch.allclose(table.weight.grad.to_dense(), dense / 12)


def test_gradients_stored_in_eight_bits_are_clipped() -> None:
    p, q = parameters(torch.tensor([3.0, 4.0]), torch.tensor([0.0]))
    p.grad = ng.quantize(torch.tensor([3.0, 4.0]), ng.CastSpec(ng.formats.E4M3FN))
    assert ng.clip_grad_norm_([p, q], 1.0).item() == pytest.approx(5.0, rel=1 / 16)
    assert p.grad.float().norm().item() == pytest.approx(1.0, rel=1 / 16)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_bad_limits_are_refused(max_norm: float) -> None:
    with pytest.raises(ng.NarrowgaugeError, match="expected max_norm"):
        ng.clip_grad_norm_(parameters(torch.ones(1)), max_norm)
