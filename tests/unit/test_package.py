"""The package as a whole: what importing costs, what it promises by name, and that its documents' snippets run."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import narrowgauge as ng

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("numba", "transformers", "datasets", "rich", "tokenizers", "tensorboard", "torch.distributed.fsdp", "triton")
ALLOWED_IMPORT_S = 0.5
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_loads_neither_numba_nor_any_other_heavy_package():
    loaded = run_python("import narrowgauge, sys; print('\\n'.join(sys.modules))").split()
    assert not {name for name in HEAVY if name in loaded}


def test_heavy_packages_stay_out_until_a_model_is_prepared():
    loaded = run_python(
        "import narrowgauge as ng, sys; ng.recipe('fp8_delayed'); ng.CastSpec(ng.formats.E4M3FN)\n"
        "print('\\n'.join(sys.modules))"
    ).split()
    assert not {name for name in HEAVY if name in loaded} - {"triton"}  # torch itself may probe triton


def test_importing_takes_less_than_half_a_second_beyond_torch():
    # processor time: what other processes do meanwhile must not decide; benchmarks/import_time.py has the wall clock
    code = "import torch, numpy, time; t = time.process_time(); import narrowgauge; print(time.process_time() - t)"
    assert statistics.median(float(run_python(code)) for _ in range(3)) < ALLOWED_IMPORT_S


def test_every_public_name_resolves():
    for name in ng.__all__:
        assert getattr(ng, name) is not None
        assert name in dir(ng)


def test_no_submodule_hides_a_public_name_once_it_is_loaded():
    # importing a submodule sets it as an attribute of the package: a function of the same name would be gone
    modules = {path.stem for path in (ROOT / "src" / "narrowgauge").iterdir() if path.suffix in ("", ".py")}
    assert modules & set(ng.__all__) == {"distributed", "observe", "optim", "recipes"}  # which are meant as the modules


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'preprae'"):
        _ = ng.preprae


def test_the_version_is_the_one_installed():
    assert ng.__version__ == version("narrowgauge")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_snippets_of_the_documents_run(document, tmp_path, monkeypatch, capsys):
    snippets = re.findall(r"^```python\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    names = _a_model_of_the_readers_own()
    for snippet in snippets:  # one after the other, as a reader would type them
        exec(compile(snippet, str(document), "exec"), names)


def test_the_documents_that_the_navigation_names_exist():
    named = re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} == set(named)


def test_links_between_documents_lead_somewhere():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def _a_model_of_the_readers_own() -> dict:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    return {"torch": torch, "ng": ng, "model": model, "optimizer": torch.optim.AdamW(model.parameters())}
