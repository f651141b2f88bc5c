"""The measuring scripts run, and the pages say what their result files say."""

from __future__ import annotations

import functools
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from narrowgauge.cli.main import main
from narrowgauge.recipes.casts import WIRE
from narrowgauge.train.config import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
LIBRARIES = ("common", "loopback", "namespaces", "reference")  # of the scripts


def run_script(name: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment})


class Done(NamedTuple):
    """What a script's `main` returned and printed."""

    returncode: int
    stdout: str


@pytest.fixture
def run_here(monkeypatch, capsys, one_thread, seeded) -> Callable[..., Done]:
    """run_here(name, *words): as `run_script`, in this process; `amend` sets constants of the script."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def run(name: str, *words: str, results: Path | None = None, **amend: object) -> Done:
        module = importlib.import_module(name)
        monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", *words])
        if results is not None:
            monkeypatch.setattr("common.RESULTS", results)
        for constant, value in amend.items():
            monkeypatch.setattr(module, constant, value)
        try:
            code = module.main()
        except SystemExit as end:
            code = end.code
        return Done(int(code or 0), capsys.readouterr().out)

    return run


@pytest.fixture
def checkout(tmp_path):
    """A copy of what `tables.py` reads and writes, with two results of one topic and one of another."""
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    shutil.copy(BENCHMARKS / "tables.py", tmp_path / "benchmarks")
    (tmp_path / "docs").mkdir()
    for page in ("README.md", "docs/figures.md"):
        (tmp_path / page).write_text("before\n<!-- figures: begin -->\nold\n<!-- figures: end -->\nafter\n")
    for name, figures in {
        "2026-01-01-cpu-speed": {"ratio": {"measured": 9.0, "at_most": 1.0}},
        "2026-02-01-cpu-speed": {"ratio": {"measured": 0.5, "at_most": 1.0}},
        "2026-01-05-cpu-loss": {
            "gap": {"measured": 0.5, "at_least": 1.0},
            "above": {"measured": 0.5, "at_least": 0.1, "at_most": 0.4},
            "within": {"measured": -0.01, "expected": 0.0, "at_least": -0.03, "at_most": 0.03},
            "lost": {"measured": float("nan"), "at_most": 1.0},
            "|a - b|": {"measured": 0.5, "at_most": 1.0},
        },
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
    summary, text = ((checkout / page).read_text() for page in ("README.md", "docs/figures.md"))
    assert "| ratio | 0.500 | <= 1 | met |" in text
    assert "| gap | 0.500 | >= 1 | missed |" in text
    assert "| above | 0.500 | 0.1 to 0.4 | missed |" in text
    assert "| within | -0.010 | -0.03 to 0.03 | met |" in text
    assert "| lost | nan | <= 1 | missed |" in text
    assert "| \\|a - b\\| | 0.500 | <= 1 | met |" in text
    assert "`2026-02-01-cpu-speed.json` (a CPU, 2 threads)" in text
    assert "| x.py | 3 of 6 | [`x.py`](benchmarks/x.py) |" in summary
    assert [line for line in summary.splitlines() if line.startswith("- ")] == [
        "- gap: 0.500, goal >= 1",
        "- above: 0.500, goal 0.1 to 0.4",
        "- lost: nan, goal <= 1",
    ]
    for page in (summary, text):
        assert "9.000" not in page and page.startswith("before\n") and page.endswith("after\n")
    assert run_tables(checkout, "--check") == 0


def test_the_pages_say_what_the_result_files_say():
    done = run_script("tables", "--check")
    assert done.returncode == 0, done.stdout


def test_fp8_layers_save_a_quarter_of_what_float32_layers_do(run_here):
    done = run_here("activation_memory", "--batch", "2")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("ok") == 4


@pytest.mark.slow
def test_the_gpu_check_passes_on_the_cpu_itself(run_here):
    # every check of every variant; a padded size and one that is not, and training that has begun
    done = run_here("gpu_check", "--device", "cpu", SIZES=((64, 64, 64), (7, 33, 17)), TRAINING_STEPS=2)
    assert done.returncode == 0, done.stdout
    assert "0 failed" in done.stdout


def test_the_gpu_check_says_so_where_there_is_no_gpu(run_here, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run_here("gpu_check")
    assert done.returncode == 2
    assert "no CUDA device" in done.stdout


@pytest.mark.slow
def test_bench_prints_json_on_standard_output_and_leaves_the_result_files_alone(capfd):
    before = sorted((BENCHMARKS / "results").glob("*"))
    assert main(["bench", "sqnr", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["figures"]
    assert sorted((BENCHMARKS / "results").glob("*")) == before


def test_bench_outside_a_checkout_says_where_the_scripts_are(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("narrowgauge.__file__", str(tmp_path / "site-packages" / "narrowgauge" / "__init__.py"))
    assert main(["bench", "casts"]) == 2
    assert "part of the repository" in capsys.readouterr().err


def result_of(done: Done, folder: Path) -> dict:
    """The one result file that a script has written."""
    (path,) = folder.glob("*.json")
    assert str(path) in done.stdout
    return json.loads(path.read_text())


def test_a_rows_window_has_two_sides_and_follows_from_its_expected_distance(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from ablations import ROWS, YARDSTICKS

    windows = {name: row.window for name, row in ROWS.items()}
    assert windows["exp_avg E4M3"] == (-0.03, 0.03)
    assert windows["exp_avg_sq FP16, unscaled"] == (0.788, 3.152)  # half and twice 3.203 - 1.627
    assert {row.yardstick for row in ROWS.values()} == set(YARDSTICKS)
    assert all(row.window[0] > 0.03 for row in ROWS.values() if row.breaks)  # no break passes for harmless


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:recipe 'fp32' stores parameters in bfloat16 without a master copy")  # a row's point
def test_every_row_of_the_ablations_trains(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import ablations
    import reference

    batch = reference.sample(reference.load_text(), 1, torch.Generator().manual_seed(0))
    settings = ablations.YARDSTICKS | {name: row.setting for name, row in ablations.ROWS.items()}
    for name, setting in settings.items():
        model, optimizers = reference.build(setting, seed=0)
        weight = model.blocks[1].attention.qkv.weight
        before = weight.detach().clone()
        model(*batch)[1].backward()
        for optimizer in optimizers:
            optimizer.step()
        assert not torch.equal(weight, before), name
        assert reference.bytes_per_parameter(model, optimizers) < 16.01, name


@pytest.mark.slow
def test_ablations_compare_each_row_with_its_yardstick_and_miss_what_does_not_break(run_here, tmp_path):
    rows = ("product with one channel times ten", "exp_avg E4M3", "exp_avg_sq FP16, unscaled")
    words = ("--rows", *rows, "--steps", "1", "--seeds", "1", "--json")
    done = run_here("ablations", *words, "--workers", "1", results=tmp_path)
    assert done.returncode == 1, done.stdout  # nothing breaks in one step
    result = result_of(done, tmp_path)
    losses = {name: repeats[0]["validation_loss"] for name, repeats in result["repeats"].items()}
    assert set(losses) == {"fp32", *rows[1:]}
    figures = result["figures"]
    free = figures["validation loss of exp_avg E4M3, above fp32's"]
    assert free["measured"] == losses["exp_avg E4M3"] - losses["fp32"]
    missed = {name for name, f in figures.items() if not f["at_least"] <= f["measured"] <= f["at_most"]}
    assert missed == {"validation loss of exp_avg_sq FP16, unscaled, above fp32's"}
    assert len(figures) == 2 + 3


@pytest.mark.slow
def test_parity_of_the_recipes_of_training_state_runs_and_counts_their_bytes(run_here, tmp_path):
    words = ("--recipes", "fp32", "fp8_lm_o2", "narrow8", "--steps", "2", "--seeds", "1", "--json")
    done = run_here("parity", *words, "--workers", "1", results=tmp_path)
    assert done.returncode == 0, done.stdout
    result = result_of(done, tmp_path)
    bytes_of = {name: repeats[0]["bytes_per_parameter"] for name, repeats in result["repeats"].items()}
    assert bytes_of["fp32"] == pytest.approx(16, abs=0.01)
    assert bytes_of["fp8_lm_o2"] == pytest.approx(2 + 1 + 1 + 2, abs=0.05)
    # tiles of 128 in rows of 96 and 384: at most 2 x 4 bytes of scales for 96 values
    assert 2 + 1 + 1 + 2 < bytes_of["narrow8"] < 6 + 8 / 96 + 0.02
    assert set(result["figures"]) == {
        "validation loss of fp8_lm_o2, distance from fp32's", "validation loss of narrow8, distance from fp32's",
    }  # fmt: skip


@pytest.mark.slow
def test_gradient_release_and_offload_change_no_bit_of_the_default_gpt(run_here, tmp_path):
    small = functools.partial(TrainConfig, batch_size=2)
    done = run_here(
        "training", "--repeats", "1", "--json", results=tmp_path, TrainConfig=small, WARMUP_STEPS=0, MEMORY_STEPS=2
    )
    assert done.returncode in (0, 1), done.stdout  # 1: a busy machine misses the speed
    result = result_of(done, tmp_path)
    changed = {name: f["measured"] for name, f in result["figures"].items() if name.startswith("bytes of parameters")}
    assert len(changed) == 4
    assert set(changed.values()) == {0}
    size = result["bytes_per_parameter"]
    assert size["narrow8, gradient release"]["total"] < size["narrow8"]["total"] - 1
    assert "grad" not in size["narrow8_sr, gradient release"]


@pytest.mark.parametrize("script", sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem not in LIBRARIES))
def test_every_script_explains_itself(run_here, script):
    done = run_here(script, "--help")
    assert done.returncode == 0
    assert f"benchmarks/{script}.py" in done.stdout


@pytest.mark.slow
def test_reductions_are_timed_and_train_with_error_feedback(run_here, tmp_path):
    words = ("--parts", "cost", "feedback", "--repeats", "1", "--steps", "2", "--seeds", "1", "--json")
    done = run_here("reduction", *words, "--workers", "1", results=tmp_path, COST_VALUES=1 << 18)
    assert done.returncode in (0, 1), done.stdout  # 1: a busy machine misses the time
    result = result_of(done, tmp_path)
    assert len(result["figures"]) == 3 and set(result["seconds"]) == {"gloo", "quantize, sum, dequantize"}
    losses = {kind: found[0] for kind, found in result["losses"].items()}
    assert len(set(losses.values())) == 3 and max(losses.values()) - min(losses.values()) < 0.1


def test_reductions_of_many_ranks_in_one_process_are_those_of_the_collectives(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import reduction

    draw = torch.Generator().manual_seed(0)
    values = (3 * torch.randn(1000, generator=draw)).exp() * (torch.randn(64, 1000, generator=draw) + 1)
    error = (reduction.reduced(values, WIRE) - values.mean(0)).norm() / values.mean(0).norm()
    assert 0.01 < error < 0.04  # 63 of 64 roundings average out; one of E4M3 remains: 2.6 %
    figures = reduction.snr_figures([values, values[:, :100]])
    assert all(figure["measured"] >= figure["at_least"] for figure in figures.values()), figures
