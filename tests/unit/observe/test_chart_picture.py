"""The precision chart as a picture: every cell is what the recipe casts to, and can be read."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import narrowgauge as ng
from narrowgauge.numerics import formats
from narrowgauge.observe.chart_picture import CELL, COLOURS, GROUPS, cells, picture, words
from narrowgauge.observe.picture import DARK, STYLE
from narrowgauge.recipes.chart import titled

DOCS = Path(__file__).resolve().parents[3] / "docs"
SVG = "{http://www.w3.org/2000/svg}"


def drawn(svg: str) -> tuple[dict[str, tuple[str, int]], list[str]]:
    """({where: (texts, bits)} of the cells, where those are that hold nothing)."""
    root = ElementTree.fromstring(svg)
    full, empty = {}, []
    for group in root.iter(f"{SVG}g"):
        title, rect, *texts = list(group)
        where = title.text.partition(":")[0], title.text.split(": ")[1]
        full[" ".join(where)] = " ".join(t.text for t in texts), int(rect.get("class").removeprefix("b"))
    for rect in root.iter(f"{SVG}rect"):
        if rect.get("class") == "none":
            empty.append(rect[0].text)
    return full, empty


def test_every_recipe_and_role_has_a_cell_coloured_by_its_bits():
    full, empty = drawn(picture(titled()))
    columns = sum(len(group.columns) for group in GROUPS)
    assert len(full) + len(empty) == columns * len(ng.recipe_names())
    assert full["nvfp4, output weight"] == ("E2M1FN 16x16 NVFP4", 4)
    assert full["nvfp4, grad_weight grad_output"] == ("E2M1FN ~ 1x16 NVFP4", 4)
    assert full["mxfp6, output input"] == ("E3M2FN 1x32 E8M0", 6)
    assert full["tf32, output input"] == ("TF32", 19)
    assert full["tf32, saved activation"] == ("FP32", 32)  # how float32 is multiplied, not how it is kept
    assert full["narrow8, stored exp_avg_sq"] == ("UINT8 √ 1x128", 8)
    assert full["narrow8, stored master"] == ("+INT8", 8)
    assert full["fp8_rowwise_gw_hp, grad_weight input"] == ("BF16", 16)
    assert full["fp8_rowwise_gw_hp, grad_input weight"] == ("E4M3FN tensor", 8)
    assert full["fp8_delayed, output input"] == ("E4M3FN delayed", 8)
    assert full["bf16, sent grad_comm"] == ("FP32", 32)  # as it is stored
    assert full["bf16_pure, sent param_comm"][0] == "BF16 ~"
    masters = {each.partition(",")[0] for each in empty}
    assert masters == set(ng.recipe_names()) - {"fp8_lm_o3", "narrow8"}


def test_operands_are_those_of_the_products():
    found = cells(ng.recipe("fp8_block"))
    assert str(found["output input"].granularity) == str(found["grad_weight input"].granularity) == "1x128 blocks"
    assert str(found["saved activation"].granularity) == "128x1 blocks"  # as it lies: tokens by features
    assert words(found["output weight"]) == ("E4M3FN", "128x128")


def test_schedules_and_layers_of_their_own_have_rows():
    recipe = ng.recipe("narrow8").for_layers("*.down", "bf16").switch_at(100, ng.recipe("narrow8", tf32=True))
    names = [name for name, _ in titled([recipe])]
    assert names == ["narrow8", "narrow8: *.down", "narrow8 after step 100"]
    svg = picture(titled([recipe]))
    assert "narrow8: *.down, output: input: BF16" in svg
    assert "narrow8, output: input: E4M3FN" in svg


def colour(theme: int, rule: str) -> str:
    """Of a rule of the shared style, e.g. "svg { background: #ffffff" in light."""
    return re.search(rule + r": (#\w{6})", (STYLE, DARK)[theme])[1]


INK, PAPER = ([colour(theme, rule) for theme in (0, 1)] for rule in (r"text \{ fill", r"svg \{ background"))


def luminance(colour: str) -> float:
    """WCAG 2.1, relative luminance."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("theme", [0, 1])
@pytest.mark.parametrize("fill", [*(pair for pair in COLOURS.values()), PAPER])
def test_text_has_contrast_in_light_and_dark(fill, theme):
    low, high = sorted(map(luminance, (fill[theme], INK[theme])))
    assert (high + 0.05) / (low + 0.05) >= 4.5


def test_every_width_of_a_format_that_is_cast_to_has_a_colour():
    assert set(COLOURS) == {fmt.bits for fmt in formats.ALL.values()}


def test_no_text_is_wider_than_its_cell():
    for name in ng.recipe_names():
        for spec in filter(None, cells(ng.recipe(name)).values()):
            fmt, scale = words(spec)
            assert len(fmt) * 8 <= CELL and len(scale) * 7 <= CELL  # characters of the fonts named, of 13 and 11 pixels


def test_the_picture_in_the_docs_is_todays():
    assert (DOCS / "precision-chart.svg").read_text(encoding="utf-8") == picture(titled()), (
        "run `narrowgauge chart --picture docs/precision-chart.svg`"
    )


def test_names_are_escaped():
    assert "&lt;b&gt;" in picture([("<b>", ng.recipe("bf16"))])
