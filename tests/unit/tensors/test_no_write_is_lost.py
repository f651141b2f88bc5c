"""Every view, every way to write: the write reaches the tensor, or it raises and leaves the tensor as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from quantized_tensors import seeded

from narrowgauge import E8M0_UP, NVFP4, PER_COLUMN, PER_ROW, Block, CastSpec, NarrowgaugeError
from narrowgauge.numerics.formats import E2M1FN, E4M3FN
from narrowgauge.tensors.quantized import QuantizedTensor, quantize
from narrowgauge.tensors.views import ReadOnlyView

TILES = [CastSpec(E4M3FN, PER_ROW), CastSpec(E4M3FN, PER_COLUMN, E8M0_UP), CastSpec(E2M1FN, Block(1, 4), NVFP4)]
SPECS = [*TILES, CastSpec(E4M3FN)]

# of a matrix [6, 8]
SAME = {
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "view_as": lambda t: t.view_as(torch.empty(6, 8)),
    "reshape": lambda t: t.reshape(6, 8),
    "all": lambda t: t[...],
    "slice": lambda t: t[:, 0:8],
    "narrow": lambda t: t.narrow(0, 0, 6),
    "expand": lambda t: t.expand(6, 8),
    "alias": lambda t: torch.ops.aten.alias(t),
    "split": lambda t: t.split(6)[0],
    "as_strided": lambda t: t.as_strided((6, 8), (8, 1)),
    "dtype": lambda t: t.view(t.dtype),
    "to": lambda t: t.to(torch.float32),
    "contiguous": lambda t: t.contiguous(),
    "twice": lambda t: t.t().t(),
}
TURNED = {
    "t": lambda t: t.t(),
    "T": lambda t: t.T,
    "mT": lambda t: t.mT,
    "transpose": lambda t: t.transpose(0, 1),
    "permute": lambda t: t.permute(1, 0),
    "swapaxes": lambda t: t.swapaxes(0, 1),
    "movedim": lambda t: t.movedim(0, 1),
}
OTHER = {
    "select": lambda t: t[2],
    "element": lambda t: t[2, 3],
    "column": lambda t: t[:, 1],
    "rows": lambda t: t[1:4],
    "every other": lambda t: t[:, ::2],
    "flat": lambda t: t.view(-1),
    "ravel": lambda t: t.ravel(),
    "flatten": lambda t: t.flatten(),
    "unflatten": lambda t: t.unflatten(1, (2, 4)),
    "reshape to": lambda t: t.reshape(8, 6),
    "unsqueeze": lambda t: t.unsqueeze(0),
    "none": lambda t: t[None],
    "squeeze": lambda t: t[None].squeeze(),
    "narrow part": lambda t: t.narrow(1, 2, 3),
    "split part": lambda t: t.split(2)[1],
    "split_with_sizes": lambda t: t.split([2, 4])[1],
    "chunk": lambda t: t.chunk(2, dim=1)[0],
    "tensor_split": lambda t: t.tensor_split(3)[2],
    "hsplit": lambda t: t.hsplit(2)[1],
    "unbind": lambda t: t.unbind()[3],
    "iterate": lambda t: next(iter(t)),
    "diagonal": lambda t: t.diagonal(),
    "unfold": lambda t: t.unfold(1, 4, 4),
    "as_strided part": lambda t: t.as_strided((3, 3), (8, 2), 1),
    "part of a turned": lambda t: t.t()[::2],
    "view of a view": lambda t: t[1:].view(-1)[3:9].view(2, 3),
    "data of a view": lambda t: t[1].data,
    "detached view": lambda t: t[1].detach(),
}
VIEWS: dict[str, Callable[[Any], Any]] = {**SAME, **TURNED, **OTHER}


def _setitem(v: torch.Tensor) -> None:
    v[...] = 2.0


def _set_some(v: torch.Tensor) -> None:
    v[v > 0] = 2.0


def _iadd(v: torch.Tensor) -> None:
    v += 1.5


def _assign_data(v: torch.Tensor) -> None:
    v.data = torch.full(v.shape, 2.0)


def _numpy(v: torch.Tensor) -> None:
    v.numpy()[...] = 2.0


def _adam(v: torch.Tensor) -> None:
    state = [torch.zeros_like(v) for _ in range(3)]
    torch._fused_adam_([v], [state[0] + 1], [state[1]], [state[2]], [], [torch.ones(())], lr=0.5, beta1=0.9,
                       beta2=0.9, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False)  # fmt: skip


WRITES: dict[str, Callable[[Any], Any]] = {
    "add_": lambda v: v.add_(1.5),
    "iadd": _iadd,
    "mul_": lambda v: v.mul_(3.0),
    "mul_ tensor": lambda v: v.mul_(torch.tensor(0.3)),
    "div_": lambda v: v.div_(7),
    "fill_": lambda v: v.fill_(2.0),
    "zero_": lambda v: v.zero_(),
    "copy_": lambda v: v.copy_(torch.full(v.shape, 2.0)),
    "copy_ quantized": lambda v: v.copy_(quantize(torch.full(v.shape, 2.0), CastSpec(E4M3FN))),
    "normal_": lambda v: v.normal_(generator=torch.Generator().manual_seed(1)),
    "init": lambda v: torch.nn.init.uniform_(v, generator=torch.Generator().manual_seed(1)),
    "clamp_": lambda v: v.clamp_(min=0.1),
    "neg_": lambda v: v.neg_(),
    "masked_fill_": lambda v: v.masked_fill_(torch.ones(v.shape, dtype=torch.bool), 2.0),
    "index_put_": lambda v: v.index_put_((torch.tensor([0]),), torch.tensor(2.0)) if v.ndim else v.fill_(2.0),
    "lerp_": lambda v: v.lerp_(torch.ones(v.shape), 0.5),
    "addcmul_": lambda v: v.addcmul_(torch.ones(v.shape), torch.ones(v.shape)),
    "set all": _setitem,
    "set some": _set_some,
    "out": lambda v: torch.add(torch.ones(v.shape), 1, out=v),
    "foreach add": lambda v: torch._foreach_add_([v], 1.5),
    "foreach mul": lambda v: torch._foreach_mul_([v], 0.3),
    "foreach copy": lambda v: torch._foreach_copy_([v], [torch.full(v.shape, 2.0)]),
    "foreach zero": lambda v: torch._foreach_zero_([v]),
    "fused adam": _adam,
    "through data": lambda v: v.data.fill_(2.0),
    "through detach": lambda v: v.detach().sub_(1.0),
    "through a view": lambda v: v.view(v.shape).add_(1.5),
    "through alias": lambda v: v[...].add_(1.5),
}
REFUSED: dict[str, Callable[[Any], Any]] = {
    "numpy": _numpy,
    "resize_": lambda v: v.resize_(1),
    "unsqueeze_": lambda v: v.unsqueeze_(0),
    "set_": lambda v: v.set_(torch.ones(3)),
    "bits": lambda v: v.view(torch.int32).fill_(0),
    "dlpack": lambda v: torch.from_dlpack(v).fill_(0),
    "storage": lambda v: v.untyped_storage().fill_(0),
}


def bits_of(q: QuantizedTensor) -> list[list[int]]:
    parts = (q.codes, q.dequant_scale, q.amax)
    return [part.contiguous().view(-1).view(torch.uint8).tolist() for part in parts]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("name", VIEWS)
def test_every_write_reaches_the_tensor_or_raises(name: str, spec: CastSpec) -> None:
    reached = 0
    for write in WRITES.values():
        q = quantize(seeded(6, 8), spec)
        before, plain = bits_of(q), q.dequantize().clone()
        view, plain_view = VIEWS[name](q), VIEWS[name](plain)
        assert torch.equal(view + 0, plain_view)
        try:
            write(view)
        except NarrowgaugeError:
            assert bits_of(q) == before
            assert name in OTHER and spec in TILES  # what should alias does
            continue
        reached += 1
        changed = plain_view.clone()  # some of torch's own kernels do not heed strides
        write(changed)
        plain_view.copy_(changed)
        assert torch.equal(view + 0, VIEWS[name](q.dequantize()))
        expected = quantize(plain, spec).dequantize()
        # a factor may have gone into the scales instead
        torch.testing.assert_close(q.dequantize(), expected, rtol=1e-6, atol=0)
    assert reached == (0 if name in OTHER and spec in TILES else len(WRITES))


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("name", VIEWS)
def test_what_hands_out_memory_is_refused(name: str, spec: CastSpec) -> None:
    for write in REFUSED.values():
        q = quantize(seeded(6, 8), spec)
        before, view = bits_of(q), VIEWS[name](q)
        with pytest.raises((NarrowgaugeError, RuntimeError, ValueError, BufferError)):
            write(view)
        assert bits_of(q) == before and (q.dequantize() == quantize(seeded(6, 8), spec).dequantize()).all()


@pytest.mark.parametrize("spec", TILES, ids=str)
def test_a_view_of_tiles_reads_right_and_stays_current(spec: CastSpec) -> None:
    q = quantize(seeded(6, 8), spec)
    views = [(VIEWS[name], VIEWS[name](q)) for name in OTHER]
    for _ in range(2):
        values = q.dequantize()
        for make, view in views:
            expected = make(values)
            assert isinstance(view, ReadOnlyView) and view.stride() == expected.stride()
            assert view.tolist() == expected.tolist() and view.numpy().tolist() == expected.tolist()
            for result in (view * 2, view.clone(), view.dequantize(), torch.stack([view] * 2), view.sum()):
                assert type(result) is torch.Tensor
            assert torch.equal(view * 2, expected * 2) and view.dequantize(torch.float64).dtype is torch.float64
            assert np.asarray(view).flags.writeable is False
        q.add_(3.0)
    assert "ReadOnlyView([" in repr(q[0]) and "per" in repr(q[0]) or "blocks" in repr(q[0])


def test_the_error_names_operation_view_and_remedy() -> None:
    q = quantize(seeded(6, 8), TILES[0])
    message = r"aten.fill_.Scalar would write to a view of shape \(8,\).*scales per row.*write to the tensor itself, or"
    with pytest.raises(NarrowgaugeError, match=message):
        q[1].fill_(1)
    with pytest.raises(NarrowgaugeError, match="assigning .data"):
        q[1].data = torch.ones(8)
    with pytest.raises(NarrowgaugeError, match="dlpack"):
        torch.from_dlpack(q[1])
    q[1].clone().fill_(1)  # as it says


def test_a_view_is_a_source_like_any_tensor() -> None:
    for spec in TILES:
        q, other = quantize(seeded(6, 8), spec), quantize(seeded(8, seed=1), spec)
        row = q.dequantize()[2]
        assert torch.equal(quantize(q[2], spec).dequantize(), quantize(row, spec).dequantize())
        assert torch.equal(other.copy_(q[2]).dequantize(), quantize(row, spec).dequantize())
        plain = torch.zeros(8)
        assert torch.equal(plain.copy_(q[2]).add_(q[2]), row * 2)
        assert torch.equal(q[2] + q.view(6, 8)[2], row * 2) and torch.equal(
            q[:1] @ q.t(), q.dequantize()[:1] @ q.dequantize().t()
        )
        q.copy_(q[:1].expand(6, 8))
        assert torch.equal(q.dequantize(), quantize(row.new_tensor(q[0].tolist()).expand(6, 8), spec).dequantize())
