"""All benchmarks one after the other, each in a process of its own: what they found, as JSON and as a page.

A folder holds one such run: `bench.json` and `index.html`, written anew after each benchmark, `results/NAME/*.json` as
the scripts write them, and `logs/NAME.txt`. Started again with the same folder, what has ended is not run again.
"""

from __future__ import annotations

import datetime
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.cli import capabilities
from narrowgauge.cli.bench_page import page
from narrowgauge.cli.bench_suite import Benchmark
from narrowgauge.cli.console import json_text
from narrowgauge.cli.figures import is_met
from narrowgauge.errors import ConfigError
from narrowgauge.observe import strict_json
from narrowgauge.train.folder import write_file

SCHEMA = 1
STATE, PAGE = "bench.json", "index.html"
MET, MISSED, DONE, FAILED, TIMED_OUT, LEFT_OUT = "met", "missed", "done", "failed", "timed out", "left out"
ENDED = (MET, MISSED, DONE)  # they are not run again
LOG_LINES = 30  # of a script that failed
KILL_AFTER_S = 10.0
COMPARED = ("torch", "torchao", "bitsandbytes")


@dataclass
class Suite:
    """A run of benchmarks. checkout: of the repository. limit_s: in place of each benchmark's own."""

    checkout: Path
    output: Path
    quick: bool
    limit_s: float | None = None
    say: Callable[[str], None] = print

    def run(self, benchmarks: Sequence[Benchmark]) -> dict[str, Any]:
        """Run what has not ended, in order, and return what `bench.json` then holds.

        Raises ConfigError where the folder holds another run, or cannot be written.
        """
        record = self._open()
        runs: dict[str, dict[str, Any]] = {found["name"]: found for found in record["runs"]}
        for at, benchmark in enumerate(benchmarks, 1):
            counted = f"{at}/{len(benchmarks)} {benchmark.name}"
            if runs.get(benchmark.name, {}).get("status") in ENDED:
                self.say(f"{counted}: {runs[benchmark.name]['status']} before")
                continue
            self.say(f"{counted} ...")
            found = runs[benchmark.name] = self._run_one(benchmark)
            self.say(f"{counted}: {found['status']}{_seconds(found)}{_why(found)}")
            order = {each.name: place for place, each in enumerate(benchmarks)}
            record["runs"] = sorted(runs.values(), key=lambda run: order.get(run["name"], len(order)))
            self._write(record)
        return record

    def _open(self) -> dict[str, Any]:
        """What the folder holds of a run that was interrupted, or the beginning of a new one."""
        mine = {"schema": SCHEMA, "quick": self.quick, "commit": commit_of(self.checkout)}
        state = self.output / STATE
        if state.exists():
            try:
                found = strict_json.loads(state.read_text(encoding="utf-8"))
                theirs = {key: found[key] for key in mine}
                if not isinstance(found["runs"], list):
                    raise TypeError
            except (OSError, ValueError, KeyError, TypeError):
                raise ConfigError(
                    f"{state}: expected a run of benchmarks, found none: choose another --output"
                ) from None
            if theirs != mine:
                told = ", ".join(
                    f"{key} {theirs[key]} in place of {mine[key]}" for key in mine if theirs[key] != mine[key]
                )
                raise ConfigError(
                    f"{state}: expected this run, begun before, found another, of {told}: choose another --output"
                )
            return found
        try:
            self.output.mkdir(parents=True, exist_ok=True)
            return self._write(mine | {"begun": _now(), "environment": _environment(), "runs": []})
        except OSError as error:
            raise ConfigError(
                f"--output {self.output}: expected a folder that can be written, found: {error.strerror}: choose "
                "another"
            ) from error

    def _write(self, record: dict[str, Any]) -> dict[str, Any]:
        write_file(self.output / STATE, json_text(record) + "\n")
        write_file(self.output / PAGE, page(record))
        return record

    def _run_one(self, benchmark: Benchmark) -> dict[str, Any]:
        words = benchmark.quick if self.quick else benchmark.words
        found: dict[str, Any] = {"name": benchmark.name, "what": benchmark.what, "status": LEFT_OUT, "figures": {}}
        script = self.checkout / "benchmarks" / f"{benchmark.script}.py"
        if words is None:
            return found | {"why": f"it has no quick form{benchmark.why_not and f': {benchmark.why_not}'}"}
        if not script.is_file():
            return found | {"why": f"this checkout has no benchmarks/{script.name}"}
        if benchmark.needs_gpu and not _has_gpu():
            return found | {"why": "no CUDA device"}
        results, log = self.output / "results" / benchmark.name, self.output / "logs" / f"{benchmark.name}.txt"
        shutil.rmtree(results, ignore_errors=True)
        results.mkdir(parents=True)
        log.parent.mkdir(exist_ok=True)
        command = [sys.executable, str(script), *words, "--json"]
        limit_s = self.limit_s or benchmark.limit_s
        start = time.perf_counter()
        with log.open("wb") as file:
            code = run_limited(command, self.checkout, {"NARROWGAUGE_RESULTS": str(results.resolve())}, file, limit_s)
        found |= {
            "command": " ".join(["python", f"benchmarks/{script.name}", *words]),
            "seconds": time.perf_counter() - start,
            "code": code,
            "log": str(log.relative_to(self.output)),
            "ended": _now(),
        }
        return found | self._judged(code, results, log, limit_s)

    def _judged(self, code: int | None, results: Path, log: Path, limit_s: float) -> dict[str, Any]:
        """Status and figures, by how the script ended and what it wrote."""
        found: dict[str, Any] = {"figures": {}, "bars": [], "results": []}
        for path in sorted(results.glob("*.json")):
            written = strict_json.loads(path.read_text(encoding="utf-8"))
            found["figures"] |= written.get("figures", {})
            found["bars"] += written.get("bars", [])
            found["results"].append(str(path.relative_to(self.output)))
        missed = [name for name, figure in found["figures"].items() if not is_met(figure)]
        if code is None:
            return found | {"status": TIMED_OUT, "why": f"it was stopped after {limit_s:g} s", "tail": _tail(log)}
        if not found["results"] or (code != 0 and not missed):
            why = f"exit code {code}" if code else "it wrote no result file"
            return found | {"status": FAILED, "why": why, "tail": _tail(log)}
        if self.quick:
            return found | {"status": DONE}
        return found | {"status": MISSED if missed else MET}


def run_limited(command: list[str], folder: Path, environment: dict[str, str], log: Any, limit_s: float) -> int | None:
    """The exit code of a command, or None where it took longer and was stopped, with all that it had started."""
    with subprocess.Popen(
        command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"), **environment},
    ) as child:  # fmt: skip
        try:
            return child.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            _stop(child)
            return None
        except BaseException:  # interrupted: what was begun ends with us
            _stop(child)
            raise


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started: politely, then at once."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            return
        try:
            child.wait(timeout=KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            continue


def commit_of(checkout: Path) -> str:
    """Of the code, with "-dirty" where it was changed since; "unknown" without git."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def _environment() -> dict[str, Any]:
    """Hardware, and versions of what is measured and compared with."""
    packages = capabilities.packages()
    versions = {
        name: packages[name]["found"] for name in ("python", "narrowgauge", "numpy", "numba", "triton", *COMPARED)
    }
    return {**capabilities.machine(), **versions}


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])


def _seconds(found: dict[str, Any]) -> str:
    return f" in {found['seconds']:.0f} s" if "seconds" in found else ""


def _why(found: dict[str, Any]) -> str:
    return f": {found['why']}" if "why" in found else ""
