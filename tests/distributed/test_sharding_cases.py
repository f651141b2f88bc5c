"""Sharded models in the situations that have broken other libraries."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from sharded import mlp, prepared
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.nn import functional as F

import narrowgauge as ng
from narrowgauge.distributed.layout import layout
from narrowgauge.distributed.sharding import shard
from narrowgauge.tensors.local import local

pytestmark = pytest.mark.multiproc
run = functools.partial(ranks.run, timeout_s=300)  # the first call may compile kernels


# case 80


def _overflow(offloads: bool, in_shard: bool) -> tuple[list[bool], list[float], list[float]]:
    policy = CPUOffloadPolicy(pin_memory=False) if offloads else OffloadPolicy()
    model = fully_shard(mlp(), offload_policy=policy)
    recipe = ng.recipe("fp8_lm_o2").replace(compute=ng.formats.FP16)
    model, optimizer = prepared(model, recipe)
    scaler = ng.LossScaler(recipe, init_scale=2.0**10, growth_interval=1000)
    skipped, scales = [], []
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    for step in range(3):
        overflows = step == 1 and dist.get_rank() == 0
        scaled = x * (torch.inf if overflows and not in_shard else 1.0)
        scaler.scale(model(scaled).square().mean()).backward()
        if overflows and in_shard:
            grad = local(next(p.grad for p in model.parameters() if p.grad is not None))
            grad.copy_(torch.full(grad.shape, torch.inf))
        scaler.step(optimizer)
        skipped.append(bool(optimizer.step_was_skipped))  # type: ignore[attr-defined]
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    whole = [p.full_tensor().double().sum().item() for p in model.parameters()]  # type: ignore[attr-defined]
    return skipped, scales, whole


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("in_shard", [False, True])
def test_an_overflow_on_one_rank_skips_the_step_of_all(offloads: bool, in_shard: bool) -> None:
    """Case 80."""
    first, second = run(2, _overflow, offloads, in_shard)
    assert first == second
    assert first[0] == [False, True, False] and first[1] == [1024.0, 512.0, 512.0]


# case 86


class _Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(64, 64)
        self.linear = nn.Linear(64, 128)
        self.norm = nn.BatchNorm1d(128)
        self.head = nn.Linear(128, 64)
        self.register_buffer("table", torch.linspace(0.0, 1.0, 64) + 2.0**-20)
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    def forward(self, ids: Tensor) -> Tensor:
        self.seen.append((ids.dtype, self.table.dtype))
        return self.head(self.norm(self.linear(self.embedding(ids) + self.table)))


def _buffers() -> tuple[dict[str, Tensor], dict[str, Tensor], list[Any], Tensor]:
    found = []
    for sharded in (True, False):
        model = _Mixed()
        table = model.table.clone()
        if sharded:
            fully_shard(model.linear)
            fully_shard(model)
            model, optimizer = prepared(model)  # type: ignore[assignment]
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            ids = torch.randint(64, (256,), generator=torch.Generator().manual_seed(step))
            F.mse_loss(model(ids).float(), torch.ones(256, 64)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(({name: buffer.clone() for name, buffer in model.named_buffers()}, model.seen, table))
    return found[0][0], found[1][0], found[0][1], found[0][2]


def test_buffers_and_integer_inputs_stay_what_they_are() -> None:
    """Case 86."""
    for sharded, alone, seen, table in run(2, _buffers):
        assert seen == [(torch.int64, torch.float32)] * 3
        assert torch.equal(sharded["table"], table)
        assert sharded["norm.num_batches_tracked"] == 3
        for name in ("norm.running_mean", "norm.running_var"):
            assert sharded[name].dtype is torch.float32
            # three updates by a tenth of statistics whose terms have FP8's relative error, 2^-4 at most
            torch.testing.assert_close(sharded[name], alone[name], rtol=2.0**-4, atol=0.02)


# case 87


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor, cosines: Tensor, positions: Tensor, *, scale: Tensor) -> Tensor:
        self.seen = {"cosines": cosines, "positions": positions, "scale": scale}
        return self.linear(x) * scale.to(x.dtype)


class _Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))

    def forward(self, x: Tensor, cosines: Tensor, positions: Tensor, *, scale: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, cosines, positions, scale=scale)
        return x


def _side_inputs(own: bool) -> tuple[bool, bool]:
    model = _Root()
    if own:
        fully_shard(model.blocks[0])
        fully_shard(model.blocks[1])
        fully_shard(model)
    else:
        shard(model, layout(shard=2))
    model, _ = prepared(model)  # type: ignore[assignment]
    given = {
        "cosines": torch.cos(torch.arange(64.0)) + 2.0**-20,
        "positions": torch.arange(64),
        "scale": torch.tensor(1.0 + 2.0**-20),
    }
    x = torch.randn(4, 64)
    out = model(x, given["cosines"], given["positions"], scale=given["scale"])
    seen = [block.seen[name] for block in model.blocks for name in given]  # type: ignore[union-attr,operator]
    same = all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(seen, list(given.values()) * 2, strict=True))
    return same, out.dtype is torch.bfloat16


@pytest.mark.parametrize("own", [False, True])
def test_side_inputs_are_not_cast(own: bool) -> None:
    """Case 87: only what a layer multiplies is cast; tables, positions and keyword arguments arrive as they were."""
    assert run(2, _side_inputs, own) == [(True, True)] * 2


# case 89


def _live_codes() -> list[list[int]]:
    torch.manual_seed(3)
    model = nn.Sequential()
    model.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(x: Tensor) -> Tensor:
        for layer in model.layers:  # type: ignore[union-attr]
            x = F.relu(layer(x))
        return x

    model.forward = forward  # type: ignore[method-assign]
    shard(model, layout(shard=2))
    model, optimizer = prepared(model)  # type: ignore[assignment]

    def live() -> int:
        gc.collect()
        storages = {}
        for tensor in gc.get_objects():
            if type(tensor) in (Tensor, nn.Parameter) and tensor.dtype in (torch.float8_e4m3fn, torch.uint8):
                storage = tensor.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
        return sum(storages.values())

    found = []
    x = torch.randn(8, 64)
    for _ in range(5):
        with torch.no_grad():
            model(x)
        free = live()
        loss = model(x).square().mean()
        counts = [free, live()]
        loss.backward()
        counts.append(live())
        optimizer.step()
        optimizer.zero_grad()
        counts.append(live())
        found.append(counts)
    return found


def test_gathered_codes_are_freed() -> None:
    """Case 89."""
    layer = 64 * 64
    for steps in run(2, _live_codes):
        settled = steps[1:]  # the optimizer makes its state at the first step
        assert all(counts == settled[0] for counts in settled), steps
        without_grad, after_forward, after_backward, after_step = settled[0]
        gathered = 2 * layer  # at most two layers' weights
        assert after_step == 8 * layer // 2  # this rank's second moments, of uint8
        assert without_grad - after_step <= gathered
        # inputs that wait for backward, 8 of 8 x 64, and at most two layers' weights
        assert 8 * 8 * 64 <= after_forward - after_step <= 8 * 8 * 64 + gathered
        # gradients in 8 bits, this rank's halves
        assert after_backward - after_step == 8 * layer // 2
