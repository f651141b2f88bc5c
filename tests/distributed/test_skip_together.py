"""Gradients that are bad on one rank: all ranks skip, count, scale and end alike."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run as run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import narrowgauge as ng
from narrowgauge.distributed import wire
from narrowgauge.distributed.layout import GroupReducer, attach, layout
from narrowgauge.errors import DivergenceError
from narrowgauge.ops.reduce import agreed_text, any_of
from narrowgauge.optim.guard import StepGuard
from narrowgauge.tensors.local import as_part_of, local
from narrowgauge.tensors.quantized import QuantizedTensor, quantize

pytestmark = pytest.mark.multiproc
run = partial(run_ranks, timeout_s=300)
ROWS, COLUMNS = 64, 128


def _model(layers: int = 2) -> nn.Module:
    """Linear layers whose weights are parted by rows: nothing runs them, their gradients are given."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    model = nn.ModuleList(nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(layers))
    for at, layer in enumerate(model):
        values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(at))
        layer.weight = nn.Parameter(distribute_tensor(values, mesh, [Shard(0)]))
    return model


def _set_gradients(model: nn.Module, recipe: Any, bad: str = "", factor: float = 1.0) -> None:
    """Gradients as the recipe keeps them; that of the parameter `bad` holds an infinity on the last rank."""
    for at, (name, p) in enumerate(model.named_parameters()):
        grad = torch.randn(local(p).shape, generator=torch.Generator().manual_seed(50 + at)) * factor
        if name == bad and dist.get_rank() == dist.get_world_size() - 1:
            grad[0, 0] = math.inf
        p.grad = as_part_of(
            p, quantize(grad, recipe.grad) if recipe.grad.is_scaled else grad.to(p.grad_dtype or p.dtype)
        )


def _state(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Copies of all that a step writes."""
    tensors = [local(p).detach() for p in model.parameters()]
    for p in optimizer.parameters():
        tensors += [value for value in optimizer.state.get(p, {}).values() if isinstance(value, Tensor)]
    return [t.dequantize().clone() if isinstance(t, QuantizedTensor) else t.clone() for t in tensors]


def _skips(recipe_name: str, offload: str | None) -> dict[str, Any]:
    """A good step, one that is bad on the last rank, and a good one."""
    recipe = ng.recipe(recipe_name)
    model = _model()
    model, optimizer = ng.prepare(
        model, ng.optim.AdamW(model.parameters(), lr=0.01), recipe, autocast=False, offload=offload
    )
    skipped, same, norms = [], [], []
    for step in range(3):
        _set_gradients(model, recipe, bad="1.weight" if step == 1 else "")
        before = _state(model, optimizer)
        norms.append(float(ng.clip_grad_norm_(model.parameters(), 1.0)))
        with wire.counted() as count:
            optimizer.step()
        skipped.append(optimizer.step_was_skipped)  # type: ignore[attr-defined]
        after = _state(model, optimizer)
        same.append(len(before) == len(after) and all(map(torch.equal, before, after)))
        assert [(row.collective, row.calls) for row in count.rows] == [("all_reduce", 1)]  # one decision
        assert all(p.grad is None for p in model.parameters()) or step != 1
    guard = StepGuard.on(optimizer)
    assert guard is not None
    counts = [optimizer.state[p]["step"] for p in optimizer.parameters()]  # type: ignore[attr-defined]
    return {"skipped": skipped, "same": same, "steps": guard.steps, "counts": counts, "norms": norms}


@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize("recipe", ["narrow8", "fp8_lm_o2", "bf16_pure"])
def test_all_skip_where_one_has_a_bad_gradient(recipe: str, offload: str | None) -> None:  # case 80
    for found in run(2, _skips, recipe, offload):
        assert found["skipped"] == [False, True, False]
        assert found["same"] == [False, True, False]
        assert found["steps"] == 3 and found["counts"] == [2, 2]
        assert math.isinf(found["norms"][1]) and math.isfinite(found["norms"][0])


def _scaled(offload: str | None) -> dict[str, Any]:
    """Loss scaling: infinities in the shard of one rank alone."""
    recipe = ng.recipe("fp8_lm_o2").replace(compute=ng.formats.FP16)
    model = _model()
    model, optimizer = ng.prepare(
        model, ng.optim.AdamW(model.parameters(), lr=0.01), recipe, autocast=False, offload=offload
    )
    scaler = ng.LossScaler(recipe, "cpu", init_scale=2.0**10, growth_interval=1000)
    scales, skipped, first = [], [], []
    for step in range(3):
        scaler.scale(torch.ones(()))  # torch makes the scale at its first use
        _set_gradients(model, recipe, bad="0.weight" if step == 1 else "", factor=scaler.get_scale())
        scaler.unscale_(optimizer)
        grad = local(next(model.parameters()).grad)  # type: ignore[arg-type]
        first.append(float(grad.dequantize().abs().amax()) if step != 1 else 0.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        skipped.append(optimizer.step_was_skipped)  # type: ignore[attr-defined]
    return {"scales": scales, "skipped": skipped, "first": first}


@pytest.mark.parametrize("offload", [None, "cpu"])
def test_the_loss_scale_is_halved_once_on_all_ranks(offload: str | None) -> None:  # case 80
    found = run(2, _scaled, offload)
    assert found[0]["scales"] == found[1]["scales"] == [1024.0, 512.0, 512.0]
    assert found[0]["skipped"] == found[1]["skipped"] == [False, True, False]
    for result in found:  # the gradient of the third step is that of the first: both were unscaled
        first, _, third = result["first"]
        assert first == pytest.approx(third, rel=0.07) and 1 < first < 10


def _diverges() -> str:
    recipe = ng.recipe("narrow8")
    model = _model(3)
    model, optimizer = ng.prepare(model, ng.optim.AdamW(model.parameters()), recipe, autocast=False, max_skips=2)
    try:
        for _ in range(2):
            _set_gradients(model, recipe, bad="2.weight")
            optimizer.step()
    except DivergenceError as error:
        return str(error)
    return ""


def test_a_run_of_skips_ends_on_all_ranks_with_the_name_that_one_of_them_knows() -> None:
    first, second = run(2, _diverges)
    assert first == second and "'2.weight'" in first and "step 2" in first


def _released(max_norm: float | None) -> dict[str, Any]:
    """Gradient release: a part that is bad on one rank leaves all parts of its parameter as they were."""
    recipe = ng.recipe("narrow8")
    model = _model()
    model, optimizer = ng.prepare(model, ng.optim.AdamW(model.parameters(), lr=0.01), recipe, autocast=False)
    release = ng.optim.release_gradients(optimizer, max_norm)
    skipped, moved, norms = [], [], []
    for step in range(3):
        before = [local(p).detach().clone() for p in model.parameters()]
        _set_gradients(model, recipe, bad="1.weight" if step == 1 else "")
        for p in model.parameters():  # as backward does
            release.release(p)
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)  # type: ignore[attr-defined]
        moved.append([not torch.equal(b, local(p)) for b, p in zip(before, model.parameters(), strict=True)])
        norms.append(None if release.previous_norm is None else float(release.previous_norm))
    return {"skipped": skipped, "moved": moved, "norms": norms}


def test_released_gradients_are_stepped_in_all_parts_or_none() -> None:
    for found in run(2, _released, None):
        assert found["skipped"] == [False, True, False]
        assert found["moved"] == [[True, True], [True, False], [True, True]]


def test_the_norm_of_released_gradients_is_that_of_all_parts() -> None:
    whole = [torch.randn(ROWS // 2, COLUMNS, generator=torch.Generator().manual_seed(50 + at)) for at in (0, 1)]
    expected = math.sqrt(2 * sum(float(part.double().square().sum()) for part in whole))  # both ranks have these
    for found in run(2, _released, 1.0):
        first, second, third = found["norms"]
        assert first == second == third == pytest.approx(expected, rel=1e-2)


def _agreements() -> tuple[list[bool], list[str]]:
    rank, reducer = dist.get_rank(), GroupReducer(None)
    flags = [any_of(flag, reducer, "cpu") for flag in (False, rank == 1, True)]
    texts = [
        agreed_text(text, reducer, "cpu") for text in ("", "größe" if rank == 2 else "", f"name {rank}", "x" * 300)
    ]
    return flags, texts


def test_flags_and_names_are_the_same_on_all_ranks() -> None:
    found = run(3, _agreements)
    assert found[0] == found[1] == found[2]
    flags, texts = found[0]
    assert flags == [False, True, True]
    assert texts[:2] == ["", "größe"] and texts[2] in ("name 0", "name 1", "name 2") and texts[3] == "x" * 256


def _pipeline_without_gradients() -> tuple[bool, bool]:
    """A stage that has no gradient at all takes part in every decision."""
    found = layout(pipeline=2)
    model = nn.Linear(64, 64, bias=False)
    attach(model, found)
    recipe = ng.recipe("fp16")
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters()), recipe, autocast=False)
    scaler = ng.LossScaler(recipe, "cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    if found.rank("pipeline") == 1:
        model.weight.grad = torch.full((64, 64), math.inf)
    scaler.step(optimizer)
    scaler.update()
    return optimizer.step_was_skipped, scaler.get_scale() == 2.0  # type: ignore[attr-defined]


def test_a_stage_without_gradients_decides_with_the_others() -> None:
    assert run(2, _pipeline_without_gradients) == [(True, True)] * 2
