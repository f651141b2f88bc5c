"""FSDP2 with parameters gathered and gradients reduced in 8 bits, against one process."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import ranks
import torch
import torch.distributed as dist
from models import batch, tiny_gpt
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.distributed import codec
from narrowgauge.distributed.gathering import InBlocks
from narrowgauge.distributed.layout import layout
from narrowgauge.distributed.sharding import shard
from narrowgauge.distributed.wire import CONTROL, counted
from narrowgauge.layers.linear import Linear
from narrowgauge.models.gpt import GPT
from narrowgauge.recipes.casts import WIRE
from narrowgauge.tensors.cast import cast_operand
from narrowgauge.tensors.local import local
from narrowgauge.tensors.quantized import QuantizedTensor

pytestmark = pytest.mark.multiproc
run = functools.partial(ranks.run, timeout_s=300)  # the first call may compile kernels
RECIPES = ("narrow8", "fp8_lm_o2", "fp8_lm_o3")


class Step(NamedTuple):
    """A first step on one rank. weights: codes and scale of each quantized weight as it was multiplied. grads: this
    rank's parts, float32. sent: (role, collective, dtype, calls, bytes)."""

    loss: float
    weights: dict[str, tuple[Tensor, float]]
    grads: dict[str, Tensor]
    sent: list[tuple[Any, ...]]


def _model(**changes: object) -> GPT:
    """Embedding and head hold values that the wire does not change, so that the first step is that of one process."""
    model = tiny_gpt(**changes)
    with torch.no_grad():
        for table in (model.embedding.weight, model.lm_head.weight):
            table.copy_(codec.decode(codec.encode(table.view(1, -1), WIRE), table.numel(), WIRE).view_as(table))
    return model


def _recipe(name: str, **fields: object) -> ng.Recipe:
    return ng.recipe(name).replace(**fields)


def _prepared(recipe: ng.Recipe, model: GPT | None = None, **sharding: Any) -> tuple[GPT, torch.optim.Optimizer]:
    """The same model on every rank; sharding: sizes of the layout and options of `shard`, left out: one process."""
    model = _model() if model is None else model
    sizes = {name: sharding.pop(name) for name in ("data", "shard") if name in sharding}
    if sizes:
        shard(model, layout(**sizes), **sharding)
    return ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe)


def _step(model: GPT, seed: int = 0) -> Step:
    weights: dict[str, tuple[Tensor, float]] = {}

    def look(layer: nn.Module, name: str) -> None:
        assert isinstance(layer, Linear)
        if layer.quantized:
            spec = layer.training_casts.weight
            seen = cast_operand(layer.weight.detach(), spec, keep_codes=True, carrier=None)
            assert seen.codes is not None and seen.dequant_scale is not None
            weights[name] = seen.codes.view(torch.uint8).clone(), seen.dequant_scale.item()

    handles = [
        layer.register_forward_pre_hook(lambda layer, _, name=name: look(layer, name))
        for name, layer in model.named_modules()
        if isinstance(layer, Linear)
    ]
    with counted() as count:
        loss = model(*batch(seed))[1]
        loss.backward()
    for handle in handles:
        handle.remove()
    return Step(loss.item(), weights, _grads(model), [tuple(row) for row in count.rows])


def _grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: _values(local(p.grad)) for name, p in model.named_parameters() if p.grad is not None}


def _values(x: Tensor) -> Tensor:
    return x.dequantize(torch.float32) if isinstance(x, QuantizedTensor) else x.float()


def _both(recipe: ng.Recipe, **sharding: Any) -> tuple[Step, Step]:
    """(sharded, one process), on the same batch on every rank."""
    sharded = _step(_prepared(recipe, shard=dist.get_world_size(), **sharding)[0])
    return sharded, _step(_prepared(recipe)[0])


def _first_step(name: str) -> tuple[Step, Step]:
    return _both(_recipe(name, grad=ng.CastSpec(ng.formats.FP32)))


def _part(whole: Tensor, rank: int, ranks: int = 2) -> Tensor:
    size = -(-len(whole) // ranks)
    return whole[rank * size : (rank + 1) * size]


@pytest.mark.parametrize("name", RECIPES)
def test_the_first_step_is_that_of_one_process(name: str) -> None:
    for rank, (sharded, alone) in enumerate(run(2, _first_step, name)):
        assert sharded.loss == alone.loss
        assert sharded.weights.keys() == alone.weights.keys() and len(alone.weights) == 8
        for layer, (codes, scale) in alone.weights.items():
            assert torch.equal(sharded.weights[layer][0], codes) and sharded.weights[layer][1] == scale, layer
        assert sharded.grads.keys() == alone.grads.keys()
        for parameter, whole in alone.grads.items():
            expected, found = _part(whole, rank), sharded.grads[parameter]
            if whole.numel() < 4096:
                assert torch.equal(found, expected), parameter
                continue
            # a code's relative error is at most 2^-4, or half a subnormal; a scale is at most amax / 224
            blocks = expected.reshape(-1, 128)
            bound = torch.maximum(blocks.abs() * 2.0**-4, blocks.abs().amax(1, keepdim=True) / 224 * 2.0**-10)
            error = (found.reshape(-1, 128) - blocks).abs()
            assert (error <= bound).all() and error.any(), parameter


def test_eight_bits_travel_and_are_counted() -> None:
    model = tiny_gpt()
    counts = {name: p.numel() for name, p in model.named_parameters()}
    tables = counts.pop("embedding.weight"), counts.pop("lm_head.weight")
    linear = sum(numel for numel in counts.values() if numel >= 4096)
    small = sum(numel for numel in counts.values() if numel < 4096)
    small_of_blocks = sum(numel for name, numel in counts.items() if numel < 4096 and name.startswith("blocks"))
    table = sum(codec.wire_bytes(numel // 2, WIRE) for numel in tables)
    for sharded, _ in run(2, _first_step, "narrow8"):
        sent = {row[:3]: row[3:] for row in sharded.sent}
        # blocks twice, the root once
        assert sent.pop(("param_comm", "all_gather", torch.uint8)) == (5, linear + table)
        assert sent.pop(("param_comm", "all_gather", torch.bfloat16)) == (5, small + small_of_blocks)
        codes = codec.wire_bytes(linear // 2, WIRE) + table
        assert sent.pop(("grad_comm", "all_to_all", torch.uint8)) == (3, codes)
        assert sent.pop(("grad_comm", "all_to_all", torch.float32)) == (3, small * 2)
        # the amax values of all weights, once
        assert sent == {(CONTROL, "all_reduce", torch.int32): (1, 8 * 4)}


def _checkpointed() -> GPT:
    model = _model()
    model.activation_checkpointing = True
    return model


def _variants() -> dict[str, Step]:
    recipe = _recipe("narrow8")
    found = {"default": _step(_prepared(recipe, shard=2)[0])}
    for keeps in (True, False):
        found[f"reshard {keeps}"] = _step(_prepared(recipe, shard=2, reshard_after_forward=keeps)[0])
    found["offload"] = _step(_prepared(recipe, shard=2, offload="cpu")[0])
    found["checkpointed"] = _step(_prepared(recipe, _checkpointed(), shard=2)[0])
    model, _ = _prepared(recipe, shard=2)
    plain = model.blocks[0].mlp.forward
    model.blocks[0].mlp.forward = lambda *args: checkpoint(plain, *args, use_reentrant=False)
    found["selectively checkpointed"] = _step(model)
    return found


def test_resharding_offload_and_checkpoints_change_no_bit() -> None:
    for found in run(2, _variants):
        first = found["default"]
        for variant, step in found.items():
            assert step.loss == first.loss and step.grads.keys() == first.grads.keys(), variant
            assert all(torch.equal(step.grads[name], grad) for name, grad in first.grads.items()), variant
        calls = {
            variant: sum(row[3] for row in step.sent if row[0] == "param_comm") // 2 for variant, step in found.items()
        }
        # two blocks and the root, gathered once or, for backward, twice
        assert calls == {
            "default": 5, "reshard True": 6, "reshard False": 3, "offload": 5, "checkpointed": 5,
            "selectively checkpointed": 5,
        }  # fmt: skip


def _received_bytes() -> tuple[int, int]:
    """Of parameters that were gathered in blocks and are still there: bytes as received, and as decoded."""
    model, _ = _prepared(_recipe("narrow8"), shard=2, reshard_after_forward=False)
    model(*batch(0))
    found = [p for p in model._narrowgauge_sharding.parameters if isinstance(p.route, InBlocks)]  # type: ignore[union-attr]
    received = sum(memory.untyped_storage().nbytes() for p in found for memory in p.all_gather_outputs)
    return received, sum(memory.untyped_storage().nbytes() for p in found for memory in p._unsharded_inner_tensors)


def test_received_blocks_are_freed_once_they_are_decoded() -> None:
    tables = 2 * 64 * 64  # embedding and head, in bfloat16
    assert run(2, _received_bytes) == [(0, 2 * tables)] * 2


def _hybrid() -> tuple[Step, Step]:
    recipe = _recipe("narrow8")
    same = _step(_prepared(recipe, data=2, shard=2)[0])
    different = _step(_prepared(recipe, data=2, shard=2)[0], seed=dist.get_rank())
    return same, different


def test_replicas_of_shards_average_in_8_bits() -> None:
    expected = [step for step, _ in run(2, _pair)]
    found = run(4, _hybrid)
    for rank, (same, different) in enumerate(found):
        for name, grad in expected[rank % 2].grads.items():
            assert torch.equal(same.grads[name], grad), name
            assert torch.equal(different.grads[name], found[(rank + 2) % 4][1].grads[name]), name
        dtypes = {row[2] for row in same.sent if row[0] == "grad_comm" and row[1] == "all_gather"}
        assert torch.uint8 in dtypes
    assert any(not torch.equal(found[0][1].grads[name], grad) for name, grad in expected[0].grads.items())


def _pair() -> tuple[Step, None]:
    return _step(_prepared(_recipe("narrow8"), shard=2)[0]), None


def _validated_then_accumulated() -> dict[str, Tensor]:
    model, _ = _prepared(_recipe("narrow8"), shard=2)
    model.eval()
    with torch.no_grad():
        model(*batch(7))
    model.train()
    with ng.accumulate(model):
        for seed in range(2):
            loss = model(*batch(seed))[1]
            assert loss is not None
            loss.backward()
    return {name: local(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def test_a_forward_without_backward_leaves_nothing_gathered() -> None:
    for grads in run(2, _validated_then_accumulated):
        # accumulate finds the shards and their hooks, also those of the root: cast once, without a warning
        assert isinstance(grads["lm_head.weight"], QuantizedTensor)
        assert isinstance(grads["blocks.0.mlp.down.weight"], QuantizedTensor)
