"""The best layout, the largest model, and the picture of it."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

import narrowgauge as ng
from narrowgauge.models.presets import preset
from narrowgauge.observe.plan_layout import Spread, outline
from narrowgauge.observe.plan_picture import billions, picture
from narrowgauge.observe.plan_search import Work, best, family, given, largest
from narrowgauge.observe.planner import plan

SVG = "{http://www.w3.org/2000/svg}"


def test_a_model_that_fits_one_gpu_gets_replicas_and_no_more():
    found = best("gpt-125m", "narrow8", 4, 80)
    assert found.fits and found.plan.spread == Spread(data=4) and found.plan.checkpointing == "none"


def test_a_larger_one_is_sharded_and_its_peak_lies_within_the_budget():
    found = best("gpt-13b", "narrow8", 16, 80)
    assert found.fits and found.plan.spread.shard > 1 and found.plan.spread.ranks == 16
    assert found.plan.peak <= 80e9
    again = plan("gpt-13b", "narrow8", found.plan.spread, checkpointing=found.plan.checkpointing)
    assert again == found.plan


def test_where_nothing_fits_the_nearest_is_given_with_what_it_lacks():
    found = best("gpt-175b", "bf16", 8, 80)
    assert not found.fits
    assert found.plan.missing(80e9) == found.plan.peak - 80_000_000_000 > 0
    # 16 bytes a parameter over 8 GPUs, whatever else there is
    assert found.plan.state >= 16 * found.plan.parameters / 8
    assert largest("bf16", 1, 0.01) == (None, None)


def test_narrow_states_make_room_for_larger_models():
    work = Work(checkpointing="full")
    found = {recipe: largest(recipe, 8, 80, work) for recipe in ("bf16", "narrow8")}
    sizes = {recipe: outline(member).parameters for recipe, (_, member) in found.items() if member}
    # at most the budget over the bytes of a parameter, and not far below it
    for recipe, bytes_each in (("bf16", 16.0), ("narrow8", 6.06)):
        assert 0.75 < sizes[recipe] * bytes_each / 640e9 < 1.0
    assert found["narrow8"][0] == "llama3-70b" and found["bf16"][0] == "gpt-13b"
    # the next of the family does not fit
    after = family(found["narrow8"][1].layers + 1)
    assert not best(after, "narrow8", 8, 80, work).fits


def test_members_of_the_family_are_of_gpt3s_sizes():
    for blocks, name in ((32, "gpt-6.7b"), (40, "gpt-13b"), (96, "gpt-175b")):
        assert outline(family(blocks)).parameters == outline(preset(name)).parameters


@pytest.mark.parametrize(
    ("gpus", "memory_gb", "error"),
    [
        (0, 80, "gpus=0"), (-8, 80, "gpus=-8"), (10**12, 80, "gpus=1000000000000"), (8, 0, "memory_gb=0"),
        (8, -1, "memory_gb=-1"), (8, float("nan"), "memory_gb=nan"), (8, float("inf"), "memory_gb=inf"),
        (8, 10**9, "at most 1,000,000"), (True, 80, "gpus=True"),
    ],
)  # fmt: skip
def test_clusters_that_no_one_has_are_refused(gpus, memory_gb, error):
    with pytest.raises(ng.NarrowgaugeError, match=error):
        best("gpt-125m", "bf16", gpus, memory_gb)


def test_a_given_layout_has_to_have_all_gpus():
    with pytest.raises(ng.NarrowgaugeError, match="of 4 ranks, and there are 8 GPUs"):
        given("gpt-125m", "bf16", Spread(shard=4), 8, 80)
    assert given("gpt-125m", "bf16", Spread(shard=8), 8, 80).fits


def test_the_picture_shows_every_number_once_and_is_xml():
    found = {"bf16": {8: 35e9, 16: 0}, "narrow8 <&>": {8: 101e9, 16: 205e9}}
    root = ElementTree.fromstring(picture(found, 'Largest "GPT"', "a note"))
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert [texts.count(label) for label in ("35B", "101B", "205B", "nothing fits", "8", "16")] == [1] * 6
    assert "narrow8 <&>" in texts and root.get("aria-label") == 'Largest "GPT"'
    dots = [float(each.get("cx")) for each in root.iter(f"{SVG}circle") if float(each.get("cy")) > 132]
    assert dots == sorted(dots) and len(dots) == 3  # larger models stand further to the right
    assert "prefers-color-scheme: dark" in next(root.iter(f"{SVG}style")).text


def test_sizes_in_words():
    assert [billions(size) for size in (125e6, 6.7e9, 175e9, 2.5e12, 10)] == ["125M", "6.7B", "175B", "2.5T", "10"]
