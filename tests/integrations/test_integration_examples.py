"""The examples of accelerate, PEFT and Lightning run, learn, and leave files that others read; the pages show them."""

from __future__ import annotations

import importlib
import runpy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

import narrowgauge as ng

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_state() -> Iterator[None]:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def example(name: str) -> dict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of lightning and what it loads
        return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))


def test_accelerates_loop_learns_in_8_bits_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = example("accelerate_loop")["train"]
    losses = train("narrow8", 6, str(tmp_path), cpu=True)
    assert losses[-1] < 0.7 * losses[0]
    AcceleratorState._reset_state(True)
    assert train("narrow8", 1, str(tmp_path), resume=True, cpu=True)[0] < 0.7 * losses[0]
    printed = capsys.readouterr().out
    assert "converted" in printed and "exp_avg_sq" in printed


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_learns_on_a_base_in_fp8_and_stock_libraries_read_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    module = example("peft_lora")
    losses, merged = module["train"]("narrow8", 8, str(tmp_path))
    assert losses[-1] < 0.96 * losses[0]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert all(torch.equal(value, merged.state_dict()[name]) for name, value in loaded.state_dict().items())
    peft.PeftModel.from_pretrained(module["make_base"](), tmp_path / "adapter")


@pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated", "ignore:The number of training")
def test_a_lightning_module_learns_in_8_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    module, trainer = example("lightning_module")["train"]("narrow8", 8, str(tmp_path), **options)
    assert module.losses[-1] < 0.7 * module.losses[0]
    assert ng.ledger(module, trainer.optimizers[0]).per_parameter < 6.5


@pytest.mark.parametrize(
    ("page", "name", "lines"),
    [
        ("accelerate", "accelerate_loop", ["from narrowgauge.integrations.accelerate import Accelerator"]),
        ("peft", "peft_lora", ["from narrowgauge.integrations.peft import merge_and_unload, save_adapter"]),
        ("lightning", "lightning_module", ["from narrowgauge.integrations.lightning import Precision"]),
    ],
)
def test_the_pages_show_the_lines_of_the_examples(page: str, name: str, lines: list[str]) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    code = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    assert f"examples/{name}.py" in text
    added = [line for line in text.splitlines() if line.startswith("+") and "import" not in line]
    assert 1 <= len(added) <= 3
    for line in lines:
        assert line in code and line in text.replace("+", "")


@pytest.mark.slow
def test_the_benchmark_of_bert_trains_converts_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = importlib.import_module("accelerate_bert")
    monkeypatch.setattr("common.RESULTS", tmp_path)
    words = ["--recipes", "narrow8", "--seeds", "1", "--steps", "2", "--evaluated", "32", "--json"]
    monkeypatch.setattr(sys, "argv", ["benchmarks/accelerate_bert.py", *words])
    monkeypatch.setattr(script, "TRAINED", 64)
    script.main()  # its figures mean little after two steps
    printed = capsys.readouterr().out
    assert "linear layers of BERT converted by narrow8, beside norms: 13.0000" in printed
    assert len(list(tmp_path.glob("*-accelerate_bert.json"))) == 1
