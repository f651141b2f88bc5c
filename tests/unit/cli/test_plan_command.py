"""`narrowgauge plan` says what fits, and by how much what does not."""

from __future__ import annotations

import json

import pytest

import narrowgauge as ng
from narrowgauge.cli.main import main
from narrowgauge.recipes.files import recipe_text

GPT = ("plan", "--model", "gpt-125m", "--gpus", "4", "--memory-gb", "80")


def test_the_table_has_each_recipe_and_says_what_fits(capsys):
    assert main([*GPT, "--recipe", "bf16", "narrow8"]) == 0
    shown = capsys.readouterr().out
    assert "B parameters, on 4 GPUs of 80 GB" in shown
    for word in ("bf16", "narrow8", "param", "exp_avg_sq", "activation", "peak", "sent: grad_comm", "data 4"):
        assert word in shown
    assert shown.count("fits, ") == 2


def test_json_has_bytes_by_role_and_the_layout(capsys):
    assert main([*GPT, "--recipe", "narrow8", "--parallel.shard", "4", "--checkpointing", "full", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["plans"]
    assert found["parallel"]["shard"] == 4 and found["fits"] is True and found["missing"] < 0
    assert found["state"] == sum(size for role, size in found["bytes"].items() if role in _STATE)
    assert found["peak"] >= found["state"]


_STATE = ("param", "master", "grad", "exp_avg", "exp_avg_sq", "scaling", "buffer")


def test_a_budget_that_nothing_fits_says_how_much_is_missing(capsys):
    assert main(["plan", "--model", "gpt-13b", "--gpus", "1", "--memory-gb", "8", "--recipe", "bf16"]) == 0
    assert "does not fit: 197." in capsys.readouterr().out  # 16 bytes a parameter are 206 GB


def test_a_picture_is_written(tmp_path, capsys):
    path = tmp_path / "largest.svg"
    assert main([*GPT, "--recipe", "narrow8", "--largest", "--picture", str(path), "--checkpointing", "full"]) == 0
    shown = capsys.readouterr().out
    assert f"wrote {path}" in shown and "largest that fits on 4 GPUs of 80 GB" in shown
    assert path.read_text().startswith("<svg") and "GPUs" in path.read_text()


def test_it_says_how_many_layers_a_recipe_names(tmp_path, capsys):
    path = tmp_path / "tuned.yaml"
    recipe = ng.recipe("narrow8").replace(name="tuned").for_layers("blocks.[0-3].*", input=ng.CastSpec(ng.formats.E5M2))
    path.write_text(recipe_text(recipe, "of a smaller model"))
    assert main([*GPT, "--recipe", str(path), "narrow8", "--checkpointing", "full"]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "casts of their own" in line]
    assert told == ["tuned: casts of their own for 16 of 49 linear layers; the others multiply as it says for all"]
    assert main([*GPT, "--recipe", str(path), "narrow8", "--checkpointing", "full", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert [plan["own_casts"] for plan in plans] == [[16, 49], None]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--model", "gpt-13", "--gpus", "8", "--memory-gb", "80"], "did you mean 'gpt-13b'?"),
        (["--model", "gpt-13b", "--gpus", "0", "--memory-gb", "80"], "gpus=0: expected a whole number from 1"),
        (["--model", "gpt-13b", "--gpus", "8", "--memory-gb", "-1"], "memory_gb=-1"),
        (["--model", "gpt-13b", "--gpus", "8", "--memory-gb", "80", "--recipe", "nrrow8"], "did you mean 'narrow8'?"),
        (["--model", "gpt-13b", "--gpus", "8", "--memory-gb", "80", "--parallel.tensor", "3"], "of 3 ranks"),
        (["--model", "gpt-13b", "--gpus", "7", "--memory-gb", "80", "--parallel.tensor", "7"], "40 does not divide"),
        (["--model", "gpt-13b", "--gpus", "8"], "--memory-gb"),
        (["--model", "gpt-13b", "--gpu", "8", "--memory-gb", "80"], "required: --gpus"),
        (["--model", "gpt-13b", "--gpus", "8", "--memory-gb", "80", "--checkpointing", "all"], "expected none or full"),
    ],
)
def test_wrong_words_exit_with_2(words, error, capsys):
    assert main(["plan", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and error in captured.err
