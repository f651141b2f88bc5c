"""The guard in a loop of one's own: what it changes, what it leaves alone, and that it goes on where it was."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.optim import storage
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.train.guard import Guard
from narrowgauge.train.guard_apply import Moments
from narrowgauge.train.guard_decisions import Decision
from narrowgauge.train.sections import GuardConfig

F = ng.formats
E4M3, BLOCKS = ng.CastSpec(F.E4M3FN), ng.CastSpec(F.E4M3FN, ng.Block(1, 32), ng.CURRENT_POW2)
ACT = GuardConfig(mode="act", every=4, calm=2)


class Run:
    """A small regression under a guard. before: called before each step's forward, with the step."""

    def __init__(self, recipe: str | ng.Recipe, config: GuardConfig, before: Callable[[Run, int], None] | None = None):
        generator = torch.Generator().manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 8)
        self.before, self.last, self.spread = before, 0, 1.0
        self.model, self.optimizer = ng.prepare(self.model, torch.optim.AdamW(self.model.parameters(), lr=1e-3), recipe)
        self.guard = Guard(self.model, self.optimizer, recipe, config)
        self.decisions: list[Decision] = []
        self.losses: list[float] = []

    def go_to(self, steps: int) -> Run:
        for step in range(self.last + 1, steps + 1):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
            if self.before is not None:
                self.before(self, step)
            with self.guard.step(step):
                loss = (self.model(x) - self.spread * x.flip(1)).float().square().mean()
                loss.backward()
                self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
            self.decisions += self.guard.end(step, loss.item(), skipped=self.optimizer.step_was_skipped)
        self.last = steps
        return self

    @property
    def told(self) -> list[tuple[int, str, str | None, str | None]]:
        return [(d.step, d.action, d.layer, d.role) for d in self.decisions]

    def casts(self) -> dict[str, tuple[str, str, str]]:
        layers = {n: m for n, m in self.model.named_modules() if isinstance(m, nn.Linear)}
        return {
            name: tuple(repr(getattr(m.training_casts, role)) for role in ("input", "weight", "grad_output"))  # type: ignore[misc]
            for name, m in layers.items()
        }


def outlier(factor: float, steps: range) -> Callable[[Run, int], None]:
    """In those steps the second layer reads `factor` times its input, and its output is divided by it."""

    def install(run: Run, step: int) -> None:
        if step != 1:
            return
        layer, at = run.model[2], [0]
        run.model.register_forward_pre_hook(lambda *_: at.__setitem__(0, at[0] + 1))
        layer.register_forward_pre_hook(lambda _, args: (args[0] * factor,) if at[0] in steps else None)
        layer.register_forward_hook(lambda _, args, out: out / factor if at[0] in steps else None)

    return install


def bits(run: Run) -> list[Tensor]:
    return [p.detach().clone() for p in run.model.parameters()]


def same(a: Run, b: Run) -> bool:
    return a.losses == b.losses and all(torch.equal(x, y) for x, y in zip(bits(a), bits(b), strict=True))


def test_a_stale_scale_promotes_the_named_role_of_the_named_layer_and_nothing_else() -> None:
    run = Run("fp8_delayed", ACT, outlier(2.0**30, range(5, 6))).go_to(4)
    before, rows = run.casts(), {row.name: row for row in ng.report(run.model)}
    run.go_to(9)
    assert run.told == [(8, "wait", "2", "input"), (9, "promote", "2", "input")]
    promoted = run.decisions[-1]
    assert promoted.measure == "flushed" and promoted.value == 1.0 and promoted.threshold == 0.1
    assert "from E4M3FN, delayed" in promoted.message and promoted.after == str(E4M3)
    assert run.casts() == before | {"2": (repr(E4M3), *before["2"][1:])}
    after = {row.name: row for row in ng.report(run.model)}
    assert {name for name in rows if rows[name] != after[name]} == {"2"}
    assert "with fields of its own, '2'" in after["2"].reason


def test_histories_of_the_layers_other_roles_go_on() -> None:
    run = Run("fp8_delayed", ACT, outlier(2.0**30, range(5, 6))).go_to(8)
    state = {name: value.clone() for name, value in run.model.state_dict().items() if "weight_" in name}
    twin = Run("fp8_delayed", GuardConfig(mode="warn", every=4), outlier(2.0**30, range(5, 6))).go_to(9)
    run.go_to(9)
    assert run.decisions[-1].action == "promote"
    for name in state:  # the step rolled both; the promotion that followed has left this one's as it was
        assert torch.equal(run.model.state_dict()[name], twin.model.state_dict()[name])
    assert not any(name.startswith("2.input_") for name in run.model.state_dict())


def test_a_single_jump_promotes_nothing() -> None:  # case 16: the history has adopted it when it is looked at again
    run = Run("fp8_delayed", ACT, outlier(100.0, range(8, 1000))).go_to(20)
    assert {(step, action, layer) for step, action, layer, _ in run.told} == {(8, "wait", "2")}
    assert run.decisions[0].measure == "saturated"


def test_what_never_fits_climbs_a_rung_a_step() -> None:
    def spike(run: Run, step: int) -> None:
        if step == 1:
            column = torch.zeros(64)
            column[::16] = 1e9  # in every block of 32 values: what is beside it has no range in E4M3 nor E5M2
            run.model[2].weight.register_hook(lambda grad: grad * (column == 0))
            run.model[2].register_forward_pre_hook(lambda _, args: (args[0] + column,))
        with torch.no_grad():
            run.model[2].weight[:, ::16] = 0.0

    run = Run("fp8_current", ACT, spike).go_to(12)
    promoted = [(d.step, d.role, d.after) for d in run.decisions if d.action == "promote"]
    assert promoted[:2] == [
        (5, "input", str(BLOCKS)), (6, "input", str(ng.CastSpec(F.E5M2, ng.Block(1, 32), ng.CURRENT_POW2))),
    ]  # fmt: skip
    assert run.casts()["2"][0] != run.casts()["0"][0] == repr(E4M3)


def test_after_calm_it_goes_back_and_the_scale_begins_with_what_was_seen() -> None:
    run = Run("fp8_delayed", ACT, outlier(2.0**30, range(5, 6))).go_to(17)
    assert run.told[2:] == [(16, "demote", "2", "input")]  # after samples 12 and 16
    assert "Delayed" in run.casts()["2"][0]
    history = run.model[2].get_buffer("input_amax_history")
    assert history.max() < 4  # tanh's; the outlier of step 5 is forgotten
    assert run.model[2].get_buffer("input_quant_scale") > 100
    assert run.go_to(40).told[3:] == []


def test_a_fault_that_stays_is_tried_ever_more_rarely() -> None:
    def unscaled(run: Run, step: int) -> None:
        outlier(10_000.0, range(1, 10_000))(run, step)

    recipe = ng.recipe("fp8_current").for_layers("2", input=ng.CastSpec(F.E4M3FN, scale=ng.NONE))
    run = Run(recipe, GuardConfig(mode="act", every=1, calm=2, confirm=1), unscaled).go_to(40)
    demoted = [step for step, action, _, _ in run.told if action == "demote"]
    gaps = [b - a for a, b in zip(demoted, demoted[1:], strict=False)]
    assert gaps == [5, 9, 17]  # calm 4, 8, 16 and the step of the trial
    assert all(role == "input" and layer == "2" for _, _, layer, role in run.told)


@pytest.mark.parametrize("recipe", ["fp8_delayed", "narrow8"])
def test_off_and_warn_change_no_bit(recipe: str) -> None:
    fault = outlier(2.0**30, range(5, 6))
    plain = Run(recipe, GuardConfig(), fault).go_to(16)
    assert plain.decisions == [] and not any(plain.guard.due(step) for step in range(1, 100))
    warned = Run(recipe, GuardConfig(mode="warn", every=2), fault).go_to(16)
    assert same(plain, warned)
    actions = [d.action for d in warned.decisions]
    assert actions == (["wait", "warn"] if recipe == "fp8_delayed" else [])


def test_it_is_quiet_where_all_is_well() -> None:
    for recipe in ("fp8_current", "fp8_delayed", "narrow8", "mxfp8", "nvfp4"):
        run = Run(recipe, GuardConfig(mode="act", every=2)).go_to(12)
        assert not [d for d in run.decisions if d.action != "wait"], recipe


def narrow_v(run: Run, step: int) -> None:
    if step == 5:
        assert isinstance(run.optimizer, LowPrecisionOptimizer)
        run.optimizer.override("2.weight", exp_avg_sq=ng.CastSpec(F.UINT4), keep_nonzero=False)


def test_a_flushed_second_moment_is_widened_in_place_and_keeps_what_it_holds() -> None:
    run = Run("narrow8", ACT, narrow_v).go_to(8)
    assert isinstance(run.optimizer, LowPrecisionOptimizer)
    state = run.optimizer.state[run.model[2].weight]
    held = {name: storage.decode(state[name], torch.Size((64, 64))).clone() for name in ("exp_avg", "exp_avg_sq")}
    others = [copy.deepcopy(run.optimizer.state[run.model[i].weight]) for i in (0, 4)]
    assert run.told == [(8, "wait", "2", "exp_avg_sq")] and (held["exp_avg_sq"] == 0).float().mean() > 0.001
    spec = run.guard._moments.spec(run.model[2].weight, "exp_avg_sq")
    assert spec == ng.CastSpec(F.UINT4)
    run.go_to(9)
    assert run.told[1:] == [(9, "promote", "2", "exp_avg_sq")]
    assert storage.spec_of(state["exp_avg_sq"]) == ng.recipe("narrow8").exp_avg_sq
    assert storage.spec_of(state["exp_avg"]) == ng.recipe("narrow8").exp_avg
    wide = storage.decode(state["exp_avg_sq"], torch.Size((64, 64)))
    first = storage.decode(state["exp_avg"], torch.Size((64, 64)))
    assert int(((wide == 0) & (first != 0)).sum()) == 0
    for index, before in zip((0, 4), others, strict=True):
        after = run.optimizer.state[run.model[index].weight]
        assert storage.spec_of(after["exp_avg_sq"]) == storage.spec_of(before["exp_avg_sq"])


def test_a_moment_is_not_narrowed_again_where_that_would_flush_it_again() -> None:
    run = Run("narrow8", ACT, narrow_v).go_to(28)  # calm for four samples, where two would do
    assert run.told[1:] == [(9, "promote", "2", "exp_avg_sq")]


def test_moments_are_cast_once_and_zeros_get_the_least_they_can_have_been() -> None:
    p = nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
    optimizer = ng.optim.AdamW([("p", p)], betas=(0.9, 0.95), exp_avg_sq=ng.CastSpec(F.UINT8), keep_nonzero=False,
                               min_state_size=0)  # fmt: skip
    exact = torch.zeros(64, 64, dtype=torch.float64)
    for step in range(30):
        grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(step)) * torch.logspace(-4, 0, 64)
        p.grad = grad
        optimizer.step()
        exact = 0.95 * exact + 0.05 * grad.double() ** 2
    moments, before = Moments(optimizer, nn.Module()), storage.decode(optimizer.state[p]["exp_avg_sq"], p.shape)
    assert moments.lost(p) == pytest.approx(float((before == 0).float().mean())) and moments.lost(p) > 0.3
    moments.keep(p, "exp_avg_sq", ng.CastSpec(F.FP32))
    assert torch.equal(optimizer.state[p]["exp_avg_sq"], before)  # bit for bit
    moments.refill(p)
    after = optimizer.state[p]["exp_avg_sq"]
    assert torch.equal(after[before > 0], before[before > 0]) and bool((after > 0).all())
    assert bool((after[before == 0].double() <= exact[before == 0]).all())  # a bound from below
    assert moments.lost(p) == 0.0
    assert moments.lost(p, ng.CastSpec(F.UINT8)) > 0.3  # what going back would lose


def test_what_goes_on_from_its_state_decides_the_same() -> None:
    fault = outlier(2.0**30, range(5, 6))
    whole = Run("fp8_delayed", ACT, fault).go_to(30)
    for stop in (8, 9, 13, 16):
        first = Run("fp8_delayed", ACT, fault).go_to(stop)
        second = Run("fp8_delayed", ACT, fault)
        assert second.guard.load_state_dict(json.loads(json.dumps(first.guard.state_dict()))) is False
        second.model.load_state_dict(first.model.state_dict())
        second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        second.last = stop
        outlier(2.0**30, range(5 - stop, 6 - stop))(second, 1)  # the hooks count from where it goes on
        second.go_to(30)
        assert second.told == [each for each in whole.told if each[0] > stop]
        assert second.losses == whole.losses[stop:]
        assert all(torch.equal(a, b) for a, b in zip(bits(second), bits(whole), strict=True))
        assert second.guard.state_dict() == whole.guard.state_dict()


def test_a_switch_of_the_schedule_begins_anew_for_operands() -> None:
    recipe = ng.recipe("fp8_delayed").switch_at(12, ng.recipe("fp8_current"))
    run = Run(recipe, GuardConfig(mode="act", every=4), outlier(2.0**30, range(5, 6))).go_to(11)
    assert run.casts()["2"][0] == repr(E4M3) and "Delayed" in run.casts()["0"][0]
    run.go_to(13)
    assert set(run.casts().values()) == {(repr(E4M3), repr(E4M3), repr(ng.CastSpec(F.E5M2)))}
    assert run.guard.recipe == recipe.resolve("cpu").at(12)
    assert not run.guard.state_dict()["casts"]


def test_a_spike_of_the_loss_goes_wide_and_back_where_there_is_a_state() -> None:
    def spike(run: Run, step: int) -> None:
        run.spread = 50.0 if step >= 20 else 1.0

    asked: list[int] = []

    def go_back(since: int) -> int:
        asked.append(since)
        return 16

    run = Run("fp8_current", GuardConfig(mode="act", rollbacks=1), spike)
    run.guard._go_back = go_back
    run.go_to(22)
    assert asked == [20] and run.guard.rollbacks == 1
    assert [(d.action, d.layer, d.before, d.after) for d in run.decisions] == [
        ("promote", None, "recipe fp8_current", "all products in BF16"), ("rollback", None, "step 22", "step 16"),
    ]  # fmt: skip
    assert not any(m.quantized for m in run.model if isinstance(m, nn.Linear))
    run.go_to(25)
    assert asked == [20]  # all rollbacks are used up: it says so, once
    assert [d.action for d in run.decisions[2:]] == ["warn"] and "used up" in run.decisions[2].message


def test_without_a_state_to_go_back_to_it_says_so() -> None:
    def spike(run: Run, step: int) -> None:
        run.spread = 50.0 if step >= 20 else 1.0

    run = Run("bf16", ACT, spike).go_to(30)
    assert [(d.step, d.action) for d in run.decisions] == [(22, "warn")]
    assert run.decisions[0].message.endswith("; no way back was given (go_back)")
    run = Run("bf16", ACT, spike)
    run.guard._go_back = lambda since: None
    run.go_to(30)
    assert run.decisions[0].message.endswith("; there is no state before it to go back to")
    run = Run("bf16", GuardConfig(mode="warn"), spike).go_to(30)
    assert run.decisions[0].message.endswith("; guard.mode is warn: it goes on as it is")


def test_a_mode_that_is_none_is_refused() -> None:  # it would watch, and never act
    with pytest.raises(ng.errors.ConfigError, match="guard.mode='Act': expected off, warn, act"):
        Run("bf16", GuardConfig(mode="Act"))
    with pytest.raises(ng.errors.ConfigError, match="guard.every=0: expected a whole number from 1"):
        Run("bf16", GuardConfig(mode="act", every=0))
