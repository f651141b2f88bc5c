"""What the guard keeps over a resumption and a switch, when it asks for a closer look, and what it does not try."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.numerics.rounding import NONZERO
from narrowgauge.optim import storage
from narrowgauge.train.guard import Guard
from narrowgauge.train.guard_apply import Moments
from narrowgauge.train.guard_samples import samples_of
from narrowgauge.train.sections import GuardConfig, LimitsConfig

F = ng.formats
NEVER = LimitsConfig(sqnr_drop_db=math.inf, flushed=1.0, saturated=1.0)
QUIET: dict[str, Any] = {
    "mode": "act", "every": 1, "confirm": 1, "spike_floor": 1e6,
    **dict.fromkeys(("input", "weight", "grad_output", "exp_avg", "exp_avg_sq"), NEVER),
}  # fmt: skip
V = "exp_avg_sq"


def prepared(recipe: str | ng.Recipe) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    return ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe)


def train(model: nn.Module, optimizer: Any, guard: Guard, steps: range) -> list[tuple[int, str, str | None]]:
    told = []
    for step in steps:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        with guard.step(step):
            loss = (model(x) - x.flip(1)).float().square().mean()
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        told += [(d.step, d.action, d.layer) for d in guard.end(step, loss.item())]
    return told


def test_a_run_that_is_resumed_while_all_is_wide_begins_its_histories_as_one_that_was_not() -> None:
    """Operands in the compute dtype have no samples: what a history begins with was seen before that."""
    runs = []
    for is_resumed in (False, True):
        model, optimizer = prepared("fp8_delayed")
        config = GuardConfig(**QUIET | {"nonfinite": 1, "rollbacks": 0, "calm": 2})
        guard = Guard(model, optimizer, "fp8_delayed", config)
        train(model, optimizer, guard, range(1, 4))
        seen = {(layer, role): amax for layer, role, amax in guard.state_dict()["amax"]}
        assert [d.action for d in guard.end(4, math.nan)] == ["promote", "warn"]
        if is_resumed:
            kept = json.loads(json.dumps(guard.state_dict())), model.state_dict(), copy.deepcopy(optimizer.state_dict())
            model, optimizer = prepared("fp8_delayed")
            guard = Guard(model, optimizer, "fp8_delayed", config)
            model.load_state_dict(kept[1], strict=False)  # a wide layer has no histories
            optimizer.load_state_dict(kept[2])
            assert guard.load_state_dict(kept[0]) is False
        assert train(model, optimizer, guard, range(5, 8)) == [(7, "demote", None)]
        for name, role in (("0", "input"), ("2", "weight")):
            layer = model.get_submodule(name)
            assert layer.get_buffer(role + "_amax_history")[..., -1] == seen[name, role]
            assert layer.get_buffer(role + "_quant_scale") == torch.tensor(448.0) / torch.tensor(seen[name, role])
        train(model, optimizer, guard, range(8, 10))
        runs.append([*model.state_dict().values()])
    assert len(runs[0]) == len(runs[1]) and all(map(torch.equal, *runs))


def test_moments_stay_as_they_were_widened_where_the_schedule_goes_on() -> None:
    other = ng.recipe("narrow8").replace(name="other", input=ng.CastSpec(F.E5M2))
    recipe = ng.recipe("narrow8").switch_at(3, other)
    model, optimizer = prepared(recipe)
    optimizer.override("2.weight", exp_avg_sq=ng.CastSpec(F.UINT4), keep_nonzero=False)
    config = GuardConfig(**QUIET | {V: LimitsConfig(flushed=0.001), "calm": 1000})
    guard = Guard(model, optimizer, recipe, config)
    assert train(model, optimizer, guard, range(1, 6)) == [(1, "promote", "2")]
    assert guard.recipe.name == "other" and guard.state_dict()["phase"] == 1
    assert [key[:2] for key in guard.state_dict()["casts"]] == [["2", V]]
    (standing,) = guard.state_dict()["standings"]
    assert standing[:2] == ["2", V] and len(standing[2]["climbed"]) == 1


@pytest.mark.parametrize(("share", "is_tried"), [(0.008, True), (0.012, False), (0.09, False)])
def test_a_moment_is_narrowed_again_where_that_would_flush_a_tenth_of_the_limit_at_most(
    share: float, is_tried: bool
) -> None:
    model, optimizer = prepared("narrow8")
    weight = model[2].weight
    optimizer.override("2.weight", exp_avg_sq=ng.CastSpec(F.UINT8), keep_nonzero=False)
    guard = Guard(model, optimizer, "narrow8", GuardConfig(**QUIET | {V: LimitsConfig(flushed=0.1), "calm": 1}))
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    state = optimizer.state[weight]
    second = torch.ones(64, 64)
    second.view(-1)[: round(64 * 64 * 0.2)] = 1e-9  # which UINT8 with one scale has not
    storage.overwrite(state["exp_avg"], torch.ones(64, 64))
    storage.overwrite(state[V], second)
    assert [d.action for d in guard.end(2, 1.0, layers={})] == ["promote"]
    second.view(-1)[round(64 * 64 * share) :] = 1.0
    storage.overwrite(state[V], second)
    found = [d.action for d in guard.end(3, 1.0, layers={})]
    assert found == (["demote"] if is_tried else [])


def test_losses_in_trouble_and_the_steps_around_them_after_a_way_back_are_looked_at() -> None:
    model, optimizer = prepared("fp8_current")
    config = GuardConfig(**QUIET | {"every": 1000, "nonfinite": 3, "confirm": 2})
    guard = Guard(model, optimizer, "fp8_current", config, go_back=lambda since: since - 1)
    guard.end(50, 1.0)
    assert not guard.due(51)
    guard.end(51, math.nan)
    assert guard.due(52)
    guard.end(52, 1.0)
    assert not guard.due(53)
    for step in (53, 54, 55):
        guard.end(step, math.nan)
    # back to step 52: from four steps before the first that was not finite to the last of them
    assert [step for step in range(40, 70) if guard.due(step)] == list(range(49, 56))


def test_zeros_of_a_moment_are_those_that_the_first_one_denies_also_where_another_process_keeps_it() -> None:
    """A shard's second moments are known from its own process: of the others' measure all zeros count."""
    model, optimizer = prepared("narrow8")
    spec = ng.CastSpec(F.UINT8, rounding=NONZERO)
    optimizer.override("2.weight", exp_avg_sq=spec)
    layers = {"2": {V: {"flushed": 0.9, "sqnr_db": 30.0}}}
    guard = Moments(optimizer, model)
    assert guard.lost(model[2].weight) is None  # no step has been taken here
    found = samples_of(model, guard, layers, {}, weighs_moments=True)["2", V]
    assert found.measures.get("flushed", 0.0) == 0.0 and found.measures["sqnr_db"] == 30.0
    optimizer.override("2.weight", exp_avg_sq=ng.CastSpec(F.UINT8), keep_nonzero=False)
    assert dict(samples_of(model, guard, layers, {}, weighs_moments=True)["2", V].measures) == {"sqnr_db": 30.0}
    assert dict(samples_of(model, guard, layers, {}, weighs_moments=False)["2", V].measures) == {}
