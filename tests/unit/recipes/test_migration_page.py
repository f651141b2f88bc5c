"""docs/migration.md names nothing that is not there."""

import re
from pathlib import Path

import pytest

import narrowgauge as ng
from narrowgauge.ops.experts import GroupedLinear

TEXT = (Path(__file__).parents[3] / "docs" / "migration.md").read_text(encoding="utf-8")
CODE = re.findall(r"`([^`]+)`", TEXT)


@pytest.mark.parametrize("name", sorted({name for code in CODE for name in re.findall(r"\bng((?:\.\w+)+)", code)}))
def test_every_name_of_the_page_is_there(name):
    found = ng
    for part in name.strip(".").split("."):
        found = getattr(found, part)


def test_every_recipe_of_the_page_is_there():
    named = {name for code in CODE for name in re.findall(r'(?:optimizer|model), "(\w+)"\)|ng\.recipe\("(\w+)"', code)}
    quoted = {name for code in CODE for name in re.findall(r'^"(\w+)"$', code)}
    recipes = {part for pair in named for part in pair if part} | quoted
    assert {"narrow8", "fp8_lm_o2", "fp8_lm_o3", "bf16", "mxfp8"} <= recipes <= set(ng.recipe_names())


def test_calls_of_the_page_take_what_it_gives_them():
    spec = ng.CastSpec(ng.formats.E4M3FN, ng.Block(1, 256))
    assert ng.optim.AdamW.__init__.__kwdefaults__.keys() >= {"exp_avg", "exp_avg_sq", "master", "offload"}
    assert ng.optim.StateFormats(spec, spec).exp_avg == spec
    assert ng.recipe("narrow8", moment_bits=4).min_state_size == 4096
    assert ng.recipe("bf16").replace(exp_avg=spec, exp_avg_sq=spec).exp_avg_sq == spec
    assert ng.recipes.from_accelerate({"backend": "TE"}).name
    assert GroupedLinear.__module__ == "narrowgauge.ops.experts"
