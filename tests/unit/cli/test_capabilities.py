"""What this machine can do, as `doctor` tells it: versions at their bounds, programs by any of their names."""

from __future__ import annotations

import shutil
from types import ModuleType

import pytest
import torch

from narrowgauge.cli import capabilities


@pytest.mark.parametrize(
    ("found", "needed", "status"),
    [
        ("2.11", ">=2.11,<2.15", "ok"),
        ("2.15", "<2.15", "too new: older than 2.15 is needed"),
        ("2.14.9", "<2.15", "ok"),
        ("2.9", ">=2.11", "too old: 2.11 or newer is needed"),
    ],
)
def test_a_lower_bound_is_new_enough_and_an_upper_one_too_new(found: str, needed: str, status: str) -> None:
    assert capabilities.status_of(found, needed) == status


def test_a_program_is_found_by_any_of_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"google-chrome": "/usr/bin/google-chrome"}
    monkeypatch.setattr(shutil, "which", lambda name: there.get(name))
    assert {row["program"]: row["found"] for row in capabilities.programs()} == {
        "C++ compiler": False,
        "Chromium": True,
    }
    there.clear()
    assert not any(row["found"] for row in capabilities.programs())


def test_packages_come_by_the_order_of_the_extras_with_what_is_needed_of_them() -> None:
    found = capabilities.packages()
    order = [capabilities.EXTRAS.index(each["extra"]) for each in found.values()]
    assert order == sorted(order) and list(found)[:2] == ["python", "narrowgauge"]
    assert found["torch"]["found"] == torch.__version__ and ">=" in found["torch"]["needs"]
    assert found["torch"]["extra"] == "core" and found["triton"]["extra"] == "beside"


def test_features_are_those_that_the_cpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    has = {"avx2": True, "avx512_bf16": False, "amx_int8": True, "sse4": True, "architecture": "x86"}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    assert capabilities.machine()["CPU features"] == "amx_int8 avx2"


def test_what_a_collectives_backend_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name == "gloo")
    rows = {row["backend"]: row for row in capabilities.collectives()}
    assert rows["gloo"]["available"] and rows["gloo"]["why"] == "" and rows["gloo"]["used"] == "ranks on CPUs"
    assert not rows["nccl"]["available"] and rows["nccl"]["why"] == "this torch is built without it"
    assert (rows["nccl"]["used"], rows["mpi"]["used"]) == ("ranks on GPUs", "never")


def test_kernels_are_named_and_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"a": None, "b": ModuleType("narrowgauge.x.twin_rows"), "c": ModuleType("narrowgauge.x.numba_rows")}
    modules |= {"d": ModuleType("narrowgauge.x.triton_rows"), "e": ModuleType("narrowgauge.x.cuda")}
    monkeypatch.setattr(capabilities, "_paths", lambda: {k: lambda x, m=m: m for k, m in modules.items()})
    rows = {row["kernels"]: (row["used"], row["why"]) for row in capabilities.kernels() if row["device"] == "cpu"}
    twin = (capabilities.TWIN, "no kernel for it")
    assert rows == {"a": twin, "b": twin, "c": ("Numba", ""), "d": ("Triton", ""), "e": ("Triton", "")}
