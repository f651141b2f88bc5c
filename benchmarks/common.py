"""What every benchmark shares: interleaved timing, the record of the machine, and the result file."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from statistics import median
from typing import Any

# on a contended machine a spinning OpenMP worker turns microseconds into milliseconds; read when torch is loaded
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch  # noqa: E402

from narrowgauge.cli.capabilities import cpu_name  # noqa: E402
from narrowgauge.observe import strict_json  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(os.environ.get("NARROWGAUGE_RESULTS", ROOT / "benchmarks" / "results"))


def interleaved(runs: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 2) -> dict[str, list[float]]:
    """Seconds of every run, `repeats` of each: a round runs each of them once, so that noise falls on all alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(warmup + repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if round_ >= warmup:
                times[name].append(time.perf_counter() - start)
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of every run, in seconds."""
    return {name: median(values) for name, values in times.items()}


def environment() -> dict[str, Any]:
    """Command, commit, versions and hardware, as every result file records them."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": _commit(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            **_versions("numba", "torchao", "bitsandbytes"),
        },
        "hardware": {"device": device, "threads": torch.get_num_threads(), "flags": _cpu_flags()},
    }


def write_result(topic: str, result: Mapping[str, Any]) -> Path:
    """Write `benchmarks/results/DATE-device-topic.json`: the environment and `result` (figures and raw repeats)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = RESULTS / f"{datetime.date.today().isoformat()}-{device}-{topic}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(strict_json.dumps({**environment(), **result}, indent=1) + "\n")
    return path


def bars(
    title: str,
    unit: str,
    values: Mapping[str, float],
    ours: Container[str],
    *,
    at_least: Container[str] = (),
    absent: Mapping[str, str] | None = None,
    lower_is_better: bool = True,
) -> dict[str, Any]:
    """One comparison, as the page of `narrowgauge bench --all` draws it: a result file's "bars" is a list of them.

    ours: whose bars are set off. at_least: those that were stopped, and would have taken longer. absent: why others
    have no number, by name.
    """
    rows: list[dict[str, Any]] = [
        {"name": name, "value": value, "ours": name in ours, "at_least": name in at_least}
        for name, value in values.items()
    ]
    rows += [{"name": name, "value": None, "ours": False, "absent": why} for name, why in (absent or {}).items()]
    return {"title": title, "unit": unit, "lower_is_better": lower_is_better, "rows": rows}


def table(header: list[str], rows: list[list[str]]) -> str:
    """Columns padded to their widest cell."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in [header, *rows])


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _versions(*packages: str) -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    known = {}
    for package in packages:
        try:
            known[package] = version(package)
        except PackageNotFoundError:
            known[package] = "not installed"
    return known


def _cpu_flags() -> list[str]:
    capabilities = torch.cpu.get_capabilities()
    return sorted(name for name, has in capabilities.items() if has is True)
