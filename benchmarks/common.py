"""What every benchmark shares: interleaved timing, and a result file that says where its numbers come from.

A result file is `benchmarks/results/DATE-DEVICE-TOPIC.json`: command, commit, versions, hardware, and the raw repeats.
Ratios are taken within one run only: machines differ, and so does the same machine an hour later.
"""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_PACKAGES = ("torch", "numpy", "numba", "torchao", "transformers", "triton")


def interleaved_seconds(work: Mapping[str, Callable[[], Any]], repeats: int, warmup: int = 2) -> dict[str, list[float]]:
    """Seconds of each repeat of each job. The jobs take turns, so that a busy spell of the machine meets all of them."""
    for job in work.values():
        for _ in range(warmup):
            job()
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, job in work.items():
            start = time.perf_counter()
            job()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """The median repeat of each job, in seconds."""
    return {name: statistics.median(repeats) for name, repeats in seconds.items()}


def device_label() -> str:
    """A short name of the device for file names, such as `cpu` or `h200`."""
    if not torch.cuda.is_available():
        return "cpu"
    return torch.cuda.get_device_name().lower().replace("nvidia", "").strip().replace(" ", "-")


def hardware() -> dict[str, Any]:
    """Processor, threads and, where there is one, GPU."""
    found: dict[str, Any] = {
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["compute_capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    return found


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that move the numbers."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write_result(topic: str, results: Mapping[str, Any]) -> Path:
    """Write `results` with command, commit, versions and hardware under benchmarks/results/; return the path."""
    today = datetime.date.today().isoformat()
    document = {
        "topic": topic,
        "date": today,
        "command": "python " + shlex.join([_relative(sys.argv[0]), *sys.argv[1:]]),
        "commit": _commit(),
        "versions": versions(),
        "hardware": hardware(),
        **results,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{today}-{device_label()}-{topic}.json"
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {_relative(str(path))}", file=sys.stderr)
    return path


def _relative(path: str) -> str:
    resolved = Path(path).resolve()
    return str(resolved.relative_to(ROOT)) if resolved.is_relative_to(ROOT) else path


def _commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()
