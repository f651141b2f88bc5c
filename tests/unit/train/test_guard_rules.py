"""The guard's limits, ladder and state machine, each by itself."""

from __future__ import annotations

import json
import math

import pytest
import torch

import narrowgauge as ng
from narrowgauge.errors import CheckpointError
from narrowgauge.numerics.measure import sqnr_db
from narrowgauge.recipes.casts import MOMENTS
from narrowgauge.train.guard_apply import widened
from narrowgauge.train.guard_decisions import of_cast
from narrowgauge.train.guard_ladder import is_last, next_wider
from narrowgauge.train.guard_limits import Finding, Verdict, judge, normal_db
from narrowgauge.train.guard_losses import Losses
from narrowgauge.train.guard_samples import Sample, merged
from narrowgauge.train.guard_standing import Move, Standing
from narrowgauge.train.sections import GuardConfig, LimitsConfig

F = ng.formats
E4M3, BLOCKS = ng.CastSpec(F.E4M3FN), ng.CastSpec(F.E4M3FN, ng.Block(1, 32), ng.CURRENT_POW2)
LIMITS = LimitsConfig()


@pytest.mark.parametrize(
    "spec",
    [
        E4M3,
        ng.CastSpec(F.E5M2),
        ng.CastSpec(F.E4M3FN, ng.Block(1, 32), ng.E8M0_UP),
        ng.CastSpec(F.E3M2FN, ng.Block(1, 32), ng.E8M0_UP),
        ng.CastSpec(F.E2M3FN, ng.Block(1, 32), ng.E8M0_UP),
        ng.CastSpec(F.E2M1FN, ng.Block(1, 16), ng.NVFP4),
        ng.CastSpec(F.E2M1FN, ng.Block(1, 32), ng.E8M0_UP),
    ],
    ids=str,
)
def test_the_normal_ratio_is_what_normal_values_measure(spec: ng.CastSpec) -> None:
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    assert abs(sqnr_db(x, ng.quantize(x, spec).dequantize()) - normal_db(spec)) < 1.0


@pytest.mark.parametrize(
    ("measures", "verdict", "measure"),
    [
        ({"saturated": 0.0101}, Verdict.TROUBLE, "saturated"),
        ({"saturated": 0.0099}, Verdict.INSIDE, "saturated"),
        ({"saturated": 0.0009}, Verdict.CALM, "saturated"),
        ({"saturated": 0.0, "flushed": 0.101}, Verdict.TROUBLE, "flushed"),
        ({"saturated": 0.0, "flushed": 0.099}, Verdict.INSIDE, "flushed"),
        ({"saturated": 0.0, "flushed": 0.009}, Verdict.CALM, "flushed"),
        ({"sqnr_db": 19.4}, Verdict.TROUBLE, "sqnr_db"),  # 13.5 + 3 * 6.02 - 12 is 19.56
        ({"sqnr_db": 19.7}, Verdict.INSIDE, "sqnr_db"),
        ({"sqnr_db": 25.7}, Verdict.CALM, "sqnr_db"),
        ({"sqnr_db": math.inf, "saturated": 0.0}, Verdict.CALM, "saturated"),
        ({"sqnr_db": 3.0, "saturated": 0.4, "flushed": 0.0}, Verdict.TROUBLE, "saturated"),  # it says what is lacking
        ({"sqnr_db": 3.0, "saturated": 0.02}, Verdict.TROUBLE, "saturated"),  # also where the ratio is further beyond
        ({"saturated": 0.02, "flushed": 0.5}, Verdict.TROUBLE, "flushed"),  # 5 times its limit, not twice
        ({"saturated": 0.01}, Verdict.INSIDE, "saturated"),  # a limit itself is inside
        ({"saturated": 0.01 * 0.1}, Verdict.CALM, "saturated"),
    ],
)
def test_limits_are_two_sided(measures: dict[str, float], verdict: Verdict, measure: str) -> None:
    finding = judge("input", ng.CastSpec(F.E4M3FN, scale=ng.Delayed()), measures, LIMITS)
    assert finding is not None and (finding.verdict, finding.measure) == (verdict, measure)


def test_what_is_not_judged() -> None:
    nvfp4 = ng.CastSpec(F.E2M1FN, ng.Block(1, 16), ng.NVFP4)
    assert judge("input", nvfp4, {"flushed": 0.3}, LIMITS) is None  # E2M1 flushes healthy values, too
    assert judge("input", nvfp4, {"saturated": 0.04}, LIMITS) is None  # its scales are rounded, downwards too
    assert judge("input", ng.CastSpec(F.BF16), {"sqnr_db": 5.0}, LIMITS) is None
    assert judge("exp_avg", MOMENTS[8][0], {"sqnr_db": 5.0, "flushed": 1.0}, LimitsConfig(flushed=1.0)) is None
    assert judge("input", E4M3, {"amax": 1.0}, LIMITS) is None


def test_saturation_is_judged_without_a_scale_and_flushing_of_moments_in_any_format() -> None:
    unscaled, four_bits = ng.CastSpec(F.E4M3FN, scale=ng.NONE), ng.CastSpec(F.UINT4, ng.Block(1, 128))
    found = (
        judge("input", unscaled, {"saturated": 0.02}, LIMITS),
        judge("exp_avg_sq", four_bits, {"flushed": 0.2}, LIMITS),
    )
    assert found == (
        Finding(Verdict.TROUBLE, "saturated", 0.02, 0.01), Finding(Verdict.TROUBLE, "flushed", 0.2, 0.1),
    )  # fmt: skip


def test_a_limit_of_zero_is_any_value_at_all_and_twice_beyond() -> None:
    spec, limits = ng.CastSpec(F.E4M3FN, scale=ng.Delayed()), LimitsConfig(saturated=0.0)
    found = [judge("input", spec, {"saturated": value, "flushed": 0.15}, limits) for value in (0.0, 1e-9)]
    assert [each and (each.measure, each.verdict) for each in found] == [("flushed", BAD), ("saturated", BAD)]


def test_integers_are_held_to_floating_formats_of_their_size() -> None:
    sizes = ((F.INT8, F.E4M3FN), (F.UINT8, F.E4M3FN), (F.INT4, F.E2M1FN), (F.UINT4, F.E2M1FN))
    for integer, floating in sizes:
        assert normal_db(ng.CastSpec(integer)) == normal_db(ng.CastSpec(floating))


def climb(role: str, spec: ng.CastSpec | None, measure: str) -> list[str]:
    found = []
    while not is_last(role, spec):
        assert spec is not None
        spec = next_wider(role, spec, measure)
        found.append("compute" if spec is None else repr(spec))
    return found


def test_the_ladder_gives_up_no_more_than_the_measure_asks_for() -> None:
    delayed = ng.CastSpec(F.E4M3FN, scale=ng.Delayed())
    whole, blocks = repr(E4M3), repr(BLOCKS)
    assert climb("input", delayed, "saturated") == [whole, blocks, "compute"]
    wide_range = repr(ng.CastSpec(F.E5M2, ng.Block(1, 32), ng.CURRENT_POW2))
    assert climb("input", delayed, "flushed") == [whole, blocks, wide_range, "compute"]
    assert climb("weight", E4M3, "sqnr_db") == [blocks, "compute"]
    unscaled = ng.CastSpec(F.E4M3FN, scale=ng.NONE)
    assert climb("input", unscaled, "saturated")[0] == whole
    mx = ng.CastSpec(F.E2M1FN, ng.Block(1, 32), ng.E8M0_FLOOR, ng.STOCHASTIC)
    assert climb("grad_output", mx, "sqnr_db") == [
        repr(ng.CastSpec(F.E2M1FN, ng.Block(1, 32), ng.E8M0_UP, ng.STOCHASTIC)),
        repr(ng.CastSpec(F.E4M3FN, ng.Block(1, 32), ng.E8M0_UP, ng.STOCHASTIC)),
        "compute",
    ]
    large = ng.CastSpec(F.E4M3FN, ng.Block(1, 128), ng.E8M0_UP)  # whose scales stay of their own kind
    assert climb("input", large, "sqnr_db") == [repr(ng.CastSpec(F.E4M3FN, ng.Block(1, 32), ng.E8M0_UP)), "compute"]
    nvfp4 = ng.CastSpec(F.E2M1FN, ng.Block(16, 16), ng.NVFP4)
    assert climb("weight", nvfp4, "sqnr_db")[0] == repr(ng.CastSpec(F.E4M3FN, ng.Block(16, 16), ng.CURRENT_POW2))


def test_moments_climb_to_float32() -> None:
    m, v = MOMENTS[8]
    assert climb("exp_avg", ng.CastSpec(F.E4M3FN, scale=ng.TENSOR_POW2), "sqnr_db") == [
        repr(m), repr(ng.CastSpec(F.BF16)), repr(ng.CastSpec(F.FP32)),
    ]  # fmt: skip
    assert climb("exp_avg_sq", ng.CastSpec(F.UINT8), "flushed") == [repr(v), repr(ng.CastSpec(F.FP32))]
    assert climb("exp_avg_sq", ng.CastSpec(F.FP16, scale=ng.TENSOR_POW2), "flushed") == [repr(ng.CastSpec(F.FP32))]
    assert climb("exp_avg_sq", ng.CastSpec(F.FP32), "flushed") == []


def test_a_widened_role_takes_its_second_use_with_it_and_no_other_layer() -> None:
    recipe = ng.recipe("fp8_rowwise_gw_hp")
    assert recipe.weight_for_grad_input is not None
    found = widened(recipe, {("a", "weight"): BLOCKS, ("b[0].*", "input"): None}, False)
    own = found.for_layer("a")
    assert (own.weight, own.weight_for_grad_input, own.input) == (BLOCKS, None, recipe.input)
    assert found.for_layer("b[0].*").input is None  # a name with the signs of a glob is that name
    for name in ("c", "b0.x", "b[0].x", ""):
        assert found.for_layer(name) == recipe.for_layer(name)
    root = widened(recipe, {("", "input"): None}, False)  # a model that is one layer has no name
    assert root.for_layer("").input is None
    everything = widened(recipe, {("a", "weight"): BLOCKS}, True)
    assert not everything.for_layer("a").quantizes_gemms and not everything.for_layer("c").quantizes_gemms


def test_a_transform_goes_with_the_last_cast_that_it_prepares_for() -> None:
    recipe = ng.recipe("nvfp4")
    assert recipe.hadamard is not None
    one = widened(recipe, {("a", "input"): None}, False)
    both = widened(recipe, {("a", "input"): None, ("a", "grad_output"): None}, False)
    assert one.for_layer("a").hadamard == recipe.hadamard and both.for_layer("a").hadamard is None
    assert both.for_layer("b").hadamard == recipe.hadamard


BAD, MEANWHILE, GOOD = Verdict.TROUBLE, Verdict.INSIDE, Verdict.CALM


def test_one_bad_sample_is_looked_at_again_and_two_promote() -> None:
    standing = Standing()
    assert standing.take(BAD, 2, 3) is Move.WAIT and standing.is_watched
    assert standing.take(GOOD, 2, 3) is Move.NONE and not standing.is_watched
    assert [standing.take(BAD, 2, 3) for _ in range(2)] == [Move.WAIT, Move.PROMOTE]
    standing.promoted(E4M3)
    assert standing.is_watched and standing.take(BAD, 2, 3) is Move.PROMOTE  # the next rung needs no second look
    standing.promoted(BLOCKS)
    assert standing.climbed == [E4M3, BLOCKS]


def test_only_calm_that_lasts_demotes_and_every_return_doubles_it() -> None:
    standing = Standing()
    for _ in range(2):
        standing.take(BAD, 2, 3)
    standing.promoted(E4M3)
    assert [standing.take(v, 2, 3) for v in (GOOD, GOOD, MEANWHILE, GOOD, GOOD, GOOD)] == [Move.NONE] * 5 + [
        Move.DEMOTE
    ]
    needed = []
    for _ in range(4):
        assert standing.demoted(2) is E4M3 and standing.is_watched
        assert standing.take(BAD, 2, 3) is Move.PROMOTE  # a trial that fails ends at once
        standing.promoted(E4M3)
        count = 1
        while standing.take(GOOD, 2, 3) is not Move.DEMOTE:
            count += 1
        needed.append(count)
    assert needed == [6, 12, 24, 48]


def test_trouble_begins_calm_anew_and_so_does_a_promotion() -> None:
    standing = Standing(climbed=[E4M3])
    assert [standing.take(v, 2, 3) for v in (GOOD, GOOD, BAD, GOOD, GOOD, GOOD)] == [
        Move.NONE, Move.NONE, Move.WAIT, Move.NONE, Move.NONE, Move.DEMOTE,
    ]  # fmt: skip
    standing = Standing(climbed=[E4M3], calm=2)
    standing.promoted(BLOCKS)  # by losses, which no sample has announced
    assert [standing.take(GOOD, 2, 3) for _ in range(3)] == [Move.NONE, Move.NONE, Move.DEMOTE]


def test_only_the_sample_after_a_promotion_needs_no_second_look() -> None:
    standing = Standing()
    standing.promoted(E4M3)
    assert standing.take(MEANWHILE, 2, 3) is Move.NONE and not standing.is_watched
    assert standing.take(BAD, 2, 3) is Move.WAIT
    standing = Standing(climbed=[E4M3])
    standing.demoted(3)
    assert standing.take(BAD, 2, 3) is Move.PROMOTE  # and the trial is over
    standing.promoted(E4M3)
    assert standing.take(GOOD, 2, 3) is Move.NONE and not standing.is_watched


def test_a_return_over_several_rungs_is_one_return_and_doubling_ends() -> None:
    standing = Standing(climbed=[E4M3])
    standing.demoted(2)
    for spec in (E4M3, BLOCKS):
        assert standing.take(BAD, 2, 3) is Move.PROMOTE
        standing.promoted(spec)
    assert (standing.returns, standing.needed_calm(3)) == (1, 6)
    assert Standing(returns=1000).needed_calm(3) == Standing(returns=20).needed_calm(3) == 3 * 2**20


def test_a_closer_look_is_no_calm() -> None:
    standing = Standing(climbed=[E4M3])
    assert [standing.take(GOOD, 2, 2, is_regular=False) for _ in range(9)] == [Move.NONE] * 9
    assert [standing.take(GOOD, 2, 2) for _ in range(2)] == [Move.NONE, Move.DEMOTE]


def test_a_trial_that_holds_is_over_after_its_samples() -> None:
    standing = Standing(climbed=[E4M3])
    standing.demoted(2)
    assert [standing.take(GOOD, 2, 3), standing.is_watched, standing.take(GOOD, 2, 3), standing.is_watched] == [
        Move.NONE, True, Move.NONE, False,
    ]  # fmt: skip
    assert standing.take(BAD, 2, 3) is Move.WAIT


def test_a_warning_is_given_once_until_it_is_calm() -> None:
    standing = Standing()
    for _ in range(2):
        standing.take(BAD, 2, 3)
    standing.warned()
    assert [standing.take(v, 2, 3) for v in (BAD, BAD, MEANWHILE, BAD, GOOD, BAD, BAD)] == [
        *[Move.NONE] * 5, Move.WAIT, Move.PROMOTE,
    ]  # fmt: skip


def test_a_standing_goes_through_json() -> None:
    standing = Standing(climbed=[E4M3, ng.CastSpec(F.E4M3FN, scale=ng.Delayed()), None], calm=3, returns=2, trial=1)
    assert Standing.from_state(json.loads(json.dumps(standing.state_dict()))) == standing
    with pytest.raises(CheckpointError, match="of another version, or damaged"):
        Standing.from_state({"calm": 3})


def losses_of(**changes: float) -> Losses:
    return Losses(GuardConfig(mode="act", **changes))  # type: ignore[arg-type]


def test_a_rise_above_the_band_is_answered_once() -> None:
    losses = losses_of()
    assert all(losses.take(step, 2.0 + 0.01 * (step % 3), False, 1.0) is None for step in range(1, 41))
    found = [losses.take(step, 2.6, False, 1.0) for step in range(41, 49)]
    assert [each is not None for each in found] == [False, False, True, False, False, False, False, False]
    assert found[2] is not None and (found[2].since, found[2].step, found[2].measure) == (41, 43, "loss")
    assert 2.4 < found[2].limit < 2.6


def test_a_loss_within_the_band_is_not() -> None:
    losses = losses_of()
    assert all(losses.take(step, 2.0 if step < 41 else 2.4, False, 1.0) is None for step in range(1, 60))


@pytest.mark.parametrize(
    ("loss", "scale", "answered"),
    [(math.nan, 1.0, True), (math.inf, 65536.0, True), (2.0, 1.0, True), (2.0, 4.0, False)],
)
def test_steps_that_are_not_finite_are_answered_unless_a_loss_scale_is_being_looked_for(
    loss: float, scale: float, answered: bool
) -> None:
    losses = losses_of()
    found = [losses.take(step, loss, True, scale) for step in range(1, 6)]
    assert [each is not None for each in found] == [False, False, answered, False, False]


def test_trouble_that_comes_again_after_calm_is_answered_again() -> None:
    losses = losses_of()
    for step in range(1, 41):
        losses.take(step, 2.0, False, 1.0)
    for begin in (41, 51):
        found = [losses.take(step, 9.0, False, 1.0) for step in range(begin, begin + 4)]
        assert [each and each.since for each in found] == [None, None, begin, None]
        assert losses.take(begin + 4, 2.0, False, 1.0) is None


def test_steps_that_are_not_finite_and_losses_above_the_band_are_counted_apart() -> None:
    losses = losses_of()
    for step in range(1, 41):
        losses.take(step, 2.0, False, 1.0)
    for step, loss in enumerate((math.nan, 9.0, 9.0, math.inf, math.nan), 41):  # of none of them three
        assert losses.take(step, loss, False, 1.0) is None
        assert not losses.calm_since_sample() and losses.asks_for(step + 1)
    assert losses.take(46, 2.0, False, 1.0) is None
    assert losses.calm_since_sample() and not losses.asks_for(47)


def test_the_steps_around_the_trouble_that_a_run_went_back_from_are_sampled() -> None:
    losses = losses_of(confirm=2)
    for step in range(1, 101):
        losses.take(step, 2.0, False, 1.0)
    trouble = [losses.take(step, 9.0, False, 1.0) for step in range(101, 104)][-1]
    assert trouble is not None and (trouble.since, trouble.step) == (101, 103)
    losses.went_back(trouble)
    assert losses.rollbacks == 1
    assert [step for step in range(90, 110) if losses.asks_for(step)] == list(range(97, 104))  # from 2 * confirm before
    again = [losses.take(step, 9.0, False, 1.0) for step in range(95, 98)]
    assert [each and (each.since, each.step) for each in again] == [None, None, (95, 97)]


def test_losses_go_through_json() -> None:
    losses, again = losses_of(), losses_of()
    for step in range(1, 50):
        losses.take(step, 2.0 if step < 49 else 3.0, False, 1.0)
    again.load_state_dict(json.loads(json.dumps(losses.state_dict())))
    for step in (50, 51):
        assert again.take(step, 3.0, False, 1.0) == losses.take(step, 3.0, False, 1.0)
    assert again.state_dict() == losses.state_dict()


def test_of_several_ranks_the_worst_counts_in_one_order() -> None:
    key = ("a", "input")
    one = {key: Sample(E4M3, {"flushed": 0.1, "sqnr_db": 30.0})}
    other = {("b", "weight"): Sample(E4M3, {}), key: Sample(E4M3, {"flushed": 0.2, "sqnr_db": 31.0, "amax": 1.0})}
    for parts in ((one, other), (other, one)):
        found = merged(parts)
        assert list(found) == [key, ("b", "weight")]
        assert found[key].measures == {"flushed": 0.2, "sqnr_db": 30.0, "amax": 1.0}


@pytest.mark.parametrize(
    ("measure", "value", "limit", "said"),
    [
        ("flushed", 0.010004, 0.01, "1.0004% of the non-zero values become zero (limit 1.0000%)"),
        ("saturated", 0.5, 0.01, "50.00% of the values are cut off at the largest of the format (limit 1.00%)"),
        ("sqnr_db", 11.98, 12.0, "the cast's error is 11.98 dB below the values (limit 12.00 dB)"),
        ("flushed", 0.01, 0.01, "1.00% of the non-zero values become zero (limit 1.00%)"),
    ],
)
def test_a_decision_tells_the_value_and_the_limit_apart(measure, value, limit, said) -> None:
    finding = Finding(Verdict.TROUBLE, measure, value, limit)
    assert of_cast(4, "wait", ("up", "input"), finding, E4M3, E4M3).message == (
        f"up, input: {said}; the next step is looked at, too"
    )
