"""docs/recipes.md: every recipe and option is there, and its examples run."""

import inspect
import re
from pathlib import Path

import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.recipes import library
from narrowgauge.recipes.spec import ROLES

TEXT = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table after a heading."""
    table = re.search(r"\n\n(\|.*?)\n\n", TEXT[TEXT.index(heading) :], re.DOTALL)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[1].splitlines()[2:]]


def test_the_table_has_every_recipe_in_order():
    assert [row[0].strip("` ") for row in rows("# Recipes")] == ng.recipe_names()


def test_the_table_has_every_option_and_its_default():
    found: dict[str, dict[str, str]] = {}
    for names, options, values in rows("## Options"):
        for name in re.findall(r"`(\w+)`", names):
            found.setdefault(name, {}).update(dict.fromkeys(re.findall(r"`(\w+)`", options), values))
    for name in ng.recipe_names():
        options = inspect.signature(getattr(library, name)).parameters
        assert set(found.get(name, {})) == set(options), name
        for option, parameter in options.items():
            default = re.match(r"`([^`]+)`", found[name][option])
            if default is not None:  # else as another library has it
                value = eval(default[1])  # noqa: S307 (our own text)
                assert ng.recipe(name, **{option: value}) == ng.recipe(name), (name, option, parameter)


def test_the_roles_are_those_of_a_recipe():
    named = [role for row in rows("## Roles") for role in re.findall(r"`(\w+)`", row[0])]
    assert sorted(named) == sorted([*ROLES, "compute"])


def test_the_examples_run():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    names = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    for code in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(code, names)
    assert ng.report(names["model"]).counts()["converted"] == 2
