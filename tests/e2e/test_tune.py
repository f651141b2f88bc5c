"""From `narrowgauge tune` to a run by the recipe that it wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from narrowgauge.cli.main import main
from narrowgauge.recipes.files import read_recipe
from narrowgauge.train.run_folder import RunFolder

QUICK = ["--choices", "fp8_current", "nvfp4", "--batches", "2", "--probe-batch-size", "1"]


@pytest.fixture
def words(make_config, tmp_path: Path) -> list[str]:
    path = tmp_path / "config.yaml"
    text = make_config("base", steps=4, eval_every=0, save_every=2).to_yaml()
    path.write_text(
        "\n".join(line for line in text.splitlines() if not line.startswith(("name:", "steps:", "switches:")))
    )
    return ["--config", str(path)]


def test_a_recipe_is_tuned_trained_with_and_resumed_without_its_file(words, tmp_path: Path, capsys) -> None:
    recipe, picture = tmp_path / "tuned.yaml", tmp_path / "tuned.svg"
    command = ["tune", *words, *QUICK, "--steps", "2", "--output", str(recipe), "--picture", str(picture)]
    assert main(command) == 0
    shown = capsys.readouterr().out
    for part in ("what each choice costs a layer", "do parts add up?", "Pareto front", "short runs", f"wrote {recipe}"):
        assert part in shown
    assert "measuring 4 layers x 2 choices on 2 batches" in shown
    assert recipe.read_text().startswith("# narrowgauge tune --config") and picture.read_text().startswith("<svg")
    assert not list(tmp_path.glob(".writing-*"))

    training = ["train", *words, "--steps", "4", "--name", "by-tuned", "--recipe", str(recipe)]
    assert main(training) == 0
    assert "recipe tuned on cpu" in capsys.readouterr().out
    folder = RunFolder(tmp_path / "runs" / "by-tuned")
    assert folder.read_config().build_recipe() == read_recipe(recipe)
    recipe.unlink()
    shutil.rmtree(folder.checkpoint(4))
    assert main(["resume", str(folder.path)]) == 0
    capsys.readouterr()
    assert main(["eval", str(folder.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"] == "tuned"


def test_a_run_is_where_it_starts_and_json_says_all(words, tmp_path: Path, capsys) -> None:
    assert main(["train", *words, "--steps", "4", "--name", "base"]) == 0
    capsys.readouterr()
    recipe = tmp_path / "tuned.json"
    command = ["tune", str(tmp_path / "runs" / "base"), *QUICK, "--steps", "0", "--output", str(recipe), "--json"]
    assert main(command) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["output"] == str(recipe) and "reading held-out text, all layers wide" in captured.err
    assert [each["name"] for each in found["contenders"]][:2] == ["all bf16", "all nvfp4"]
    assert len(found["sensitivity"]) == 4 * 2 and all(len(each["loss_changes"]) == 2 for each in found["sensitivity"])
    assert read_recipe(recipe).name == "tuned"


def test_a_budget_that_nothing_meets_writes_nothing(words, tmp_path: Path, capsys) -> None:
    recipe = tmp_path / "tuned.yaml"
    command = ["tune", *words, *QUICK, "--steps", "2", "--bytes-per-token", "1", "--output", str(recipe)]
    assert main(command) == 2
    captured = capsys.readouterr()
    assert "the nearest is" in captured.err and "with 4 in nvfp4" in captured.err
    assert "training" not in captured.out and not recipe.exists()


def test_an_interrupt_writes_nothing(words, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    from narrowgauge.tune import tuner

    def interrupt(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(tuner, "short_run", interrupt)
    recipe = tmp_path / "tuned.yaml"
    assert main(["tune", *words, *QUICK, "--steps", "2", "--output", str(recipe)]) == 130
    assert not recipe.exists() and "interrupted" in capsys.readouterr().err
