"""Sharded models: parts of any shape, what they store, who asks for it, and what is refused."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import ranks
import torch
from models import batch, tiny_gpt
from sharded import Stack, mlp, prepared, values_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import narrowgauge as ng
from narrowgauge.distributed.layout import layout
from narrowgauge.distributed.sharding import shard
from narrowgauge.distributed.wire import CONTROL, counted
from narrowgauge.errors import ConfigError, ConversionError, NarrowgaugeError, RecipeError
from narrowgauge.layers.linear import Linear
from narrowgauge.layers.norm import RMSNorm
from narrowgauge.recipes.casts import WIRE
from narrowgauge.tensors.cast import cast_operand
from narrowgauge.tensors.local import local
from narrowgauge.tensors.quantized import QuantizedTensor

pytestmark = pytest.mark.multiproc
run = functools.partial(ranks.run, timeout_s=300)  # the first call may compile kernels
FP32 = ng.CastSpec(ng.formats.FP32)


def _uneven(rows: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Per parameter: this rank's part of the gradient, and the whole one of a single process."""
    recipe = ng.recipe("narrow8").replace(min_size=1, grad=FP32, min_state_size=16)
    whole: dict[str, Tensor] = {}
    parts: dict[str, Tensor] = {}
    for sharded in (False, True):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(64, rows, bias=False), nn.Linear(rows, 64, bias=False))
        if sharded:
            fully_shard(model)
        model, optimizer = prepared(model, recipe)
        x = torch.randn(8, 64)
        for step in range(2):
            model(x).float().square().mean().backward()
            if step == 0:
                into = parts if sharded else whole
                into.update({name: local(p.grad).float().clone() for name, p in model.named_parameters()})  # type: ignore[arg-type]
            optimizer.step()
            optimizer.zero_grad()
    return {name: (parts[name], whole[name]) for name in whole}


@pytest.mark.parametrize(("rows", "sizes"), [(5, [2, 2, 1, 0]), (67, [17, 17, 17, 16])])
def test_uneven_parts_and_ranks_without_elements(rows: int, sizes: list[int]) -> None:
    found = run(4, _uneven, rows)
    assert [len(each["0.weight"][0]) for each in found] == sizes
    for name in ("0.weight", "1.weight"):
        together, expected = torch.cat([each[name][0] for each in found]), found[0][name][1]
        assert together.shape == expected.shape
        bound = torch.maximum(expected.abs() * 2.0**-4, expected.abs().max() / 224 * 2.0**-10)
        assert ((together - expected).abs() <= bound).all()


def _accumulated() -> tuple[list[bool], int, list[bool]]:
    model = shard(Stack(), layout(shard=2))
    model, _ = prepared(model)
    x = torch.randn(8, 64)
    model(x).float().square().mean().backward()
    once = [values_of(local(p.grad)) for p in model.parameters()]  # type: ignore[arg-type]
    is_quantized = [isinstance(local(p.grad), QuantizedTensor) for p in model.parameters()]  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(x).float().square().mean().backward()
    twice = [local(p.grad) for p in model.parameters()]  # type: ignore[arg-type]
    said = sum("second backward" in str(warning.message) for warning in caught)
    # the first mean as it was kept, plus the second one, wide
    close = [torch.allclose(t.float(), 2 * o, rtol=2.0**-3, atol=1e-7) for t, o in zip(twice, once, strict=True)]
    for p in model.parameters():
        p.grad = None
    with ng.accumulate(model):
        for _ in range(2):
            model(x).float().square().mean().backward()
        wide = [type(local(p.grad)) is Tensor for p in model.parameters()]  # type: ignore[arg-type]
    assert all(wide)
    kept = [isinstance(local(p.grad), QuantizedTensor) for p in model.parameters()]  # type: ignore[arg-type]
    assert kept == is_quantized
    return close, said, is_quantized


def test_a_second_backward_adds_widevalues_of() -> None:
    for close, said, is_quantized in run(2, _accumulated):
        assert all(close) and said == 1
        assert is_quantized == [True, False] * 2


# what is stored, and who asks for it


def _stored(name: str) -> list[tuple[type, torch.dtype, torch.dtype]]:
    model, _ = prepared(shard(tiny_gpt(), layout(shard=2)), name)
    parts = [local(p) for p in (model.blocks[0].mlp.down.weight, model.embedding.weight, model.norm.weight)]  # type: ignore
    return [(type(part), part.codes.dtype if isinstance(part, QuantizedTensor) else part.dtype) for part in parts]  # type: ignore


@pytest.mark.parametrize(
    ("name", "weight", "table", "norm"),
    [
        ("narrow8", (Tensor, torch.bfloat16), (Tensor, torch.bfloat16), (Tensor, torch.bfloat16)),
        ("fp8_lm_o1", (QuantizedTensor, torch.float16), (QuantizedTensor, torch.float16), (Tensor, torch.float32)),
        (
            "fp8_lm_o3",
            (QuantizedTensor, torch.float8_e4m3fn),
            (QuantizedTensor, torch.float8_e4m3fn),
            (Tensor, torch.float32),
        ),
        ("fp8_current", (Tensor, torch.float32), (Tensor, torch.float32), (Tensor, torch.float32)),
    ],
)
def test_each_part_is_stored_by_the_recipe(name: str, weight: Any, table: Any, norm: Any) -> None:
    assert run(2, _stored, name) == [[weight, table, norm]] * 2


def _own_calls() -> tuple[bool, bool, list[float], list[float]]:
    """fully_shard on single layers, too, which gives them classes of torch's own."""
    model = tiny_gpt()
    for block in model.blocks:
        fully_shard(block.mlp.down)
        fully_shard(block)
    fully_shard([model.norm, model.lm_head])
    fully_shard(model)
    model, optimizer = prepared(model)  # type: ignore[assignment]
    ours = isinstance(model.blocks[0].mlp.down, Linear) and isinstance(model.norm, RMSNorm)  # type: ignore
    theirs = isinstance(model.blocks[0].mlp.down, FSDPModule) and isinstance(model.norm, FSDPModule)  # type: ignore
    losses, again = [], []
    for into in (losses, again):
        model, optimizer = ng.prepare(model, optimizer, "narrow8")  # again: nothing changes
        loss = model(*batch(0))[1]
        loss.backward()
        into.append(loss.item())
        optimizer.zero_grad()
    return ours, theirs, losses, again


def test_own_calls_of_fully_shard_and_a_second_prepare() -> None:
    for ours, theirs, losses, again in run(2, _own_calls):
        assert ours and theirs and losses == again


def _operand_of_codes() -> bool:
    """The gathered weight is the operand: it is not cast again."""
    model, _ = prepared(shard(Stack(), layout(shard=2)))
    layer = model.layers[0]
    same = []

    def look(layer: Linear, _: Any) -> None:
        weight = layer.weight.detach()
        operand = cast_operand(weight, layer.training_casts.weight, keep_codes=True, carrier=None)
        same.append(isinstance(weight, QuantizedTensor) and operand.codes is weight.codes)

    layer.register_forward_pre_hook(look)
    model(torch.randn(8, 64))
    return same == [True]


def test_gathered_codes_are_multiplied_as_they_are() -> None:
    assert run(2, _operand_of_codes) == [True, True]


def _scheduled() -> list[tuple[type, bool]]:
    first = ng.recipe("narrow8")
    late = first.replace(name="late", input=None, weight=None, grad_output=None)
    model, optimizer = prepared(shard(Stack(), layout(shard=2)), first.switch_at(2, late))
    found = []
    seen: list[Tensor] = []
    model.layers[0].register_forward_pre_hook(lambda layer, _: seen.append(layer.weight.data))
    for _ in range(4):
        with counted() as count:
            model(torch.randn(8, 64)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((type(seen.pop()), any(row.role == CONTROL for row in count.rows)))
    return found


def test_weights_travel_by_the_recipe_in_force() -> None:
    for found in run(2, _scheduled):
        assert found == [(QuantizedTensor, True)] * 2 + [(Tensor, False)] * 2


def _refusals() -> dict[str, str]:
    def message(call: Any) -> str:
        try:
            call()
        except NarrowgaugeError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    world = layout(shard=4)
    own = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "shard"))
    gathered = fully_shard(mlp())
    gathered.unshard()
    stochastic = ng.CastSpec(ng.formats.E4M3FN, WIRE.granularity, WIRE.scale, rounding=ng.STOCHASTIC)
    return {
        "no shards": message(lambda: shard(mlp(), layout(data=4))),
        "no module": message(lambda: shard(3, world)),  # type: ignore[arg-type]
        "offload": message(lambda: shard(mlp(), world, offload="disk")),
        "two dimensions": message(lambda: prepared(fully_shard(mlp(), mesh=own))),
        "fewer ranks": message(lambda: prepared(fully_shard(mlp(), mesh=world.mesh["shard"], reshard_after_forward=2))),
        "gathered": message(lambda: prepared(gathered)),
        "stochastic": message(
            lambda: prepared(fully_shard(mlp()), ng.recipe("narrow8").replace(param_comm=stochastic))
        ),
    }


def test_what_cannot_travel_is_refused() -> None:
    for found in run(4, _refusals):
        assert found["no shards"].startswith(ConfigError.__name__) and "shard 1" in found["no shards"]
        assert found["no module"].startswith(ConversionError.__name__) and "int" in found["no module"]
        assert found["offload"].startswith(ConfigError.__name__) and "'disk'" in found["offload"]
        assert "mesh of two dimensions" in found["two dimensions"]
        assert "fewer ranks" in found["fewer ranks"]
        assert "model.reshard()" in found["gathered"]
        assert found["stochastic"].startswith(RecipeError.__name__) and "nearest" in found["stochastic"]


def _alone() -> tuple[list[float], list[float]]:
    losses: list[list[float]] = []
    for sharded in (True, False):
        model = fully_shard(Stack()) if sharded else Stack()
        model, optimizer = prepared(model)  # type: ignore[arg-type]
        losses.append([])
        for step in range(3):
            loss = model(torch.full((8, 64), 1.0 + step)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    return losses[0], losses[1]


def test_a_group_of_one_rank_trains_as_one_process() -> None:
    ((sharded, alone),) = run(1, _alone)
    assert sharded == alone


def _wide(name: str) -> set[tuple[str, torch.dtype]]:
    model, _ = prepared(shard(Stack(), layout(shard=2)), name)
    with counted() as count:
        model(torch.randn(8, 64)).float().sum().backward()
    return {(row.role, row.dtype) for row in count.rows}


@pytest.mark.parametrize(
    ("name", "params", "grads"),
    [("fp8_current", torch.float32, torch.float32), ("bf16_pure", torch.bfloat16, torch.bfloat16)],
)
def test_recipes_without_8_bits_on_the_wire(name: str, params: torch.dtype, grads: torch.dtype) -> None:
    for found in run(2, _wide, name):
        # biases are small, and their gradients travel in float32
        assert found == {("param_comm", params), ("grad_comm", grads), ("grad_comm", torch.float32)}
