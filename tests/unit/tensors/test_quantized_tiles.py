"""A QuantizedTensor with scales of tiles as a tensor: operations, copies, files, compiled code."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from quantized_tensors import assert_same, scale_bits, seeded
from torch import nn

from narrowgauge import CURRENT_POW2, E8M0_UP, NVFP4, PER_COLUMN, PER_ROW, STOCHASTIC, Block, CastSpec, NarrowgaugeError
from narrowgauge.numerics.formats import E2M1FN, E3M2FN, E4M3FN, E5M2, INT8
from narrowgauge.tensors.quantized import QuantizedTensor, quantize
from narrowgauge.tensors.views import ReadOnlyView

SPECS = [
    CastSpec(E4M3FN, PER_ROW),
    CastSpec(INT8, PER_COLUMN),
    CastSpec(E4M3FN, Block(1, 128), CURRENT_POW2),
    CastSpec(E5M2, Block(1, 32), E8M0_UP),
    CastSpec(E3M2FN, Block(32, 32), E8M0_UP),
    CastSpec(E2M1FN, Block(1, 16), NVFP4),
    CastSpec(E2M1FN, Block(16, 16), NVFP4),
]
NV, FREE = SPECS[5], SPECS[0]


def make(spec: CastSpec, *shape: int, seed: int = 0) -> QuantizedTensor:
    return quantize(seeded(*(shape or (20, 40)), seed=seed), spec)


# reading and writing


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_operations_read_the_values_and_writes_cast_anew(spec: CastSpec) -> None:
    for shape in ((20, 40), (40,), (2, 3, 40)):
        q = make(spec, *shape)
        values, codes, scale = q.dequantize(), q.codes, q.dequant_scale
        assert type(q * 2) is torch.Tensor and torch.equal(q * 2, values * 2) and torch.equal(q.sum(), values.sum())
        assert q.add_(0.7) is q and q.codes is codes and q.dequant_scale is scale
        assert_same(q, quantize(values + 0.7, spec))
        other = seeded(*shape, seed=1)
        assert_same(q.copy_(other), quantize(other, spec))
        q[q < 0] = 0.0  # in one operation on the whole
        assert_same(q, quantize(quantize(other, spec).dequantize().clamp(min=0), spec))
        torch.add(other, 1, out=q)
        assert_same(q, quantize(other + 1, spec))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_write_that_changes_no_value_changes_no_bit(spec: CastSpec) -> None:
    q = make(spec)
    before = q.clone()
    q.add_(0.0).clamp_(-1e9, 1e9)
    assert_same(q, before)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_zeroed_and_empty_tensors_are_those_of_zeros(spec: CastSpec) -> None:
    zeros = quantize(torch.zeros(20, 40), spec)
    assert_same(make(spec).zero_(), zeros)
    empty = torch.empty_like(make(spec), dtype=torch.bfloat16)
    assert isinstance(empty, QuantizedTensor) and empty.spec == spec and empty.dtype is torch.bfloat16
    assert scale_bits(empty) == scale_bits(zeros) and empty.amax == 0
    assert type(torch.zeros_like(make(spec))) is torch.Tensor


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("factor", [0.3, 0.25, torch.tensor(0.3), 0.0, -1.5])
def test_a_factor_goes_into_float32_scales_else_it_is_cast_anew(spec: CastSpec, factor: Any) -> None:
    q, before = make(spec), make(spec)
    expected = before.dequantize() * factor
    q.mul_(factor)
    free = spec.scale is FREE.scale
    if (free or (spec.scale is CURRENT_POW2 and factor == 0.25)) and factor > 0:
        assert torch.equal(q.codes.view(torch.uint8), before.codes.view(torch.uint8))
        assert torch.equal(q.dequant_scale, before.dequant_scale * factor)
        torch.testing.assert_close(q.dequantize(), expected, rtol=1e-6, atol=0)
    else:
        assert_same(q, quantize(expected, spec))


def test_zeros_stay_zeros_under_any_factor() -> None:
    x = seeded(3, 40)
    x[1] = 0
    q = quantize(x, FREE)
    for _ in range(4):
        q.mul_(2.0**100)
    assert not q.dequantize()[1].any() and q.dequant_scale.isfinite().all()


def test_bits_are_copied_between_two_of_one_specification() -> None:
    for spec in SPECS:
        q, other = make(spec), make(spec, seed=1)
        assert_same(q.copy_(other), other)
        assert q.codes.data_ptr() != other.codes.data_ptr()
        q.copy_(make(CastSpec(E4M3FN), 20, 40))
        assert_same(q, quantize(make(CastSpec(E4M3FN), 20, 40).dequantize(), spec))


# transposed matrices


@pytest.mark.parametrize("spec", [*SPECS, CastSpec(E4M3FN, Block(3, 16))], ids=str)
@pytest.mark.parametrize("turn", [lambda t: t.mT, lambda t: t.transpose(-1, -2), lambda t: t.transpose(-2, -1)])
def test_a_transposed_matrix_turns_its_tiles(spec: CastSpec, turn: Any) -> None:
    for shape in ((20, 40), (2, 20, 40)):
        q = make(spec, *shape)
        turned = turn(q)
        assert isinstance(turned, QuantizedTensor) and turned.spec == spec.transposed
        assert turned.codes.data_ptr() == q.codes.data_ptr() and turned.shape[-2:] == (40, 20)
        assert torch.equal(turned.dequantize(), q.dequantize().mT)
        assert turned.dequantize().stride() == turned.stride()
        new = seeded(*turned.shape, seed=2)
        turned.copy_(new)
        assert_same(q, quantize(new.mT, spec))
        turned.mul_(0.25)
        turned.sub_(0.5)
        assert torch.equal(q.dequantize(), turned.dequantize().mT)
        assert_same(turn(turned), q)


def test_other_ways_to_transpose() -> None:
    q = make(FREE)
    for turned in (q.t(), q.T, q.permute(1, 0), q.permute(-1, -2), q.swapaxes(0, 1), q.movedim(0, 1), q.adjoint()):
        assert isinstance(turned, QuantizedTensor) and turned.spec.granularity == PER_COLUMN
    assert q.t().is_contiguous() is False and q.t().contiguous().is_contiguous()
    copied = q.t().contiguous()
    assert isinstance(copied, QuantizedTensor) and torch.equal(copied.dequantize(), q.dequantize().t())
    batch = make(FREE, 2, 3, 40)
    assert isinstance(batch.transpose(0, 1), ReadOnlyView) and isinstance(batch.permute(2, 1, 0), ReadOnlyView)


# copies, files, processes


@pytest.mark.parametrize("spec", [*SPECS, CastSpec(E2M1FN, Block(1, 16), NVFP4, STOCHASTIC)], ids=str)
def test_copies_and_files_keep_every_bit(spec: CastSpec) -> None:
    q = make(spec)
    before = q.clone()
    file = io.BytesIO()
    torch.save({"q": q, "turned": q.t(), "view": q[1]}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)  # case 71
    assert_same(loaded["turned"].t(), q)
    assert type(loaded["view"]) is torch.Tensor and torch.equal(loaded["view"], q.dequantize()[1])
    for other in (q.clone(), copy.deepcopy(q), pickle.loads(pickle.dumps(q)), loaded["q"], q.t().clone().t()):
        assert_same(other, q)
        other.fill_(3.0)
        assert_same(q, before)
    assert type(copy.deepcopy(q[1])) is torch.Tensor and type(pickle.loads(pickle.dumps(q[1]))) is torch.Tensor


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_moving_keeps_the_codes(spec: CastSpec) -> None:
    q = make(spec)
    half = q.to(torch.bfloat16)
    assert isinstance(half, QuantizedTensor) and half.dtype is torch.bfloat16
    assert_same(half, q)
    meta = q.to("meta")
    assert isinstance(meta, QuantizedTensor) and meta.is_meta and meta.dequant_scale.shape == q.dequant_scale.shape
    assert (meta + 1).shape == q.shape and meta[0].shape == (40,)
    assert q.share_memory_().is_shared() and q.dequant_scale.is_shared()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_modules_load_each_others_state(spec: CastSpec) -> None:
    module, plain = nn.Linear(40, 20), nn.Linear(40, 20)
    module.weight = nn.Parameter(quantize(module.weight, spec))
    weight = module.weight
    assert isinstance(weight, QuantizedTensor)
    module.load_state_dict(plain.state_dict())
    assert module.weight is weight
    assert_same(weight, quantize(plain.weight, spec))
    plain.load_state_dict(module.state_dict())
    assert torch.equal(plain.weight, weight.detach().dequantize())
    x = seeded(3, 40)
    module(x).square().sum().backward()
    assert weight.grad is not None and type(weight.grad) is torch.Tensor
    vector = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(vector.detach() * 2, module.parameters())
    assert_same(weight, quantize(plain.weight.detach() * 2, spec))
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    module.to(torch.bfloat16)
    assert module.weight is weight and weight.dtype is torch.bfloat16
    with pytest.raises(NarrowgaugeError, match="expected a tensor of float16"):
        weight.data = torch.zeros(20, 40, dtype=torch.int64)
    weight.data = torch.ones(20, 40)
    assert_same(weight, quantize(torch.ones(20, 40), spec))


# packed codes


@pytest.mark.parametrize("spec", [NV, CastSpec(E3M2FN, Block(1, 32), E8M0_UP), CastSpec(E2M1FN, PER_ROW)], ids=str)
@pytest.mark.parametrize("shape", [(20, 40), (3, 7), (2, 3, 41), (0, 8)])
def test_packed_codes_come_back(spec: CastSpec, shape: tuple[int, ...]) -> None:
    q = quantize(seeded(*shape), spec)
    packed = q.packed()
    assert packed.dtype is torch.uint8 and packed.shape == (*shape[:-1], -(-shape[-1] * spec.format.bits // 8))
    again = QuantizedTensor.from_packed(packed, q.dequant_scale, spec, shape[-1], amax=q.amax)
    assert_same(again, q)


def test_the_even_column_is_in_the_low_nibble() -> None:
    values = torch.tensor([[0.5, 1.0, -6.0]])  # codes 1, 2, 15
    q = quantize(values, CastSpec(E2M1FN, PER_ROW, CURRENT_POW2))
    assert q.codes.tolist() == [[1, 2, 15]] and q.packed().tolist() == [[0x21, 0x0F]]
    with pytest.raises(NarrowgaugeError, match="codes of 8 bits are bytes already"):
        make(FREE).packed()


# compiled code


@pytest.mark.parametrize("spec", [FREE, SPECS[3], NV], ids=str)  # one for each dtype of scales
def test_compiled_code_gives_the_same(spec: CastSpec) -> None:
    torch._dynamo.reset()
    x, y = seeded(20, 40), seeded(40, 3)

    def step(q: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = quantize(x, spec)
        q.add_(0.5)
        q.t().sub_(0.25)
        return (q @ y).sum() + q[1].sum() + q.view(-1).amax() + (made.t() * 2).sum(), made

    compiled, eager = make(spec), make(spec)
    results = torch.compile(step, backend="aot_eager", fullgraph=True)(compiled, x)
    expected = step(eager, x)
    assert torch.allclose(results[0], expected[0], rtol=1e-6)
    assert_same(compiled, eager)
    assert_same(results[1], expected[1])


def test_fake_tensors_and_inference_mode() -> None:
    with torch._subclasses.FakeTensorMode():
        fake = quantize(torch.randn(6, 40), NV)
        assert (fake @ torch.randn(40, 3)).shape == (6, 3) and fake[0].shape == (40,) and "1x16" in repr(fake[0])
        assert fake.add_(1) is fake and fake.t().shape == (40, 6)
    q = make(FREE)
    with torch.inference_mode():  # case 62
        assert torch.equal(q.t() + 0, q.dequantize().t()) and isinstance(q[0], ReadOnlyView)
        inside = make(FREE)
        assert inside.add_(1).shape == (20, 40) and type(inside.to(torch.bfloat16)) is QuantizedTensor
        assert torch.equal(inside[0][3:] + 0, inside.dequantize()[0, 3:])
    p = nn.Parameter(q)
    (p * 2).sum().backward()
    assert p.grad is not None and (p.grad == 2).all()


def test_gradients_flow_through_views() -> None:
    p = nn.Parameter(make(NV))
    for read in (lambda: p[3] * 2, lambda: p.t()[:, 3] * 2, lambda: p.view(-1)[120:160] * 2):
        p.grad = None
        read().sum().backward()
        assert p.grad is not None and p.grad[3].tolist() == [2.0] * 40 and p.grad.sum() == 80


def test_a_reshape_in_inference_mode_is_a_copy_where_it_must_be() -> None:
    with torch.inference_mode():
        q = quantize(seeded(6, 8), CastSpec(E4M3FN))
        before = q.dequantize()
        flat = q.t().reshape(-1)
        flat.fill_(500.0)
        assert torch.equal(q.dequantize(), before)  # the copy has a scale of its own
        assert isinstance(q.to(torch.bfloat16), QuantizedTensor) and torch.equal(q.float() + 0, before)
