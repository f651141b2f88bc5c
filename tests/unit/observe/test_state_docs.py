"""docs/training-state.md: its table says what the ledger counts, and its examples run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.observe.ledger import Ledger

TEXT = (Path(__file__).parents[3] / "docs" / "training-state.md").read_text(encoding="utf-8")
COLUMNS = ("param", "master", "grad", "exp_avg", "exp_avg_sq", "total")


def table() -> dict[str, list[str]]:
    """The cells of the table of recipes, by its first column."""
    section = TEXT[TEXT.index("## What each recipe keeps") : TEXT.index("**Small parameters**")]
    lines = re.findall(r"^\| (`.*) \|$", section, re.MULTILINE)
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    return {row[0]: row[1:] for row in rows}


def recipe_of(title: str) -> ng.Recipe:
    name, *options = re.findall(r"`([^`]+)`", title)
    fields = dict(option.split("=") for option in options)
    return ng.recipe(name, **{field: int(value) for field, value in fields.items()})


def counted(recipe: ng.Recipe) -> Ledger:
    model = nn.Linear(512, 1024, bias=False)
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters()), recipe)
    model(torch.ones(1, 512)).float().sum().backward()
    optimizer.step()
    return ng.ledger(model, optimizer)


@pytest.mark.parametrize("title", table())
def test_the_bytes_are_those_that_the_ledger_counts(title: str) -> None:
    found = counted(recipe_of(title))
    sizes = {role: size / found.parameters for role, size in found.roles.items() if role not in ("scaling", "step")}
    sizes["total"] = sum(sizes.values())
    expected = [f"{sizes[role]:.2f}" if role in sizes else "" for role in COLUMNS]
    assert [cell.rpartition(" ")[2] for cell in table()[title]] == expected


def test_the_table_has_every_recipe_that_keeps_anything_else_than_float32() -> None:
    plain = ng.recipe("fp32")
    roles = ("param", "master", "grad", "exp_avg", "exp_avg_sq")
    kept = [
        name for name in ng.recipe_names()
        if any(getattr(ng.recipe(name), role) != getattr(plain, role) for role in roles)
    ]  # fmt: skip
    named = {recipe_of(title).name for title in table()}
    assert named == {"fp32", *kept} - {"fp16_pure"}
    assert "(`fp16_pure`: parameters as `fp8_lm_o1`)" in " ".join(TEXT.split())
    assert ng.recipe("fp16_pure").param == ng.recipe("fp8_lm_o1").param


def test_the_formats_are_those_of_the_recipe() -> None:
    words = {
        "float32": "FP32", "float16, scaled": "FP16", "bfloat16": "BF16", "E4M3": "E4M3FN", "8-bit residual": "INT8",
        "INT8 tiles": "INT8", "UINT8 tiles": "UINT8", "INT4 tiles": "INT4", "UINT4 tiles": "UINT4",
    }  # fmt: skip
    for title, cells in table().items():
        recipe = recipe_of(title)
        for role, cell in zip(COLUMNS[:-1], cells, strict=False):
            spec = getattr(recipe, role)
            assert (spec.format.name if spec else "") == words.get(cell.partition(":")[0], ""), (title, role)


def test_the_examples_run() -> None:
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(code, names)


def test_small_parameters_are_as_the_page_says() -> None:
    said = re.search(r"fewer values than the recipe's `min_state_size`, (\d+)", TEXT)
    assert said is not None
    assert {ng.recipe(name).min_state_size for name in ng.recipe_names()} == {int(said[1])}
