"""What needs attention: each rule fires on its trouble, says where, since when and how bad, and is silent beside it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.numerics import formats
from narrowgauge.observe.journal_rows import encode
from narrowgauge.observe.report_attention import attention, checked
from narrowgauge.observe.report_rules import UNKNOWN_SQNR_DB, Finding
from narrowgauge.observe.report_run import RunReader
from narrowgauge.observe.report_words import amount, best_sqnr_db, expected_sqnr_db
from synthetic_run import write_run

CALM_ON_CPU = ("conversion",)  # emulation is noted


def found_in(folder: Path, **options: Any) -> list[Finding]:
    return [each for each in attention(RunReader(write_run(folder, **options))) if each.rule not in CALM_ON_CPU]


def cell(layer: str, role: str, **values: float) -> Any:
    """A change of one cell's measures from `since` to `until`."""
    since, until = values.pop("since", 0), values.pop("until", math.inf)

    def change(step: int, row: dict[str, Any]) -> dict[str, Any]:
        if row["kind"] == "precision" and since <= step <= until:
            row["layers"][layer][role].update(values)
        return row

    return change


def steps(**values: Any) -> Any:
    """A change of step rows from `since` to `until`; a value may be a function of the step."""
    since, until = values.pop("since", 0), values.pop("until", math.inf)

    def change(step: int, row: dict[str, Any]) -> dict[str, Any]:
        if row["kind"] == "step" and since <= step <= until:
            row.update({name: value(step) if callable(value) else value for name, value in values.items()})
        return row

    return change


def test_a_clean_run_has_nothing_and_says_what_was_checked(tmp_path):
    assert found_in(tmp_path / "clean") == []
    said = checked(RunReader(tmp_path / "clean"))
    assert said[0] == "8 layers, 56 of their tensors, in 20 steps, one in every 10: between them nothing is known"
    assert len(said) > 8 and "0.1 %" in " ".join(said)


def test_samples_in_which_nothing_was_cast_are_told_apart(tmp_path):
    def change(step, row):
        return {**row, "layers": {}} if row["kind"] == "precision" and step > 50 else row

    run = RunReader(write_run(tmp_path / "run", change=change))
    assert checked(run)[0] == (
        "8 layers, 56 of their tensors, in 5 steps, one in every 10; in 15 sampled steps more nothing was cast: "
        "between them nothing is known"
    )
    assert run.precision.samples == 5
    wide = RunReader(
        write_run(tmp_path / "wide", change=lambda step, row: row | {"layers": {}} if "layers" in row else row)
    )
    assert checked(wide)[0] == "no layer was measured: in 20 sampled steps nothing was cast"


def test_case_16_saturation_by_a_stale_scale(tmp_path):
    """A tensor grew 100 times: its values are cut off. Which, since when, how many and what to do is said."""
    change = cell("blocks.0.mlp.up", "input", saturated=0.63, sqnr_db=28.0, since=120)
    formats_ = {"blocks.0.mlp.up": {"input": {"format": "E4M3FN", "granularity": "per tensor", "scale": "delayed",
                                              "max": 448.0, "min": 2.0**-9}}}  # fmt: skip
    (found,) = found_in(tmp_path / "stale", change=change, formats=formats_)
    assert (found.severity, found.rule, found.step) == ("serious", "saturation", 120)
    assert (found.layer, found.role, found.measure) == ("blocks.0.mlp.up", "input", "saturated")
    assert found.title == "blocks.0.mlp.up: values of the input are cut off"
    assert found.text == (
        "Up to 63 % of its values were cut off at the largest that the format holds (E4M3FN, per tensor), worst at "
        "step 120; first at step 120, in 9 of 20 sampled steps, up to the last sample."
    )
    assert "delayed" in found.remedy and "fp8_current" in found.remedy
    assert '`recipe.for_layers("blocks.0.mlp.up", "bf16")`' in found.remedy


@pytest.mark.parametrize(
    ("share", "until", "severity"),
    [(0.0009, 200, None), (0.001, 200, "look"), (0.0101, 200, "serious"), (0.5, 150, "look"), (0.002, 150, "note")],
)
def test_saturation_is_judged_by_its_share_and_by_whether_it_lasts(tmp_path, share, until, severity):
    change = cell("blocks.0.attention.q", "weight", saturated=share, sqnr_db=28.0, until=until)
    found = found_in(tmp_path / "run", change=change)
    assert [each.severity for each in found] == ([severity] if severity else [])
    if severity and until == 150:
        assert "not since step 150" in found[0].text


def test_case_20_skips_at_the_smallest_loss_scale(tmp_path):
    """The scale fell to its minimum and steps were skipped for ever: count, scale and first bad parameter are named."""
    change = steps(since=101, skipped=True, bad_parameter="blocks.0.attention.q.weight",
                   loss_scale=lambda step: max(1.0, 2.0 ** (117 - step)))  # fmt: skip
    (found,) = found_in(tmp_path / "stuck", change=change)
    assert (found.severity, found.rule, found.step) == ("serious", "skipped steps", 117)
    assert found.title == "84 steps in a row were skipped at the smallest loss scale"
    assert "from step 117 to the end" in found.text and "its smallest, 1," in found.text
    assert "blocks.0.attention.q.weight, at step 101 (100 times)" in found.text
    assert "step 101" in found.remedy and "blocks.0.attention.q.weight" in found.remedy


def test_a_loss_scale_that_finds_its_size_is_a_note(tmp_path):
    def change(step, row):
        if row["kind"] == "step":
            row.update(skipped=step <= 5, loss_scale=2.0 ** (16 - min(step, 5)))
        return row

    (found,) = found_in(tmp_path / "search", change=change)
    assert (found.severity, found.step) == ("note", 1)
    assert "5 of 200 steps" in found.text and "finds its size" in found.text


@pytest.mark.parametrize(("last", "severity"), [(60, "look"), (64, "serious")])
def test_skips_without_a_loss_scale(tmp_path, last, severity):
    """10 steps of 200 are 5 %: at most worth a look; a row of 10 at the smallest scale, which 1 is, is serious."""
    change = steps(since=52 if last == 60 else 55, until=last, skipped=True)
    (found,) = found_in(tmp_path / "run", change=change)
    assert (found.severity, found.rule) == (severity, "skipped steps")


def test_a_loss_spike_that_comes_back_and_one_that_stays(tmp_path):
    (found,) = found_in(tmp_path / "back", change=steps(since=130, until=132, loss=9.0))
    assert (found.severity, found.rule, found.step) == ("look", "loss", 130)
    assert "the loss was 9.000" in found.text and "the loss came back" in found.text
    (found,) = found_in(tmp_path / "stays", change=steps(since=190, loss=9.0))
    assert found.severity == "serious" and "has not come back" in found.text
    assert found_in(tmp_path / "within", change=steps(since=130, until=132, loss=3.0)) == []


def test_of_several_loss_spikes_the_last_says_whether_it_came_back(tmp_path):
    both = {**dict.fromkeys(range(130, 133), 9.0), **dict.fromkeys(range(190, 201), 8.0)}

    def change(step: int, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"loss": both[step]} if row["kind"] == "step" and step in both else row

    (found,) = found_in(tmp_path / "stays", change=change)
    assert (found.severity, found.step) == ("serious", 130) and "has not come back" in found.text
    assert "At step 130 the loss was 9.000" in found.text and "2 spikes in all" in found.text
    del both[200]
    (found,) = found_in(tmp_path / "back", change=change)
    assert found.severity == "look" and "the loss came back" in found.text


def test_losses_that_are_not_finite(tmp_path):
    (found,) = found_in(tmp_path / "nan", change=steps(since=150, loss=math.nan))
    assert (found.severity, found.step) == ("serious", 150) and "51 losses are infinite or NaN" in found.text
    (found,) = found_in(tmp_path / "one", change=steps(since=200, loss=math.nan))
    assert found.text.startswith("1 loss is infinite or NaN")


@pytest.mark.parametrize(
    ("flushed", "sqnr_db", "severity"),
    [(0.099, 20.0, None), (0.1, 20.0, "look"), (0.5, 20.0, "serious"), (0.1, 25.0, "note"), (0.5, 25.0, "look")],
)
def test_flushed_gradients(tmp_path, flushed, sqnr_db, severity):
    """E5M2 gives 26.1 dB: at 25 dB what was flushed is little of the whole."""
    change = cell("blocks.0.mlp.down", "grad_output", flushed=flushed, sqnr_db=sqnr_db)
    found = found_in(tmp_path / "run", change=change)
    assert [(each.severity, each.rule) for each in found] == ([(severity, "flushed")] if severity else [])
    if severity:
        assert "gradient of its output" in found[0].title and "E5M2" in found[0].text
        assert ("little of the whole: its SQNR was 25.0 dB" in found[0].text) == (sqnr_db == 25.0)
        assert "E5M2" not in found[0].remedy  # it is that already


@pytest.mark.parametrize(("scale", "severity"), [("current", "note"), ("delayed", "serious"), ("", "serious")])
def test_what_a_scale_of_the_values_own_cuts_off_is_judged_by_what_it_weighs(tmp_path, scale, severity):
    """A power of two rounded down cuts an eighth off the largest values; a delayed scale knows no such bound."""
    spec = {"format": "E4M3FN", "granularity": "1x32", "scale": scale, "max": 448.0, "min": 2.0**-9}
    change = cell("blocks.0.mlp.up", "input", saturated=0.02, sqnr_db=31.0)
    (found,) = found_in(tmp_path / "run", change=change, formats={"blocks.0.mlp.up": {"input": spec}})
    assert (found.severity, found.rule) == (severity, "saturation")
    assert ("little of the whole" in found.text) == (severity == "note")


@pytest.mark.parametrize(
    ("role", "flushed", "severity"),
    [
        ("exp_avg_sq", 0.0009, None),
        ("exp_avg_sq", 0.001, "look"),
        ("exp_avg_sq", 0.01, "serious"),
        ("exp_avg", 0.9, None),
    ],
)
def test_flushed_moments(tmp_path, role, flushed, severity):
    found = found_in(tmp_path / "run", change=cell("blocks.0.mlp.up", role, flushed=flushed))
    assert [(each.severity, each.rule) for each in found] == ([(severity, "flushed")] if severity else [])


@pytest.mark.parametrize(("below", "severity"), [(9.9, None), (10.1, "look"), (20.1, "serious")])
def test_low_sqnr_is_judged_against_the_format(tmp_path, below, severity):
    expected = expected_sqnr_db("E4M3FN")
    assert expected is not None
    found = found_in(tmp_path / "run", change=cell("blocks.0.mlp.down", "weight", sqnr_db=expected - below))
    assert [(each.severity, each.rule) for each in found] == ([(severity, "low SQNR")] if severity else [])


def test_expected_sqnr_is_that_of_a_real_cast():
    """Values spread evenly over the logarithm, cast by torch: within 0.1 dB of the formula."""
    import torch

    x = 2.0 ** (8 * torch.rand(1 << 18, generator=torch.Generator().manual_seed(0)) - 4)
    for name, dtype in (("E4M3FN", torch.float8_e4m3fn), ("E5M2", torch.float8_e5m2), ("BF16", torch.bfloat16)):
        noise = (x.to(dtype).float() - x).square().mean()
        assert expected_sqnr_db(name) == pytest.approx(10 * math.log10(float(x.square().mean() / noise)), abs=0.1)
    assert expected_sqnr_db("INT8") is None and expected_sqnr_db("nothing") is None
    assert formats.E4M3FN.mantissa_bits == 3


def test_stochastic_rounding_gives_half_the_signal_to_noise_of_nearest():
    """Held against casts of this library: values spread evenly over the logarithm, within 0.1 dB."""
    import torch

    import narrowgauge as ng

    generator = torch.Generator().manual_seed(0)
    x = 2.0 ** (8 * torch.rand(1 << 18, generator=generator) - 4)
    for rounding, extra in ((ng.NEAREST_EVEN, {}), (ng.STOCHASTIC, {"rounding": "stochastic"})):
        cast = ng.quantize(
            x, ng.CastSpec(ng.formats.E4M3FN, scale=ng.CURRENT_POW2, rounding=rounding), generator=generator
        )
        noise = (cast.dequantize().float() - x).square().mean()
        found = best_sqnr_db({"format": "E4M3FN", **extra})
        assert found == pytest.approx(10 * math.log10(float(x.square().mean() / noise)), abs=0.1), rounding


def test_updates_that_stochastic_rounding_leaves_out_are_not_lost(tmp_path):
    """They arrive in the mean: nobody shall be told to round stochastically who does."""
    spec = {"format": "BF16", "granularity": "per tensor", "scale": "none", "max": 3e38, "min": 9e-41}
    change = cell("blocks.0.mlp.down", "param", lost=0.97, sqnr_db=53.0)
    for rounding, count in (({}, 1), ({"rounding": "stochastic"}, 0)):
        formats_ = {"blocks.0.mlp.down": {"param": spec | rounding}}
        assert len(found_in(tmp_path / str(count), change=change, formats=formats_)) == count


def test_a_trouble_that_has_become_a_little_one_is_no_longer_serious(tmp_path):
    """Serious from 75 % on: three samples below it, and it is worth a look; below 25 %, too, and it has stopped."""
    for until, share, severity in ((180, 0.3, "serious"), (170, 0.3, "look"), (170, 0.0, "look")):

        def change(step: int, row: dict[str, Any], until: int = until, share: float = share) -> dict[str, Any]:
            if row["kind"] == "precision":
                row["layers"]["blocks.0.mlp.up"]["param"] = {"lost": 0.9 if step <= until else share}
            return row

        (found,) = found_in(tmp_path / f"{until}-{share}", change=change)
        assert (found.severity, found.rule) == (severity, "lost updates"), (until, share)
        assert found.text.startswith("Up to 90 %")


@pytest.mark.parametrize("master", ["INT8", "INT16"])
def test_what_a_residual_gives_is_that_of_a_real_one(master):
    import torch

    from narrowgauge.numerics import residual

    x = 2.0 ** (8 * torch.rand(1 << 18, generator=torch.Generator().manual_seed(0)) - 4).double()
    parts = residual.split(x.float()) if master == "INT8" else residual.split_exactly(x.float())
    y = (residual.join if master == "INT8" else residual.join_exactly)(*parts)
    noise = (y.double() - x).square().mean()
    best = best_sqnr_db({"format": "BF16", "master": master})
    assert best == pytest.approx(10 * math.log10(float(x.square().mean() / noise)), abs=0.2)
    assert best_sqnr_db({"format": "BF16", "master": "FP32"}) == expected_sqnr_db("FP32")


@pytest.mark.parametrize(
    ("master", "said", "remedy"),
    [
        ("INT8", "(BF16 with an 8-bit residual, 24 bits in all, per tensor)", "float32 parameters (bf16)."),
        ("FP32", "(BF16 with a master copy in FP32, per tensor)", "Elsewhere, raise the learning rate."),
        (None, "(BF16, per tensor)", "bf16_pure"),
    ],
)
def test_lost_updates_of_a_parameter_with_a_residual_or_master(tmp_path, master, said, remedy):
    spec = {"format": "BF16", "granularity": "per tensor", "scale": "none", "max": 3e38, "min": 9e-41}
    spec |= {"master": master} if master else {}
    change = cell("blocks.0.mlp.down", "param", lost=0.8, sqnr_db=145.0 if master == "FP32" else 101.0)
    (found,) = found_in(tmp_path / "run", change=change, formats={"blocks.0.mlp.down": {"param": spec}})
    assert said in found.text and remedy in found.remedy
    assert ("narrow8" in found.remedy) == (master is None)


def test_dead_and_dying_gradients(tmp_path):
    (found,) = found_in(tmp_path / "dead", change=cell("blocks.0.mlp.down", "grad", zero=1.0, since=101))
    assert (found.severity, found.rule, found.step) == ("serious", "dead gradients", 110)
    assert "from step 110 up to the last sample" in found.text
    (found,) = found_in(tmp_path / "dying", change=cell("blocks.0.mlp.down", "grad", zero=0.5, since=101))
    assert found.severity == "look" and "50 % is in the last" in found.text
    sparse = cell("blocks.0.mlp.down", "grad", zero=0.95)  # of an embedding: most rows are never looked up
    assert found_in(tmp_path / "sparse", change=sparse) == []


@pytest.mark.parametrize(("lost", "severity"), [(0.24, None), (0.25, "look"), (0.75, "serious")])
def test_lost_updates(tmp_path, lost, severity):
    found = found_in(tmp_path / "run", change=cell("blocks.0.mlp.down", "param", lost=lost))
    assert [(each.severity, each.rule) for each in found] == ([(severity, "lost updates")] if severity else [])


def test_many_layers_make_one_finding_with_the_worst_first(tmp_path):
    def change(step, row):
        if row["kind"] == "precision":
            for at, roles in enumerate(row["layers"].values()):
                roles["input"].update(saturated=0.02 * (at + 1), sqnr_db=28.0)
        return row

    (found,) = found_in(tmp_path / "run", change=change)
    assert found.title.startswith("blocks.1.attention.q and 7 more")
    assert [each["value"] for each in found.layers][:2] == ["16 %", "14 %"] and len(found.layers) == 8


def test_layers_that_could_not_be_converted_and_emulation_on_a_gpu(tmp_path):
    rows = [{"name": "head", "status": "skipped", "reason": "10 outputs: no multiple of 16", "backend": "torch"},
            {"name": "up", "status": "converted", "reason": "", "backend": "emulated"}]  # fmt: skip
    run = RunReader(write_run(tmp_path / "gpu", conversion=rows, device="cuda"))
    skipped, emulated = attention(run)
    assert skipped.severity == "look" and "1 (head): 10 outputs" in skipped.text
    assert emulated.severity == "look" and "slower than in bf16" in emulated.text
    run = RunReader(write_run(tmp_path / "cpu", conversion=rows[1:], device="cpu"))
    assert [each.severity for each in attention(run)] == ["note"]


def test_a_journal_that_names_no_device_is_not_taken_for_a_gpus(tmp_path):
    rows = [{"name": "up", "status": "converted", "reason": "", "backend": "emulated"}]
    (found,) = attention(RunReader(write_run(tmp_path / "own", conversion=rows, device="")))
    assert found.severity == "note" and "GPU" not in found.text and "CPU" not in found.text


def test_no_setting_is_advised_where_the_recipe_casts_no_operand(tmp_path):
    remedies = []
    for reason in ("recipe 'bf16' quantizes no GEMM operand; bf16 product", "matches exclude glob 'up'"):
        rows = [{"name": "up", "status": "kept", "reason": reason, "backend": "native", "casts": {}}]
        (found,) = attention(RunReader(write_run(tmp_path / str(len(remedies)), conversion=rows)))
        assert found.title == "1 layer stayed as it was"
        remedies.append(found.remedy)
    assert "min_size" not in remedies[0] and "exclude" in remedies[1]


def test_converted_layers_that_are_not_emulated_are_counted(tmp_path):
    rows = [{"name": "up", "status": "converted", "backend": "emulated", "casts": {"input": "E4M3FN"}},
            {"name": "norm", "status": "converted", "backend": "torch", "casts": {}}]  # fmt: skip
    (found,) = attention(RunReader(write_run(tmp_path / "cpu", conversion=rows)))
    assert found.title == "1 layer is emulated"
    assert found.text.endswith(" The other 1 of 2 converted layers cast nothing in a product (such as norms).")


@pytest.mark.parametrize(("since", "severity"), [(190, "serious"), (171, "look")])
@pytest.mark.parametrize("what", ["all layers", "one role"])
def test_what_is_cast_no_more_has_stopped(tmp_path, since, severity, what):
    """The guard took all products, or one role, into a wider format: samples without it are calm ones."""

    def change(step, row):
        if row["kind"] == "precision":
            row["layers"]["blocks.0.mlp.up"]["input"].update(saturated=0.5, sqnr_db=10.0)
            if step > since and what == "all layers":
                return {**row, "layers": {}}
            if step > since:
                del row["layers"]["blocks.0.mlp.up"]["input"]
        return row

    found = found_in(tmp_path / "run", change=change)
    assert {each.severity for each in found if each.rule == "saturation"} == {severity}
    said = next(each.text for each in found if each.rule == "saturation")
    assert ("last at step 190" if since == 190 else "not since step 170") in said


@pytest.mark.parametrize("is_looked_at", [True, False])
def test_a_moment_that_is_narrow_no_more_has_stopped_unless_states_were_not_looked_at(tmp_path, is_looked_at):
    """At the guard's own looks nothing is known of parameters and moments."""

    def change(step, row):
        if row["kind"] == "precision":
            row["layers"]["blocks.0.mlp.up"]["exp_avg_sq"].update(flushed=0.5, sqnr_db=10.0)
            for roles in row["layers"].values() if step > 150 else ():
                for role in ("exp_avg_sq",) if is_looked_at else ("param", "exp_avg", "exp_avg_sq"):
                    del roles[role]
        return row

    found = found_in(tmp_path / "run", change=change)
    assert {each.severity for each in found if each.rule == "flushed"} == {"look" if is_looked_at else "serious"}


def test_what_the_guard_did(tmp_path):
    folder = write_run(tmp_path / "guarded")
    row = {"kind": "guard", "step": 60, "action": "promote", "layer": "up", "role": "input", "measure": "saturated",
           "value": 0.5, "threshold": 0.01, "before": "E4M3FN", "after": "BF16", "message": "up is wider"}  # fmt: skip
    with (folder / "journal.jsonl").open("ab") as file:
        file.write(encode(row))
    found = next(each for each in attention(RunReader(folder)) if each.rule == "guard")
    assert found.title == "The guard acted once" and "up is wider" in found.text and found.step == 60


@pytest.mark.parametrize(
    ("actions", "title", "step"),
    [
        (["wait", "promote"], "The guard acted once", 2),
        (["wait", "warn"], "The guard warned once", 2),
        (["wait", "wait"], "The guard took a closer look 2 times", 1),
    ],
)
def test_a_closer_look_of_the_guard_is_no_act_and_no_warning(tmp_path, actions, title, step):
    folder = write_run(tmp_path / "guarded")
    with (folder / "journal.jsonl").open("ab") as file:
        for at, action in enumerate(actions, 1):
            file.write(encode({"kind": "guard", "step": at, "action": action, "layer": None, "role": None}))
    found = next(each for each in attention(RunReader(folder)) if each.rule == "guard")
    assert (found.title, found.step) == (title, step)


def test_samples_of_every_step_are_said_to_be(tmp_path):
    said = checked(RunReader(write_run(tmp_path / "run", steps=5, every=1)))[0]
    assert "in 5 steps, one after the other: " in said


@pytest.mark.parametrize(("offset", "fires"), [(0.0, False), (0.2, True)])
def test_validation_loss_against_the_reference(tmp_path, offset, fires):
    reference = RunReader(write_run(tmp_path / "bf16"))
    run = RunReader(write_run(tmp_path / "narrow", offset=offset))
    found = [each for each in attention(run, reference) if each.rule == "reference"]
    assert len(found) == fires
    if fires:
        assert "0.200 nats above that of bf16" in found[0].text and "since step 25" in found[0].text


@pytest.mark.parametrize(("gone", "since"), [((75, 100), 125), ((200,), None)], ids=["again", "no more"])
def test_a_gap_to_the_reference_is_told_from_where_it_lasts_to_the_end(tmp_path, gone, since):
    def change(step: int, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"loss": row["loss"] + 0.2} if row["kind"] == "evaluation" and step not in gone else row

    reference = RunReader(write_run(tmp_path / "bf16"))
    run = RunReader(write_run(tmp_path / "narrow", change=change))
    found = [each for each in attention(run, reference) if each.rule == "reference"]
    assert [each.step for each in found] == ([since] if since else [])
    assert all(f"since step {since}." in each.text for each in found)


def test_a_run_that_ended_early(tmp_path):
    folder = write_run(tmp_path / "early")
    (folder / "config.yaml").write_text("steps: 500\n")
    found = [each for each in attention(RunReader(folder)) if each.rule == "journal"]
    assert [(each.severity, each.step) for each in found] == [("note", 200)] and "of 500" in found[0].text


def test_the_words_of_skips_count_rows_and_parameters(tmp_path):
    def change(step, row):
        name = {10: "a.weight", 20: "b.weight", 21: "a.weight", 22: "b.weight", 50: "c.weight"}.get(step)
        return row | {"skipped": True, "bad_parameter": name} if row["kind"] == "step" and name else row

    (found,) = found_in(tmp_path / "run", change=change)
    assert (found.severity, found.title, found.step) == ("look", "5 steps were skipped", 10)
    assert found.text == (
        "5 of 200 steps (0.025 of them) were skipped because a gradient was not finite, the first at step 10, at most "
        "3 in a row, from step 20. The first parameter with a gradient that was not finite was a.weight, at step 10 (2 "
        "times), later 2 other parameters."
    )


@pytest.mark.parametrize(
    ("most", "count", "severity"), [(3, 3, "serious"), (3, 2, "look"), (50, 9, "look"), (50, 10, "serious")]
)
def test_as_many_skips_as_stop_the_run_are_serious_and_ten_at_most(tmp_path, most, count, severity):
    folder = write_run(tmp_path / "run", change=steps(since=51, until=50 + count, skipped=True))
    (folder / "config.yaml").write_text(f"max_skips: {most}\nsteps: 200\n")
    run = RunReader(folder)
    (found,) = [each for each in attention(run) if each.rule == "skipped steps"]
    assert found.severity == severity
    assert f"skipped steps: {min(most, 10)} in a row or more" in " ".join(checked(run))
    if severity == "serious":
        assert found.title == f"{count} steps in a row were skipped at the smallest loss scale"
        assert f"with a loss scale of 1, from step 51 to step {50 + count}: " in found.text


@pytest.mark.parametrize(
    ("since", "until", "skipped", "severity", "said"),
    [
        (60, 61, True, "look", "2 losses are infinite or NaN, first at step 60. Those steps were skipped."),
        (
            60,
            61,
            False,
            "serious",
            "2 losses are infinite or NaN, first at step 60. Not all of those steps were skipped.",
        ),
        (199, 200, True, "serious", "first at step 199, up to the end. Those steps were skipped."),
    ],
)
def test_losses_that_are_not_finite_are_serious_unless_skipped_and_over(
    tmp_path, since, until, skipped, severity, said
):
    found = found_in(tmp_path / "run", change=steps(since=since, until=until, loss=math.inf, skipped=skipped))
    (found,) = [each for each in found if each.rule == "loss"]
    assert (found.severity, found.step) == (severity, since) and found.text.endswith(said)


def test_of_several_spikes_the_highest_above_its_band_is_told(tmp_path):
    high = {100: 6.0, 150: 8.0, 151: 9.0, 170: 7.0}

    def change(step, row):
        return row | {"loss": high[step]} if row["kind"] == "step" and step in high else row

    folder = write_run(tmp_path / "run", change=change)
    run = RunReader(folder)
    (found,) = [each for each in attention(run) if each.rule == "loss"]
    end = run.band_ends[150]  # before step 151
    assert end > run.band_ends[-1] + 0.01
    assert found.text == (
        f"At step 151 the loss was 9.000; the band ended at {end:.3f}. 3 spikes in all, the first at step 100; the "
        "loss came back."
    )


def test_counts_of_the_guard_and_of_layers_are_whole(tmp_path):
    rows = [{"name": f"l{at}", "status": "skipped", "reason": "why"} for at in range(3)]
    rows += [{"name": "up", "status": "converted", "backend": "emulated", "casts": {"input": "E4M3FN"}},
             {"name": "norm", "status": "converted", "backend": "torch", "casts": {}},
             {"name": "other", "status": "converted", "backend": "torch", "casts": {"input": "E4M3FN"}}]  # fmt: skip
    folder = write_run(tmp_path / "run", conversion=rows)
    with (folder / "journal.jsonl").open("ab") as file:
        for at in range(12):
            action, message = ("wait", "a look") if at == 0 else ("promote", f"act {at}")
            file.write(encode({"kind": "guard", "step": 30 + at, "action": action, "message": message}))
    (folder / "config.yaml").write_text("steps: 200\n")
    found = {(each.rule, each.severity): each for each in attention(RunReader(folder))}
    assert ("journal", "note") not in found  # it is at its end
    guard = found["guard", "look"]
    assert guard.title == "The guard acted 11 times"
    assert guard.text == "1 x wait, 11 x promote. First, at step 31: act 1."
    assert found["conversion", "look"].text == "3 (l0, l1, l2): why."
    assert found["conversion", "note"].text.endswith(" The other 2 of 3 converted layers need no emulation.")


def test_samples_at_uneven_distances_have_a_mean_distance(tmp_path):
    change = lambda step, row: {} if row["kind"] == "precision" and step == 20 else row  # noqa: E731
    run = RunReader(write_run(tmp_path / "run", steps=40, change=change))
    assert ", in 3 steps, one in every 15.0 on average: " in checked(run)[0]


@pytest.mark.parametrize(("apart", "severity"), [(16, "serious"), (20, "look")])
def test_skips_apart_are_serious_where_they_are_more_than_a_twentieth(tmp_path, apart, severity):
    change = lambda step, row: row | {"skipped": step % apart == 0} if row["kind"] == "step" else row  # noqa: E731
    (found,) = found_in(tmp_path / "run", change=change)  # 12 or 10 of 200, one at a time, without a loss scale
    assert (found.severity, found.step) == (severity, apart)


def test_trouble_that_comes_again_is_told_from_its_first_sample(tmp_path):
    def change(step, row):
        if row["kind"] == "precision" and (50 <= step <= 100 or step >= 150):
            row["layers"]["blocks.0.mlp.up"]["input"].update(saturated=0.5 if step >= 180 else 0.002, sqnr_db=20.0)
        return row

    (found,) = [each for each in found_in(tmp_path / "run", change=change) if each.rule == "saturation"]
    assert (found.severity, found.step) == ("serious", 50)
    assert found.text.endswith(
        "worst at step 180; first at step 50, in 12 of 20 sampled steps, and again since step 150 up to the last "
        "sample."
    )


@pytest.mark.parametrize(("since", "until"), [(200, 200), (50, 190)], ids=["once", "no more"])
def test_gradients_that_are_zero_once_or_no_more_are_not_dead(tmp_path, since, until):
    assert found_in(tmp_path / "run", change=cell("blocks.0.mlp.up", "grad", zero=1.0, since=since, until=until)) == []


@pytest.mark.parametrize(("below", "severity"), [(9.9, None), (10.0, "look"), (19.9, "look"), (20.0, "serious")])
def test_integers_are_judged_against_one_ratio(tmp_path, below, severity):
    change = cell("blocks.0.mlp.up", "exp_avg", sqnr_db=UNKNOWN_SQNR_DB - below)
    assert [each.severity for each in found_in(tmp_path / "run", change=change)] == ([severity] if severity else [])


@pytest.mark.parametrize(
    ("measure", "value", "said"),
    [
        ("flushed", 0.00451, "0.45 %"), ("lost", 0.0951, "9.5 %"), ("saturated", 0.634, "63 %"), ("zero", 0.1, "10 %"),
        ("sqnr_db", 12.345, "12.3 dB"), ("sqnr_db", math.inf, "exact"), ("sqnr_db", math.nan, "not finite"),
        ("amax", 1234.5, "1.23e+03"), ("scale", 0.001953125, "0.00195"), ("amax", math.inf, "infinite"),
    ],
)  # fmt: skip
def test_values_in_words(measure, value, said):
    assert amount(measure, value) == said


def test_a_single_sample_is_no_upper_bound_and_a_gradient_of_an_output_is_kept_wide_by_its_layer(tmp_path):
    change = cell("blocks.0.mlp.up", "grad_output", flushed=0.25, sqnr_db=12.0, since=100, until=100)
    (found,) = [each for each in found_in(tmp_path / "run", change=change) if each.rule == "flushed"]
    assert found.text.startswith(
        "25 % of its values that are not zero became zero in the cast (E5M2, per tensor), worst"
    )
    assert "first at step 100, in 1 of 20 sampled steps, not since step 100." in found.text
    assert '`recipe.for_layers("blocks.0.mlp.up", "bf16")`' in found.remedy and "E5M2" not in found.remedy
