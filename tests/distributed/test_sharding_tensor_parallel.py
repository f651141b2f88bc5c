"""Shards of tensor-parallel layers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import ranks
import torch
from models import batch, tiny_gpt
from sharded import prepared
from torch import Tensor

import narrowgauge as ng
from narrowgauge.distributed.layout import layout
from narrowgauge.distributed.sharding import shard
from narrowgauge.distributed.tensor_parallel import parallelize_tensor
from narrowgauge.layers.linear import Linear
from narrowgauge.tensors.cast import cast_operand
from narrowgauge.tensors.local import local

pytestmark = pytest.mark.multiproc
run = functools.partial(ranks.run, timeout_s=300)  # the first call may compile kernels


def _with_tensor_parallel() -> list[tuple[bool, float, float]]:
    recipe = ng.recipe("narrow8").replace(activation_comm=ng.CastSpec(ng.formats.BF16))
    codes: list[dict[str, tuple[Tensor, Tensor]]] = []
    losses = []
    for spread in (True, False):
        model = tiny_gpt()
        if spread:
            over = layout(shard=2, tensor=2)
            parallelize_tensor(model, over)
            shard(model, over)
        model, _ = prepared(model, recipe)  # type: ignore[assignment]
        seen: dict[str, tuple[Tensor, Tensor]] = {}

        def look(layer: Linear, args: Any, seen: dict[str, tuple[Tensor, Tensor]] = seen) -> None:
            done = cast_operand(
                local(layer.weight).detach(), layer.training_casts.weight, keep_codes=True, carrier=None
            )
            assert done.codes is not None and done.dequant_scale is not None
            seen[layer.name_in_test] = done.codes.view(torch.uint8).clone(), done.dequant_scale

        for name, layer in model.named_modules():
            if isinstance(layer, Linear) and layer.quantized:
                layer.name_in_test = name  # type: ignore[assignment]
                layer.register_forward_pre_hook(look)  # type: ignore[arg-type]
        loss = model(*batch(0))[1]
        loss.backward()
        losses.append(loss.item())
        codes.append(seen)
    place = over.rank("tensor")
    same = []
    for name, (whole, scale) in codes[1].items():
        part, scale_of_part = codes[0][name]
        along = 1 if part.shape[1] < whole.shape[1] else 0
        if "qkv" in name or "gate" in name:  # its rows are dealt by heads or halves
            expected = part
            assert set(part.unique().tolist()) <= set(whole.unique().tolist())
        else:
            expected = whole.chunk(2, along)[place]
        same.append(torch.equal(part, expected) and torch.equal(scale, scale_of_part))
    return [(all(same), *losses)]  # type: ignore[list-item]


def test_shards_of_tensor_parallel_weights_have_the_scale_of_the_whole() -> None:
    for ((same, spread, alone),) in run(4, _with_tensor_parallel):
        assert same
        # embedding and head travel in E4M3: a relative error of at most 2^-4 in each term of a logit
        assert abs(spread - alone) < 0.05
