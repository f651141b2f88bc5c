"""Tensors of packed codes: their bytes, what keeps the codes, and that no write is lost."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from quantized_tensors import seeded
from torch import Tensor

from narrowgauge import CURRENT, NVFP4, Block, CastSpec, NarrowgaugeError, quantize
from narrowgauge.numerics.companding import SQUARE_ROOT
from narrowgauge.numerics.formats import E2M1FN, E2M3FN, INT4, INT8, UINT4
from narrowgauge.numerics.rounding import NONZERO, STOCHASTIC
from narrowgauge.tensors.packed import PackedTensor

M = CastSpec(INT4, Block(1, 32), companding=SQUARE_ROOT)
V = CastSpec(UINT4, Block(1, 32), CURRENT, NONZERO, SQUARE_ROOT)
SPECS = [M, V, CastSpec(E2M1FN), CastSpec(E2M1FN, Block(1, 16), NVFP4), CastSpec(E2M3FN, Block(1, 32)), CastSpec(INT4)]
each_spec = pytest.mark.parametrize("spec", SPECS, ids=str)


def make(spec: CastSpec = M, *shape: int) -> PackedTensor:
    x = seeded(*(shape or (6, 70)))
    return PackedTensor.quantize(x if spec.format.signed else x.square(), spec)


def parts_of(x: Tensor) -> list[Tensor]:
    assert isinstance(x, PackedTensor)
    return [x.packed, x.dequant_scale.reshape(-1).view(torch.uint8), x.amax]


def assert_same(a: Tensor, b: Tensor) -> None:
    assert type(a) is type(b) is PackedTensor and a.spec == b.spec and a.shape == b.shape
    assert all(x.equal(y) for x, y in zip(parts_of(a), parts_of(b), strict=True))


@each_spec
@pytest.mark.parametrize("shape", [(6, 70), (5,), (3, 4, 33), (0, 4), (4, 0)], ids=str)
def test_values_are_those_of_the_unpacked_codes(spec: CastSpec, shape: tuple[int, ...]) -> None:
    x = seeded(*shape).abs()
    packed, q = PackedTensor.quantize(x, spec), quantize(x, spec)
    assert packed.dequantize().equal(q.dequantize()) and packed.shape == x.shape and packed.dtype is torch.float32
    assert packed.unpacked().codes.equal(q.codes) and packed.unpacked().codes.dtype is spec.format.dtype
    assert packed.packed.equal(q.packed())
    back = type(q).from_packed(q.packed(), q.dequant_scale, spec, shape[-1], amax=q.amax)
    assert back.dequantize().equal(q.dequantize())


def test_negative_codes_come_back() -> None:
    x = torch.arange(-7.0, 8.0)  # amax 7: the scale is 1
    assert PackedTensor.quantize(x, CastSpec(INT4)).tolist() == x.tolist()
    assert PackedTensor.quantize(torch.tensor(-7.0), CastSpec(INT4)).item() == -7.0


def test_bytes_are_those_of_the_parts() -> None:
    # 6 rows of 70 codes at 4 bits: 35 bytes; 3 scales of 4 bytes; amax
    assert make().nbytes == 6 * 35 + 6 * 3 * 4 + 4
    assert make(CastSpec(E2M3FN, Block(1, 32))).nbytes == 6 * 53 + 6 * 3 * 4 + 4  # ceil(70 * 6 / 8)


@each_spec
def test_copies_keep_the_codes(spec: CastSpec) -> None:
    a = make(spec)
    buffer = io.BytesIO()
    torch.save(a, buffer)
    buffer.seek(0)
    copies = [a.clone(), a.detach(), a.to("cpu", copy=True), copy.deepcopy(a), copy.copy(a)]
    copies += [pickle.loads(pickle.dumps(a)), torch.load(buffer, weights_only=True)]
    names, context = a.__tensor_flatten__()
    copies.append(PackedTensor.__tensor_unflatten__({n: getattr(a, n) for n in names}, context, None, None))
    for b in copies:
        assert_same(a, b)
    for b in (a.clone(), copy.deepcopy(a), a.to("cpu", copy=True)):
        b.zero_()
    assert a.dequantize().abs().sum() > 0 and a.detach().packed.data_ptr() == a.packed.data_ptr()
    assert a.to("meta").shape == a.shape and a.to(torch.bfloat16).dtype is torch.bfloat16
    memo: dict = {}
    assert copy.deepcopy([a, a], memo)[0] is copy.deepcopy([a, a], memo)[1]


@each_spec
def test_writes_of_the_whole_cast_anew_and_reach_every_alias(spec: CastSpec) -> None:
    a = make(spec)
    alias, new = a.detach(), seeded(6, 70, seed=1).abs() * 3
    a.copy_(new)
    assert_same(alias, PackedTensor.quantize(new, spec))
    a.zero_()
    assert (alias.dequantize() == 0).all() and alias.amax == 0
    other = make(spec)
    a.copy_(other)
    assert_same(a, other)
    a.copy_(PackedTensor.quantize(new, CastSpec(E2M1FN, Block(1, 8))))
    assert a.unpacked().amax <= new.amax()
    a.copy_(torch.ones(70, dtype=torch.int64))  # broadcast, of another dtype
    assert torch.allclose(a.dequantize(), torch.ones(6, 70), rtol=1e-6)


def test_operations_read_the_values() -> None:
    a, x = make(), make().dequantize()
    assert (a + 1).equal(x + 1) and type(a + 1) is Tensor
    assert torch.stack([a, a]).equal(torch.stack([x, x]))
    assert a.norm() == x.norm() and a.numpy().tolist() == x.tolist() and not a.numpy().flags.writeable
    assert torch.zeros_like(a).equal(torch.zeros_like(x)) and torch.equal(a, x)
    plain = torch.zeros(6, 70)
    plain.copy_(a)
    assert plain.equal(x)
    assert "PackedTensor(size=(6, 70)" in repr(a)


@pytest.mark.parametrize(
    "view",
    [lambda x: x.view(-1), lambda x: x[2], lambda x: x[1:4, ::3], lambda x: x.t(), lambda x: x.reshape(7, 60),
     lambda x: x.unsqueeze(0), lambda x: x.split(2)[1], lambda x: x.mT[3].view(2, 3)],
)  # fmt: skip
def test_views_show_what_it_holds_and_refuse_writes(view) -> None:
    a = make()
    seen = view(a)
    assert torch.equal(seen.clone(), view(a.dequantize()))
    a.copy_(seeded(6, 70, seed=3))
    assert torch.equal(seen.clone(), view(a.dequantize()))
    with pytest.raises(NarrowgaugeError, match="would write to a view"):
        seen.zero_()
    with torch.inference_mode():
        assert torch.equal(view(a).clone(), view(a.dequantize()))


@pytest.mark.parametrize(
    "write",
    [lambda x: x.mul_(2.0), lambda x: x.add_(1.0), lambda x: x.fill_(1.0), lambda x: x.resize_(3), lambda x: x.t_(),
     lambda x: torch.add(torch.ones(6, 70), 1.0, out=x), lambda x: torch._foreach_mul_([x], 2.0),
     lambda x: x.__setitem__(0, 1.0), lambda x: x.view(torch.uint8), lambda x: x.set_(torch.zeros(6, 70)),
     lambda x: setattr(x, "data", torch.zeros(6, 70)), lambda x: torch.from_dlpack(x), lambda x: x.lerp_(x, 0.5)],
)  # fmt: skip
def test_what_would_lose_a_write_is_refused(write) -> None:
    a, before = make(), make()
    with pytest.raises(NarrowgaugeError):
        write(a)
    assert_same(a, before)


def test_shared_memory_holds_the_parts() -> None:
    a = make()
    assert not a.is_shared() and a.share_memory_() is a and a.is_shared()
    assert all(part.is_shared() for part in (a.packed, a.dequant_scale, a.amax))


def test_stochastic_casts_take_the_generator() -> None:
    spec = CastSpec(E2M1FN, Block(1, 32), rounding=STOCHASTIC)
    one, two = (PackedTensor.quantize(seeded(4, 64), spec, torch.Generator().manual_seed(s)) for s in (1, 2))
    assert_same(one, PackedTensor.quantize(seeded(4, 64), spec, torch.Generator().manual_seed(1)))
    assert not one.packed.equal(two.packed)


def test_parts_that_do_not_fit_are_refused() -> None:
    a = make()
    with pytest.raises(NarrowgaugeError, match="expected a format below 8 bits to pack, found INT8"):
        PackedTensor.quantize(seeded(3), CastSpec(INT8))
    with pytest.raises(NarrowgaugeError, match=r"packed: expected torch.uint8 of shape \(6, 36\)"):
        PackedTensor(a.packed, a.dequant_scale, a.amax, a.spec, (6, 71))
    with pytest.raises(NarrowgaugeError, match=r"dequant_scale: expected torch.float32 of shape \(6, 3\)"):
        PackedTensor(a.packed, a.dequant_scale[:5], a.amax, a.spec, a.shape)
