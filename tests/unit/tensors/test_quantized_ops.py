"""What torch operations do with a QuantizedTensor: they read its values, and write by casting."""

from __future__ import annotations

import pytest
import torch
from quantized_tensors import FP8, SCALED_FP16, SPECS, bits, make

from narrowgauge import CURRENT_POW2, TENSOR_POW2, CastSpec, Delayed
from narrowgauge.numerics.formats import E4M3FN
from narrowgauge.tensors.quantized import QuantizedTensor, quantize

# reading


@pytest.mark.parametrize("spec", SPECS)
def test_operations_read_the_values_and_give_plain_tensors(spec: CastSpec) -> None:
    q, x = make(spec), torch.randn(8, 3)
    values = q.dequantize()
    for operation in (
        lambda t: t + 1,
        lambda t: t @ x,
        lambda t: t.t().sum(1),
        lambda t: torch.cat([t, t]),
        lambda t: torch.nn.functional.linear(x.t(), t),
        lambda t: t.isfinite().all(),
        lambda t: t.to(torch.int64),
        lambda t: torch.where(t > 0, t, 0),
        lambda t: t.view(-1).abs().max(),
    ):
        result, expected = operation(q), operation(values)
        assert type(result) is torch.Tensor
        assert torch.equal(result, expected)
    # from counts of the codes, summed in another order
    assert type(q.norm()) is torch.Tensor and torch.allclose(q.norm(), values.norm(), rtol=2**-20, atol=0)


def test_it_is_a_tensor_of_the_dtype_it_stands_for() -> None:
    q = quantize(torch.ones(2, 3, dtype=torch.bfloat16), FP8)
    assert isinstance(q, torch.Tensor)
    assert q.dtype is torch.bfloat16 and q.shape == (2, 3) and q.device.type == "cpu"
    assert q.dequantize().dtype is torch.bfloat16 and q.dequantize(torch.float32).dtype is torch.float32
    assert torch.dequantize(q).dtype is torch.bfloat16


def test_gradients_flow_to_it() -> None:
    q = make().requires_grad_()
    for read in (
        lambda: q * 3,
        lambda: q.dequantize() * 3,
        lambda: q.view(8, 6).t() * 3,
        lambda: q.to(torch.bfloat16) * 3,
    ):
        q.grad = None
        read().sum().backward()
        assert q.grad is not None and q.grad.dtype is torch.float32
        assert torch.equal(q.grad, torch.full((6, 8), 3.0))


def test_numpy_arrays_are_read_only_copies() -> None:
    q = make()
    assert q.numpy().tolist() == q.tolist() == q.dequantize().tolist()
    with pytest.raises(ValueError, match="read-only"):
        q.numpy()[0] = 1


def test_repr_shows_values_and_specification() -> None:
    text = repr(quantize(torch.tensor([1.0, -2.0]), CastSpec(E4M3FN, scale=CURRENT_POW2)))
    assert text.startswith("QuantizedTensor([ 1., -2.], spec=(E4M3FN") and "dequant_scale=0.0078125" in text
    assert "device=meta" in repr(make().to("meta"))


# writing


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.add_(3.0),
        lambda t: t.mul_(torch.full((8,), 1.7)),
        lambda t: t.fill_(0.3),
        lambda t: t.normal_(generator=torch.Generator().manual_seed(9)),
        lambda t: t.clamp_(min=0),
        lambda t: torch.add(torch.ones(6, 8), 1, out=t),
        lambda t: t.addcdiv_(torch.ones(6, 8), torch.full((6, 8), 3.0), value=-0.1),
        lambda t: t.sub_(t),
    ],
)
def test_in_place_results_are_cast_with_a_fresh_scale(spec: CastSpec, write: object) -> None:
    q = make(spec)
    codes, expected = q.codes, q.dequantize().clone()
    assert write(q) is q  # type: ignore[operator]
    write(expected)  # type: ignore[operator]
    assert bits(q) == bits(quantize(expected, spec)) or (spec.scale is TENSOR_POW2 and not expected.any())
    assert q.codes is codes
    assert torch.equal(q.dequantize(), quantize(expected, spec).dequantize())


@pytest.mark.parametrize("spec", SPECS)
def test_a_write_that_changes_no_value_changes_no_bit(spec: CastSpec) -> None:
    q = make(spec)
    before = bits(q)
    q.add_(0.0).clamp_(-1e9, 1e9)
    q.addcdiv_(torch.zeros(6, 8), torch.ones(6, 8))
    q[2].add_(0)
    assert bits(q) == before


def test_writes_reach_every_alias() -> None:
    q = make()
    detached, data, view = q.detach(), q.data, q.view(-1)
    q.fill_(448.0)
    for alias in (detached, data, view):
        assert (alias.dequantize() == 448.0).all()
    view.mul_(2)
    data.add_(-448)
    assert (q.dequantize() == 448.0).all()


def test_an_infinite_write_is_seen_and_a_finite_one_clears_it() -> None:
    q = make()
    q[0, 0] = float("inf")
    assert q.amax == float("inf") and q.isinf().sum() == 1 and q.dequantize().isfinite().all()
    q.fill_(float("nan"))
    assert q.isnan().all()
    q.copy_(torch.ones(6, 8))
    assert q.amax == 1 and q.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_infinity_is_seen_in_every_dtype(dtype: torch.dtype) -> None:
    codes = torch.tensor([448.0, 3.0]).to(torch.float8_e4m3fn)
    # a scale whose largest value rounds down in the dtype stood for
    q = QuantizedTensor(codes, torch.tensor(1.0007), FP8, dtype, torch.tensor(float("inf")))
    assert (q + 0).isinf().tolist() == [True, False]


def test_a_factor_goes_into_a_free_scale() -> None:
    for factor in (0.3, 7, torch.tensor(0.3), torch.tensor(2.5, dtype=torch.float64)):
        q, before = make(), make()
        q.mul_(factor)
        assert bits(q)[0] == bits(before)[0]
        assert q.dequant_scale == (before.dequant_scale * factor).float()
        assert torch.allclose(q.dequantize(), before.dequantize() * factor, rtol=1e-6)
        q.div_(factor)
        assert torch.allclose(q.dequantize(), before.dequantize(), rtol=1e-6)


def test_powers_of_two_stay_powers_of_two() -> None:
    q = make(SCALED_FP16)
    values = q.dequantize()
    codes = bits(q)[0]
    q.mul_(0.25).div_(8)
    assert bits(q)[0] == codes
    assert torch.equal(q.dequantize(), values / 32)
    q.mul_(0.999)  # cast anew: the scale stays a power of two
    assert q.dequant_scale.frexp().mantissa == 0.5
    assert torch.equal(q.dequantize(), quantize(values / 32 * 0.999, SCALED_FP16).dequantize())


@pytest.mark.parametrize("factor", [0.0, -2.0, float("inf"), float("nan")])
@pytest.mark.parametrize("spec", [FP8, SCALED_FP16])
def test_other_factors_are_cast_anew(spec: CastSpec, factor: float) -> None:
    q = make(spec)
    expected = q.dequantize() * factor
    q.mul_(factor)
    assert q.dequant_scale.isfinite() and q.dequant_scale > 0
    assert torch.equal(q + 0, expected) or expected.isnan().all() and q.isnan().all()


def test_zeroing_resets_the_scale() -> None:
    q = make().mul_(1e-3)
    q.zero_()
    assert bits(q) == ([0] * 48, 1.0, 0.0)


def test_foreach_writes_are_those_of_the_loop() -> None:
    for spec in (FP8, SCALED_FP16):
        for name, argument in (("mul", 0.9), ("mul", torch.tensor(0.9)), ("div", 3.0), ("mul", [0.5, 0.7])):
            tensors, looped = [make(spec), make(spec, seed=1)], [make(spec), make(spec, seed=1)]
            getattr(torch, f"_foreach_{name}_")(tensors, argument)
            for i, q in enumerate(looped):
                getattr(q, f"{name}_")(argument[i] if isinstance(argument, list) else argument)
            assert [bits(q) for q in tensors] == [bits(q) for q in looped]
        torch._foreach_zero_(tensors)
        torch._foreach_add_(tensors, 1.0)
        assert all((q.dequantize() == 1).all() for q in tensors)


def test_plain_tensors_take_its_values() -> None:
    q, plain = make(), torch.zeros(6, 8)
    plain.copy_(q)
    assert torch.equal(plain, q.dequantize())
    plain.add_(q)
    assert torch.equal(plain, q.dequantize() * 2)


@pytest.mark.parametrize("spec", SPECS)
def test_copying_into_it_casts_as_quantize_does(spec: CastSpec) -> None:
    for source in (torch.randn(6, 8), torch.randn(6, 8).double(), torch.randn(8, 6).half().t(), torch.arange(8)):
        q = make(spec)
        assert q.copy_(source) is q
        wide = source if source.is_floating_point() else source.float()
        assert bits(q)[:2] == bits(quantize(wide.expand(6, 8), spec))[:2]


def test_copying_between_two_of_one_specification_copies_bits() -> None:
    q, other = make(), make(seed=1)
    q.copy_(other)
    assert bits(q) == bits(other) and q.codes.data_ptr() != other.codes.data_ptr()
    q.copy_(make(SCALED_FP16))
    assert torch.equal(q.dequantize(), quantize(make(SCALED_FP16).dequantize(), FP8).dequantize())


def test_delayed_storage_is_recast_with_current_scaling() -> None:
    spec = CastSpec(E4M3FN, scale=Delayed())
    q = QuantizedTensor(torch.ones(4).to(torch.float8_e4m3fn), torch.tensor(0.5), spec)
    assert q.tolist() == [0.5] * 4
    q.fill_(896.0)
    assert q.tolist() == [896.0] * 4
