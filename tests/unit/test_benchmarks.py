"""The measuring scripts run, and the README says what their result files say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from narrowgauge.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


def run_script(name: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment})


@pytest.fixture
def checkout(tmp_path):
    """A copy of what `tables.py` reads and writes, with two results of one topic and one of another."""
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    shutil.copy(BENCHMARKS / "tables.py", tmp_path / "benchmarks")
    (tmp_path / "README.md").write_text("before\n<!-- figures: begin -->\nold\n<!-- figures: end -->\nafter\n")
    for name, figures in {
        "2026-01-01-cpu-speed": {"ratio": {"measured": 9.0, "at_most": 1.0}},
        "2026-02-01-cpu-speed": {"ratio": {"measured": 0.5, "at_most": 1.0}},
        "2026-01-05-cpu-loss": {"gap": {"measured": 0.5, "at_least": 1.0}},
    }.items():
        result = {
            "command": "python benchmarks/x.py",
            "hardware": {"device": "a CPU", "threads": 2},
            "figures": figures,
        }
        (tmp_path / "benchmarks" / "results" / f"{name}.json").write_text(json.dumps(result))
    return tmp_path


def run_tables(checkout: Path, *words: str) -> int:
    return subprocess.run([sys.executable, checkout / "benchmarks" / "tables.py", *words], timeout=60).returncode


def test_the_table_has_the_newest_results_losses_among_the_wins(checkout):
    assert run_tables(checkout, "--check") == 1
    assert run_tables(checkout) == 0
    text = (checkout / "README.md").read_text()
    assert "| ratio | 0.500 | <= 1 | met |" in text
    assert "| gap | 0.500 | >= 1 | missed |" in text
    assert "9.000" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert run_tables(checkout, "--check") == 0


def test_the_readme_says_what_the_result_files_say():
    done = run_script("tables", "--check")
    assert done.returncode == 0, done.stdout


def test_fp8_layers_save_a_quarter_of_what_float32_layers_do():
    done = run_script("activation_memory", "--batch", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok") == 4


@pytest.mark.slow
def test_the_gpu_check_passes_on_the_cpu_itself():
    done = run_script("gpu_check", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed" in done.stdout


def test_the_gpu_check_says_so_where_there_is_no_gpu():
    done = run_script("gpu_check", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "no CUDA device" in done.stdout


@pytest.mark.slow
def test_bench_prints_json_on_standard_output_and_leaves_the_result_files_alone(capfd):
    before = sorted((BENCHMARKS / "results").glob("*"))
    assert main(["bench", "casts", "--json"]) in (0, 1)  # 1: a figure is missed, which a busy machine may do
    assert json.loads(capfd.readouterr().out)["figures"]
    assert sorted((BENCHMARKS / "results").glob("*")) == before


def test_bench_outside_a_checkout_says_where_the_scripts_are(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("narrowgauge.__file__", str(tmp_path / "site-packages" / "narrowgauge" / "__init__.py"))
    assert main(["bench", "casts"]) == 2
    assert "part of the repository" in capsys.readouterr().err


@pytest.mark.parametrize("script", sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem != "common"))
def test_every_script_explains_itself(script):
    done = run_script(script, "--help")
    assert done.returncode == 0, done.stderr
    assert f"benchmarks/{script}.py" in done.stdout
