"""Recipes in files go wherever names go, and say what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import narrowgauge as ng
from narrowgauge.cli.main import main
from narrowgauge.errors import RecipeError
from narrowgauge.recipes.files import read_recipe, recipe_text
from narrowgauge.recipes.serialize import to_dict
from narrowgauge.train.config import CUSTOM, TrainConfig

MIXED = ng.recipe("narrow8").replace(name="mixed").for_layers("*.down", "nvfp4").for_layers("blocks.0.*", "bf16")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "mixed.yaml"
    found.write_text(recipe_text(MIXED))
    return found


def test_a_file_is_the_recipe_with_fields_changed_like_any_other(path: Path) -> None:
    assert read_recipe(path) == MIXED == ng.recipe(str(path))
    assert ng.recipe(str(path), tf32=True) == MIXED.replace(tf32=True)
    blocks = [torch.nn.ModuleDict({"down": torch.nn.Linear(32, 32)}) for _ in range(2)]
    model, _ = ng.prepare(torch.nn.ModuleDict({"blocks": torch.nn.ModuleList(blocks)}), None, str(path))
    assert [row.status for row in ng.report(model)] == ["kept", "converted"]  # the last glob that matches wins
    with pytest.raises(RecipeError, match="unknown recipe field 'tf23'"):
        ng.recipe(str(path), tf23=True)


@pytest.mark.parametrize("name", ng.recipe_names())
def test_every_named_recipe_survives_a_file(name: str, tmp_path: Path) -> None:
    yaml, as_json = tmp_path / "a.yml", tmp_path / "a.json"
    yaml.write_text(recipe_text(ng.recipe(name), "a comment"))
    as_json.write_text(json.dumps(to_dict(ng.recipe(name))))
    assert read_recipe(yaml) == read_recipe(as_json) == ng.recipe(name)


@pytest.mark.parametrize("ending", ["yaml", "yml", "json"])
def test_a_name_with_a_files_ending_is_a_files(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"mine.{ending}"
    path.write_text(json.dumps(to_dict(MIXED)))  # which is YAML, too
    assert ng.recipe(str(path)) == MIXED
    with pytest.raises(RecipeError, match="expected a file with a recipe, found: No such file"):
        ng.recipe(f"gone.{ending}")


def test_a_recipe_as_text_begins_with_its_name_below_all_lines_of_a_comment(tmp_path: Path) -> None:
    text = recipe_text(MIXED, "first\n\nlast: [")
    assert text.startswith("# first\n#\n# last: [\nname: mixed\n")
    (tmp_path / "a.yaml").write_text(text)
    assert read_recipe(tmp_path / "a.yaml") == MIXED


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: [", "expected a file with a recipe, found: while parsing"),
        ("", "a.yaml: a recipe: expected a mapping"),
        ("- 1", "a.yaml: a recipe: expected a mapping"),
        ("nmae: x", "a.yaml: unknown recipe field 'nmae'; did you mean 'name'"),
        ("input: {format: E4M4}", "a.yaml: input format: unknown 'E4M4'"),
        (b"\xff\xfe\x00", "expected a file with a recipe, found: 'utf-8' codec"),
        ("[" * 100_000, "a.yaml: expected a file with a recipe, found: "),  # nested too deeply for Python
    ],
)
def test_what_is_no_recipe_names_the_file(text, message, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RecipeError, match=message):
        ng.recipe(str(path))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"gone.yaml: expected a file with a recipe, found: No such file"):
        ng.recipe(str(tmp_path / "gone.yaml"))


def test_a_configuration_spells_a_files_recipe_out(path: Path) -> None:
    config = TrainConfig.from_dict(
        {"recipe": str(path), "recipe_fields": {"tf32": True}, "switches": [{"after_step": 3, "recipe": str(path)}]}
    )
    spelled = config.spelled_out()
    assert (spelled.recipe, spelled.switches[0].recipe) == (CUSTOM, CUSTOM)
    expected = config.build_recipe()
    path.unlink()
    again = TrainConfig.from_yaml(spelled.to_yaml())
    assert again.build_recipe() == expected and expected.tf32
    plain = TrainConfig.from_dict({"recipe": "bf16"})
    assert plain.spelled_out() == plain


def test_commands_take_files(path: Path, capsys) -> None:
    assert main(["chart", str(path)]) == 0
    assert "mixed" in capsys.readouterr().out
    assert (
        main(
            [
                "plan",
                "--model",
                "gpt-125m",
                "--gpus",
                "1",
                "--memory-gb",
                "80",
                "--recipe",
                str(path),
                "--parallel.data",
                "1",
            ]
        )
        == 0
    )
    assert "mixed" in capsys.readouterr().out
