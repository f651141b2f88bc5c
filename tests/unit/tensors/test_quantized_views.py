"""Views and copies of a QuantizedTensor, and what is made like it."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from quantized_tensors import FP8, SCALED_FP16, SPECS, bits, make

from narrowgauge import CURRENT, NONE, CastSpec, NarrowgaugeError
from narrowgauge.numerics.formats import BF16, E4M3FN, E5M2
from narrowgauge.tensors.quantized import QuantizedTensor, quantize

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
