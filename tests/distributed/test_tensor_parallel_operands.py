"""Operands of parted layers have the codes and scales that they have on one process, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import batch, tiny_gpt
from operands import Recorded, recorded, same_bits
from ranks import run
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.distributed import tensor_parallel, wire
from narrowgauge.numerics.formats import E4M3FN
from narrowgauge.numerics.scaling import Delayed
from narrowgauge.ops.ranked import ranked_rows
from narrowgauge.recipes.spec import CastSpec, Recipe

pytestmark = pytest.mark.multiproc

TOKENS, IN, OUT = 256, 256, 512


def _recipe(name: str) -> Recipe:
    if name in ("mxfp4", "nvfp4"):  # random bits are each rank's own
        kept = {"first_last": 0} if name == "nvfp4" else {}
        return ng.recipe(name, stochastic=False, **kept)
    if name == "fp8_warming":
        spec = CastSpec(E4M3FN, scale=Delayed(warmup=10, history_length=4))
        return ng.recipe("fp8_delayed").replace(input=spec, weight=spec, grad_output=spec)
    return ng.recipe(name)


RECIPES = (
    "fp8_current", "narrow8", "fp8_lm_o1", "fp8_warming", "fp8_rowwise", "fp8_rowwise_gw_hp", "fp8_block", "mxfp8",
    "mxfp6", "mxfp4", "nvfp4",
)  # fmt: skip


class _One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(IN, OUT, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def _values(*shape: int, seed: int) -> Tensor:
    """Magnitudes that differ a hundredfold between the parts of rows and of columns."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x[..., shape[-1] // 2 :] *= 100
    x[..., shape[-2] // 2 :, :] *= 37
    return x


def _model(recipe: Recipe, kind: str | None, sequence: bool) -> nn.Module:
    torch.manual_seed(0)
    model = _One()
    with torch.no_grad():
        model.layer.weight.copy_(_values(OUT, IN, seed=5))
    if kind is not None:
        found = ng.distributed.layout(tensor=dist.get_world_size())
        tensor_parallel.parallelize_tensor(model, found, {"layer": kind}, sequence=sequence)
    ng.convert(model, recipe)
    tensor_parallel.take_up(model, recipe.resolve(torch.device("cpu")))
    return model


def _casts(model: nn.Module, x: Tensor, grad: Tensor) -> tuple[list[Recorded], Tensor, Tensor]:
    with recorded(model) as found:
        x = x.clone().requires_grad_()
        y = model(x)
        y.backward(grad)
    assert x.grad is not None
    return found, y.detach(), x.grad


def _part(x: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    return x.chunk(ranks, dim=dim)[rank]


def _compare(name: str, kind: str, sequence: bool) -> list[str]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    recipe, x, grad = _recipe(name), _values(2, TOKENS, IN, seed=1), _values(2, TOKENS, OUT, seed=2)
    one, y, grad_x = _casts(_model(recipe, None, False), x, grad)
    is_column = kind == "column"
    mine_x = x if is_column else _part(x, -1, rank, ranks)
    mine_grad = _part(grad, -1, rank, ranks) if is_column else grad
    if sequence:
        mine_x = _part(x, -2, rank, ranks) if is_column else mine_x
        mine_grad = mine_grad if is_column else _part(mine_grad, -2, rank, ranks)
    two, y_2, grad_x_2 = _casts(_model(recipe, kind, sequence), mine_x, mine_grad)
    expected_y = _part(y, -1, rank, ranks) if is_column else _part(y, -2, rank, ranks) if sequence else y
    parts_x = -1 if not is_column else -2 if sequence else None
    expected_grad = grad_x if parts_x is None else _part(grad_x, parts_x, rank, ranks)
    for found, expected in ((y_2, expected_y), (grad_x_2, expected_grad)):
        error = (found - expected).norm() / expected.norm()
        assert error < 0.06, (kind, sequence, error)  # sums travel in 8 bits: a step of E4M3 is 1/8 at most, rms 2.6 %
    bad = []
    assert [each[:3] for each in one] == [each[:3] for each in two]
    for whole, part in zip(one, two, strict=True):
        wanted = _expected(whole, kind, sequence, rank, ranks)
        found = (part.cast.codes, part.cast.block_scale, part.cast.dequant_scale)
        bad += [
            f"{whole.role} {whole.spec}: {what}"
            for what, a, b in zip(("codes", "block_scale", "dequant_scale"), wanted, found, strict=True)
            if not same_bits(a, b)
        ]
    return bad


def _expected(whole: Recorded, kind: str, sequence: bool, rank: int, ranks: int) -> tuple[Tensor | None, ...]:
    """This rank's part of the codes and scales of one process."""
    is_column = kind == "column"
    dims = {"weight": 0 if is_column else 1, "grad_output" if is_column else "input": 1}
    gathered = "input" if is_column else "grad_output"
    codes, scales = whole.cast.codes, whole.cast.block_scale
    assert codes is not None
    if sequence and whole.role in ("input", "grad_output"):
        # rows of one process are batch by batch, those of the products rank by rank
        codes = _ranked(codes, ranks)
        scales = None if scales is None or scales.shape[0] == 1 else _ranked(scales, ranks)
        scales = whole.cast.block_scale if scales is None else scales
        if whole.role == gathered:
            dims = {**dims, whole.role: 0}
    dim = dims.get(whole.role)
    if dim is not None:
        codes = _part(codes, dim, rank, ranks)
        if scales is not None and scales.shape[dim] > 1:
            scales = _part(scales, dim, rank, ranks)
    return codes, scales, whole.cast.dequant_scale


def _ranked(rows: Tensor, ranks: int) -> Tensor:
    as_bytes = rows.contiguous().view(torch.uint8) if rows.dtype.itemsize == 1 else rows
    return ranked_rows(as_bytes.view(2, -1, rows.shape[1]), ranks).view(rows.dtype)


def _compare_all(name: str) -> list[str]:
    kinds = [(kind, sequence) for kind in ("column", "row") for sequence in (False, True)]
    return [f"{kind} {sequence}: {what}" for kind, sequence in kinds for what in _compare(name, kind, sequence)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_and_scales_are_those_of_one_process(recipe: str) -> None:
    assert run(2, _compare_all, recipe) == [[], []]


def _weights(name: str) -> tuple[list[str], int]:
    recipe = _recipe(name)
    one, two = (tiny_gpt(width=256, heads=4, kv_heads=2, ffn_width=512) for _ in range(2))
    tensor_parallel.parallelize_tensor(two, ng.distributed.layout(tensor=2))
    for model in (one, two):
        ng.convert(model, recipe)
    ids, _ = batch(1)
    with recorded(one) as wholes, torch.no_grad():
        one.eval()(ids)
    with recorded(two) as parts, wire.counted() as count, torch.no_grad():
        two.eval()(ids)
        two(ids)
    by_name = tensor_parallel.sections(two)
    bad = []
    found = {part.layer: part.cast for part in parts if part.role == "weight"}
    for whole in wholes:
        if whole.role == "weight":
            codes = by_name[f"{whole.layer}.weight"].take(whole.cast.codes.view(torch.uint8), dist.get_rank())  # type: ignore[union-attr]
            part = found[whole.layer]
            if not same_bits(codes, part.codes.view(torch.uint8)):  # type: ignore[union-attr]
                bad.append(whole.layer)
            if not same_bits(whole.cast.dequant_scale, part.dequant_scale):
                bad.append(f"{whole.layer} scale")
    weights = [row for row in count.rows if row.role == wire.CONTROL and row.collective == "all_reduce"]
    return bad, sum(row.calls for row in weights)


def test_weights_of_fused_layers_have_the_scales_of_the_whole_in_one_collective() -> None:
    layers = 2
    for bad, calls in run(2, _weights, "fp8_current"):
        assert bad == []
        # one for all weights, and one for the input of each row-parallel layer, `out` and `down`, in each of 2 forwards
        assert calls == 1 + 2 * 2 * layers


def _stale(written: str) -> bool:
    """Whether weights that have grown, whoever has written to them, are cast by what they are now."""
    model = _model(_recipe("fp8_current"), "column", False)
    weight: Any = model.layer.weight
    x = torch.randn(16, IN)
    model(x)
    with torch.no_grad():
        if written == "by torch":
            weight.mul_(64.0)
        elif written == "by an optimizer":
            weight.grad = weight * -63.0
            torch.optim.SGD([weight], lr=1.0).step()
        else:
            weight.to_local().mul_(64.0)
    with recorded(model) as found:
        model(x)
    (cast,) = (each.cast for each in found if each.role == "weight")
    assert cast.dequant_scale is not None
    largest = tensor_parallel.whole_parameter(model, "layer.weight").abs().max()
    return same_bits(cast.dequant_scale, torch.ones(()) / (torch.full((), 448.0) / largest))


@pytest.mark.parametrize("written", ["by torch", "by an optimizer", "in place, locally"])
def test_scales_follow_the_weights(written: str) -> None:
    assert run(2, _stale, written) == [True, True]


def _self_rolled() -> tuple[list[float], bool]:
    """The delayed scales of a layer that no optimizer rolls, and whether they are those of one process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    one, two = (_model(_recipe("fp8_delayed"), kind, kind is not None) for kind in (None, "column"))
    x, grad = _values(2, TOKENS, IN, seed=1), _values(2, TOKENS, OUT, seed=2)
    for _ in range(2):
        _casts(one, x, grad)
        _casts(two, _part(x, -2, rank, ranks), _part(grad, -1, rank, ranks))
    names = [f"{role}_quant_scale" for role in ("input", "weight", "grad_output")]
    found, expected = ([float(model.layer.get_buffer(name)) for name in names] for model in (two, one))  # type: ignore[union-attr,operator]
    return found, found == expected


def test_a_layer_that_rolls_by_itself_takes_the_scales_of_the_whole() -> None:
    (first, same), (second, also_same) = run(2, _self_rolled)
    assert first == second and same and also_same and all(scale != 1.0 for scale in first)
