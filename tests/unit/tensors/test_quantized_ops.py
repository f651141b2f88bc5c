"""What torch operations do with a QuantizedTensor: values, writes, views, copies."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from narrowgauge import CURRENT, CURRENT_POW2, NONE, TENSOR_POW2, CastSpec, Delayed, NarrowgaugeError
from narrowgauge.numerics.formats import BF16, E2M1FN, E4M3FN, E5M2, FP16, FP32
from narrowgauge.tensors.quantized import QuantizedTensor, quantize

FP8 = CastSpec(E4M3FN)
SCALED_FP16 = CastSpec(FP16, scale=TENSOR_POW2)
SPECS = [FP8, CastSpec(E5M2, scale=CURRENT_POW2), SCALED_FP16, CastSpec(E2M1FN), CastSpec(BF16), CastSpec(FP32)]


def make(spec: CastSpec = FP8, *shape: int, seed: int = 0) -> QuantizedTensor:
    generator = torch.Generator().manual_seed(seed)
    return quantize(torch.randn(*(shape or (6, 8)), generator=generator), spec)


def bits(q: torch.Tensor) -> tuple[list[int], float, float]:
    assert isinstance(q, QuantizedTensor)
    return q.codes.contiguous().view(torch.uint8).flatten().tolist(), q.dequant_scale.item(), q.amax.item()


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
        lambda t: t.norm(),
        lambda t: torch.nn.functional.linear(x.t(), t),
        lambda t: t.isfinite().all(),
        lambda t: t.to(torch.int64),
        lambda t: torch.where(t > 0, t, 0),
        lambda t: t.view(-1).abs().max(),
    ):
        result, expected = operation(q), operation(values)
        assert type(result) is torch.Tensor
        assert torch.equal(result, expected)


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


# views


def test_whole_views_keep_codes_and_scale() -> None:
    q = make()
    for view in (q.view(48), q.t(), q.reshape(2, 3, 8), q.unsqueeze(0), q.permute(1, 0), q.detach(), q.flatten()):
        assert isinstance(view, QuantizedTensor)
        assert view.codes.data_ptr() == q.codes.data_ptr() and view.dequant_scale is q.dequant_scale
        assert view.stride() == view.codes.stride()
    q.t().fill_(5.0)
    assert (q.dequantize() == 5.0).all()


@pytest.mark.parametrize("spec", [FP8, SCALED_FP16, CastSpec(BF16)])
@pytest.mark.parametrize(
    "part",
    [
        lambda t: t[0],
        lambda t: t[:, 1:3],
        lambda t: t.t()[::2],
        lambda t: t.view(-1)[5:],
        lambda t: t.split(2)[1],
        lambda t: t.chunk(4, dim=1)[3],
        lambda t: t.unbind()[2],
        lambda t: t.narrow(0, 1, 3).t(),
        lambda t: t.as_strided((3, 3), (8, 2), 1),
        lambda t: t.diagonal(),
    ],
)
def test_a_write_to_a_part_renews_the_scale_of_the_whole(spec: CastSpec, part: object) -> None:
    q = make(spec)
    expected = q.dequantize().clone()
    view = part(q)  # type: ignore[operator]
    assert isinstance(view, QuantizedTensor)
    assert torch.equal(view.dequantize(), part(expected))  # type: ignore[operator]
    with torch.no_grad():
        view.fill_(1000.0)
        part(expected).fill_(1000.0)  # type: ignore[operator]
    assert bits(q) == bits(quantize(expected, spec))
    assert torch.equal(view.dequantize(), part(q.dequantize()))  # type: ignore[operator]


def test_indexed_assignment_reaches_the_tensor() -> None:
    q = make()
    expected = q.dequantize().clone()
    for t in (q, expected):
        t[1, 2] = 50.0
        t[t < 0] = 0.0
        t[:, 0] = torch.arange(6.0)
    assert torch.allclose(q.dequantize(), expected, rtol=1 / 16)
    assert q[1, 2] == 50.0


def test_writes_to_expanded_views_are_refused() -> None:
    with pytest.raises(NarrowgaugeError, match="elements share memory.*write to the tensor it was expanded from"):
        make(FP8, 1, 8).expand(4, 8).fill_(1)


def test_what_cannot_alias_is_refused() -> None:
    q = make()
    with pytest.raises(NarrowgaugeError, match="cannot reinterpret a QuantizedTensor as torch.int32.*use .codes"):
        q.view(torch.int32)
    for change in (lambda: q.resize_(2), lambda: q.t_(), lambda: q.unsqueeze_(0), lambda: q.set_(torch.ones(6, 8))):
        with pytest.raises(NarrowgaugeError, match="in place"):
            change()
    with pytest.raises(NarrowgaugeError, match="resize"), pytest.warns(UserWarning, match="resized"):
        torch.add(torch.ones(3), 1, out=q)
    assert q.shape == (6, 8)


def test_inference_mode_and_fake_tensors() -> None:
    q = make()
    with torch.inference_mode():  # case 62
        assert torch.equal(q + 0, q.dequantize()) and (q.view(-1) * 2).shape == (48,)
        assert make().add_(1).shape == (6, 8) and make()[0].t().shape == (8,)
        assert torch.nn.functional.linear(torch.ones(2, 8), torch.nn.Parameter(q)).shape == (2, 6)
        assert not q.detach().is_inference()
    p = torch.nn.Parameter(q)
    (p * 2).sum().backward()
    assert p.grad is not None and (p.grad == 2).all()
    with torch._subclasses.FakeTensorMode():
        fake = quantize(torch.randn(6, 8), FP8)
        assert isinstance(fake, QuantizedTensor)
        assert (fake @ torch.randn(8, 3)).shape == (6, 3) and fake.add_(1) is fake
        assert fake[0].codes.shape == (8,) and "QuantizedTensor" in repr(fake)


# copying and making others


def test_clones_are_independent() -> None:
    q = make()
    before = bits(q)
    for other in (q.clone(), copy.copy(q).clone(), copy.deepcopy(q), q.t().contiguous(), pickle.loads(pickle.dumps(q))):
        assert isinstance(other, QuantizedTensor)
        assert sorted(bits(other)[0]) == sorted(before[0]) and bits(other)[1:] == before[1:]
        other.fill_(3.0)
        assert bits(q) == before


def test_deepcopy_keeps_views_views() -> None:
    q = make()
    whole, part = copy.deepcopy([q, q[2]])
    part.fill_(7.0)
    assert (whole[2] == 7.0).all() and not (q[2] == 7.0).any()


def test_to_keeps_the_codes() -> None:
    q = make()
    half = q.to(torch.bfloat16)
    assert isinstance(half, QuantizedTensor) and half.dtype is torch.bfloat16
    assert bits(half) == bits(q) and bits(half.float()) == bits(q)
    assert torch.equal(half.dequantize(), q.dequantize().bfloat16())
    assert q.to(torch.float32) is q
    meta = q.to("meta")
    assert isinstance(meta, QuantizedTensor) and meta.is_meta and meta.codes.is_meta


def test_what_is_made_like_it() -> None:
    q = make()
    empty = torch.empty_like(q, dtype=torch.bfloat16)
    assert isinstance(empty, QuantizedTensor) and empty.spec == q.spec and empty.dtype is torch.bfloat16
    assert empty.dequant_scale == 1
    assert type(torch.empty_like(q, dtype=torch.int64)) is torch.Tensor
    for plain, value in (
        (torch.zeros_like(q), 0.0),
        (torch.ones_like(q), 1.0),
        (torch.full_like(q, 2.0), 2.0),
        (q.new_zeros(6, 8), 0.0),
        (q.new_full((6, 8), 3.0), 3.0),
    ):
        # optimizer states are made so: they must not take the parameter's format
        assert type(plain) is torch.Tensor and plain.dtype is torch.float32 and (plain == value).all()


@pytest.mark.parametrize("spec", [*SPECS, CastSpec(E4M3FN, scale=NONE), CastSpec(E5M2, scale=CURRENT)])
def test_files_are_read_with_weights_only(spec: CastSpec) -> None:
    q = make(spec).to(torch.bfloat16)  # case 71
    file = io.BytesIO()
    torch.save({"whole": q, "part": q[1]}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert bits(loaded["whole"]) == bits(q) and bits(loaded["part"]) == bits(q[1])
    assert loaded["whole"].spec == spec and loaded["whole"].dtype is torch.bfloat16
    with torch.no_grad():
        loaded["part"].fill_(4.0)  # still a view
    assert (loaded["whole"][1] == 4.0).all()
