"""Sharded models in the situations that have broken other libraries."""

from __future__ import annotations

import functools
import gc
import warnings
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from models import batch, tiny_gpt
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.nn import functional as F

import narrowgauge as ng
from narrowgauge.distributed.layout import layout
from narrowgauge.distributed.sharding import shard
from narrowgauge.distributed.tensor_parallel import parallelize_tensor
from narrowgauge.distributed.wire import CONTROL, counted
from narrowgauge.errors import ConfigError, ConversionError, NarrowgaugeError, RecipeError
from narrowgauge.layers.linear import Linear
from narrowgauge.layers.norm import RMSNorm
from narrowgauge.recipes.casts import WIRE
from narrowgauge.tensors.cast import cast_operand
from narrowgauge.tensors.local import local
from narrowgauge.tensors.quantized import QuantizedTensor

pytestmark = pytest.mark.multiproc
run = functools.partial(ranks.run, timeout_s=240.0)  # the first call may compile kernels
FP32 = ng.CastSpec(ng.formats.FP32)


def _prepared(model: nn.Module, recipe: Any = "narrow8") -> tuple[nn.Module, torch.optim.Optimizer]:
    return ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe)


def _mlp(width: int = 64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, width))


# case 80


def _overflow(offloads: bool, in_shard: bool) -> tuple[list[bool], list[float], list[float]]:
    policy = CPUOffloadPolicy(pin_memory=False) if offloads else OffloadPolicy()
    model = fully_shard(_mlp(), offload_policy=policy)
    recipe = ng.recipe("fp8_lm_o2").replace(compute=ng.formats.FP16)
    model, optimizer = _prepared(model, recipe)
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
            model, optimizer = _prepared(model)  # type: ignore[assignment]
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
    model, _ = _prepared(model)  # type: ignore[assignment]
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
    model, optimizer = _prepared(model)  # type: ignore[assignment]

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


# shapes


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
        model, optimizer = _prepared(model, recipe)
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
    model = shard(_Stack(), layout(shard=2))
    model, _ = _prepared(model)
    x = torch.randn(8, 64)
    model(x).float().square().mean().backward()
    once = [_values(local(p.grad)) for p in model.parameters()]  # type: ignore[arg-type]
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


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


def _values(x: Tensor) -> Tensor:
    return x.dequantize(torch.float32) if isinstance(x, QuantizedTensor) else x.clone()


def test_a_second_backward_adds_wide_values() -> None:
    for close, said, is_quantized in run(2, _accumulated):
        assert all(close) and said == 1
        assert is_quantized == [True, False] * 2


# what is stored, and who asks for it


def _stored(name: str) -> list[tuple[type, torch.dtype, torch.dtype]]:
    model, _ = _prepared(shard(tiny_gpt(), layout(shard=2)), name)
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
    model, optimizer = _prepared(model)  # type: ignore[assignment]
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
    model, _ = _prepared(shard(_Stack(), layout(shard=2)))
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
    model, optimizer = _prepared(shard(_Stack(), layout(shard=2)), first.switch_at(2, late))
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
        model, _ = _prepared(model, recipe)  # type: ignore[assignment]
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


def _refusals() -> dict[str, str]:
    def message(call: Any) -> str:
        try:
            call()
        except NarrowgaugeError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    world = layout(shard=4)
    own = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "shard"))
    gathered = fully_shard(_mlp())
    gathered.unshard()
    stochastic = ng.CastSpec(ng.formats.E4M3FN, WIRE.granularity, WIRE.scale, rounding=ng.STOCHASTIC)
    return {
        "no shards": message(lambda: shard(_mlp(), layout(data=4))),
        "no module": message(lambda: shard(3, world)),  # type: ignore[arg-type]
        "offload": message(lambda: shard(_mlp(), world, offload="disk")),
        "two dimensions": message(lambda: _prepared(fully_shard(_mlp(), mesh=own))),
        "fewer ranks": message(
            lambda: _prepared(fully_shard(_mlp(), mesh=world.mesh["shard"], reshard_after_forward=2))
        ),
        "gathered": message(lambda: _prepared(gathered)),
        "stochastic": message(
            lambda: _prepared(fully_shard(_mlp()), ng.recipe("narrow8").replace(param_comm=stochastic))
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


def _wide(name: str) -> set[tuple[str, torch.dtype]]:
    model, _ = _prepared(shard(_Stack(), layout(shard=2)), name)
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
