"""The guard beside what else a loop of one's own may do: wrappers, schedules, other optimizers, formats and values."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import ConfigError
from narrowgauge.optim import storage
from narrowgauge.train.guard import Guard
from narrowgauge.train.guard_decisions import Decision
from narrowgauge.train.sections import GuardConfig, LimitsConfig

F = ng.formats
NEVER = LimitsConfig(sqnr_drop_db=math.inf, flushed=1.0, saturated=1.0)
# nothing is judged but what a test asks for
QUIET: dict[str, Any] = {
    "mode": "act", "every": 1, "confirm": 1, "spike_floor": 1e6,
    **dict.fromkeys(("input", "weight", "grad_output", "exp_avg", "exp_avg_sq"), NEVER),
}  # fmt: skip
STRICT = LimitsConfig(sqnr_drop_db=0.001)  # which no cast keeps


def quiet(**fields: Any) -> GuardConfig:
    return GuardConfig(**(QUIET | fields))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def prepared(recipe: str | ng.Recipe, kind: Any = torch.optim.AdamW, **fields: Any) -> tuple[Any, Any]:
    model = mlp()
    if kind is ng.optim.Muon:
        for layer in (model[0], model[2], model[4]):
            layer.bias = None
    return ng.prepare(model, kind(model.parameters(), lr=1e-3, **fields), recipe)


def train(model: nn.Module, optimizer: Any, guard: Guard, steps: range, spread: float = 0.0) -> list[Decision]:
    told: list[Decision] = []
    for step in steps:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)) * torch.logspace(-spread, 0, 64)
        with guard.step(step):
            loss = (model(x) - x.flip(1)).float().square().mean()
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        told += guard.end(step, loss.item(), skipped=optimizer.step_was_skipped)
    return told


def casts(model: nn.Module, role: str) -> dict[str, str]:
    return {n: str(getattr(m.training_casts, role)) for n, m in model.named_modules() if hasattr(m, "training_casts")}  # type: ignore[union-attr]


def test_a_compiled_model_keeps_the_names_and_the_layers_own_casts() -> None:
    own = ng.CastSpec(F.E5M2)
    recipe = ng.recipe("fp8_current").for_layers("2", input=own)
    model, optimizer = prepared(recipe)
    compiled: Any = torch.compile(model, backend="eager")
    guard = Guard(compiled, optimizer, recipe, quiet(input=dataclasses.replace(NEVER, flushed=0.0)))
    (decision,) = train(compiled, optimizer, guard, range(1, 2), spread=8.0)
    assert (decision.action, decision.layer, decision.role) == ("promote", "0", "input")
    blocks = ng.CastSpec(F.E4M3FN, ng.Block(1, 32), ng.CURRENT_POW2)
    assert casts(model, "input") == {"0": str(blocks), "2": str(own), "4": str(ng.CastSpec(F.E4M3FN))}
    assert [row.name for row in ng.report(compiled)] == [row.name for row in ng.report(model)]
    assert "'0'" in ng.report(compiled)["0"].reason


def test_a_recipe_that_the_model_was_not_prepared_by_is_refused() -> None:
    """The first promotion would let all layers take it up."""
    model, optimizer = prepared("fp8_current")
    with pytest.raises(ConfigError, match="prepared by recipe 'mxfp8', found '0' by 'fp8_current'"):
        Guard(model, optimizer, "mxfp8", quiet())
    Guard(model, optimizer, "mxfp8", GuardConfig())  # off: it changes nothing
    later = ng.recipe("bf16").switch_at(1, "fp8_current")
    Guard(model, optimizer, later, quiet())  # in its second phase


def test_an_operand_in_float16_beyond_its_range_is_left_in_the_compute_dtype() -> None:
    half = ng.CastSpec(F.FP16)
    recipe = ng.recipe("bf16").replace(input=half, weight=half, grad_output=half)
    model, optimizer = prepared(recipe)
    model[2].register_forward_pre_hook(lambda _, args: (args[0] * 1e6,))
    model[2].register_forward_hook(lambda _, args, out: out / 1e6)
    guard = Guard(model, optimizer, recipe, quiet(input=LimitsConfig()))
    (decision,) = train(model, optimizer, guard, range(1, 5))
    assert (decision.layer, decision.role, decision.measure, decision.after) == (
        "2", "input", "saturated", "the compute dtype",
    )  # fmt: skip
    assert casts(model, "input") == {"0": "FP16", "2": "BF16", "4": "FP16"}


def test_what_is_in_the_compute_dtype_has_no_limit() -> None:
    recipe = ng.recipe("fp8_current").replace(weight=None, compute=F.FP16)
    model, optimizer = prepared(recipe)
    with torch.no_grad():
        model[2].weight *= 1e7  # beyond float16
    guard = Guard(model, optimizer, recipe, quiet(weight=LimitsConfig()))
    assert train(model, optimizer, guard, range(1, 3)) == []


def test_the_step_at_which_the_schedule_goes_on_is_not_held_against_the_next_recipes_casts() -> None:
    """E5M2 has 6 dB less than E4M3: what is as it should be in the one is in trouble by the other's limit."""
    first = ng.recipe("fp8_current").replace(name="first", input=ng.CastSpec(F.E5M2))
    recipe = first.switch_at(2, "fp8_current")
    model, optimizer = prepared(recipe)
    guard = Guard(model, optimizer, recipe, quiet(input=LimitsConfig(sqnr_drop_db=3.0)))
    assert train(model, optimizer, guard, range(1, 5)) == []
    assert guard.recipe.name == "fp8_current"


def test_a_way_back_before_a_switch_is_a_way_back_to_the_recipe_of_before() -> None:
    recipe = ng.recipe("fp8_current").switch_at(6, "fp8_rowwise")
    model, optimizer = prepared(recipe)
    states: dict[int, Any] = {}

    def go_back(since: int) -> int:
        model.load_state_dict(states["model"])  # type: ignore[index]
        optimizer.load_state_dict(states["optimizer"])  # type: ignore[index]
        return 4

    guard = Guard(model, optimizer, recipe, quiet(nonfinite=1, spike_patience=1), go_back=go_back)
    train(model, optimizer, guard, range(1, 5))
    states |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}  # type: ignore[dict-item]
    states = {key: {**value} for key, value in states.items()}
    train(model, optimizer, guard, range(5, 8))
    assert guard.recipe.name == "fp8_rowwise"
    told = guard.end(8, math.nan)
    assert [d.action for d in told] == ["promote", "rollback"]
    assert guard.recipe.name == "fp8_current" and not any(m.quantized for m in (model[0], model[2], model[4]))
    assert model[0].recipe.name == "fp8_current"


def test_moments_of_before_a_promotion_are_filled_again_after_a_way_back() -> None:
    model, optimizer = prepared("narrow8", betas=(0.9, 0.95))
    optimizer.override("2.weight", exp_avg_sq=ng.CastSpec(F.UINT8), keep_nonzero=False)
    weight, states = model[2].weight, {}

    def go_back(since: int) -> int:
        optimizer.load_state_dict(states["optimizer"])
        return 2

    guard = Guard(
        model, optimizer, "narrow8", quiet(nonfinite=1, exp_avg_sq=LimitsConfig(flushed=0.001), every=4, confirm=1),
        go_back=go_back,
    )  # fmt: skip
    train(model, optimizer, guard, range(1, 3))
    first, second = (storage.decode(optimizer.state[weight][name], weight.shape) for name in ("exp_avg", "exp_avg_sq"))
    assert int(((second == 0) & (first != 0)).sum()) > 100
    states["optimizer"] = copy.deepcopy(optimizer.state_dict())
    assert [d.action for d in train(model, optimizer, guard, range(3, 5))] == ["promote"]
    assert [d.action for d in guard.end(5, math.nan)] == ["promote", "rollback"]
    first, second = (storage.decode(optimizer.state[weight][name], weight.shape) for name in ("exp_avg", "exp_avg_sq"))
    assert int(((second == 0) & (first != 0)).sum()) == 0


def test_a_layer_that_has_not_run_is_not_calm() -> None:
    model, optimizer = prepared("fp8_delayed")
    guard = Guard(model, optimizer, "fp8_delayed", quiet(input=LimitsConfig(), calm=2))
    flushed, calm = ({"2": {"input": {"amax": 1.0, "flushed": share, "saturated": 0.0}}} for share in (1.0, 0.0))
    assert [d.action for d in guard.end(1, 1.0, layers=flushed)] == ["promote"]
    for step in range(2, 12):
        assert guard.end(step, 1.0, layers={}) == []  # nothing was measured of the wider cast
    assert guard.end(12, 1.0, layers=calm) == []
    assert [d.action for d in guard.end(13, 1.0, layers=calm)] == ["demote"]


def test_a_role_goes_as_far_as_there_is_a_wider_cast_and_no_further() -> None:
    for recipe in ("fp8_delayed", "nvfp4", "fp8_block", "mxfp8"):
        model, optimizer = prepared(recipe)
        guard = Guard(model, optimizer, recipe, quiet(**dict.fromkeys(ng.recipes.roles.OPERAND_ROLES, LimitsConfig())))
        bad = {"2": dict.fromkeys(ng.recipes.roles.OPERAND_ROLES, {"amax": 1.0, "flushed": 1.0, "sqnr_db": 0.0})}
        told = [d for step in range(1, 12) for d in guard.end(step, 1.0, layers=bad)]
        assert {role: str(getattr(model[2].training_casts, role)) for role in bad["2"]} == dict.fromkeys(
            bad["2"], "BF16"
        )
        assert [d.after for d in told if d.role == "weight"][-1] == "the compute dtype"
        assert ng.report(model)["2"].backend == ng.report(ng.prepare(mlp(), None, "bf16")[0])["2"].backend
        train(model, optimizer, guard, range(12, 13))


@pytest.mark.parametrize("kind", ["Lion", "Muon", "SGD"])
def test_a_limit_of_first_moments_acts_whoever_else_looks(kind: str) -> None:
    """Those of companded formats are measured only where there is a limit for them."""
    fields = {"momentum": 0.9} if kind == "SGD" else {}
    found = []
    for every in (0, 1):
        model, optimizer = prepared("narrow8", getattr(ng.optim, kind), **fields)
        guard = Guard(model, optimizer, "narrow8", quiet(exp_avg=dataclasses.replace(NEVER, flushed=0.0)))
        with ng.observe.Observation(model, optimizer, every=every).step(1):
            told = train(model, optimizer, guard, range(1, 3), spread=8.0)
        found.append(told)
    assert found[0] == found[1]
    assert [(d.step, d.layer, d.role, d.after) for d in found[0]][0] == (1, "0", "exp_avg", "BF16")
    assert found[0][0].value > 0.05 and "non-zero values become zero" in found[0][0].message
    state = optimizer.state[model[0].weight]
    assert state["exp_avg" if kind == "Lion" else "momentum_buffer"].dtype is torch.bfloat16


class Wrapped:
    """As accelerate wraps an optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def test_moments_of_an_optimizer_that_is_wrapped_are_watched() -> None:
    model, optimizer = prepared("narrow8")
    optimizer.override("2.weight", exp_avg_sq=ng.CastSpec(F.UINT8), keep_nonzero=False)
    wrapper: Any = Wrapped(optimizer)
    guard = Guard(model, wrapper, "narrow8", quiet(exp_avg_sq=LimitsConfig(flushed=0.001)))
    told = train(model, optimizer, guard, range(1, 2))
    assert [(d.layer, d.role) for d in told] == [("2", "exp_avg_sq")]


def test_a_run_that_is_taken_twice_is_told_twice_alike() -> None:
    runs = []
    for _ in range(2):
        model, optimizer = prepared("nvfp4")
        guard = Guard(model, optimizer, "nvfp4", quiet(input=STRICT, weight=STRICT, grad_output=STRICT))
        told = train(model, optimizer, guard, range(1, 6))
        runs.append((told, guard.state_dict(), [p.detach().clone() for p in model.parameters()]))
    assert runs[0][:2] == runs[1][:2] and all(map(torch.equal, runs[0][2], runs[1][2]))
    assert len(runs[0][0]) > 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"every": 2.5}, "guard.every=2.5: expected a whole number from 1 to 2147483647"),
        ({"every": "25"}, "guard.every='25': expected a whole number"),
        ({"every": True}, "guard.every=True: expected a whole number"),
        ({"confirm": math.inf}, "guard.confirm=inf: expected a whole number"),
        ({"calm": 1e9}, "guard.calm=1000000000.0: expected a whole number"),
        ({"leave_out": 10**30}, "expected a whole number from 0 to 2147483647"),
        ({"spike_window": 10**30}, "expected a whole number from 1 to 2147483647"),
        ({"rollbacks": math.nan}, "guard.rollbacks=nan: expected a whole number from 0"),
        ({"spike_floor": "x"}, "guard.spike_floor='x': expected more than 0"),
        ({"spike_spreads": math.nan}, "guard.spike_spreads=nan: expected more than 0"),
        ({"input": {"flushed": 0.1}}, r"guard.input={'flushed': 0.1}: expected LimitsConfig\(...\)"),
        ({"exp_avg": None}, r"guard.exp_avg=None: expected LimitsConfig\(...\)"),
        ({"input": LimitsConfig(flushed="a")}, "guard.input.flushed='a': expected a share"),  # type: ignore[arg-type]
        ({"input": LimitsConfig(saturated=math.nan)}, "guard.input.saturated=nan: expected a share"),
        ({"input": LimitsConfig(sqnr_drop_db=math.nan)}, "guard.input.sqnr_drop_db=nan: expected decibels"),
        ({"mode": None}, "guard.mode=None: expected off, warn, act"),
    ],
)
def test_values_that_make_no_sense_are_refused_before_a_step(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GuardConfig(**fields).check()
