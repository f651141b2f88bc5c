"""Size and opening time of the report of a long run: 10,000 steps, 200 layers, 7 roles.

    python benchmarks/report.py [--steps N] [--layers N] [--every N ...] [--repeats N] [--json]

A journal with a sampled step each N (50, which is often, and 10, the hard case) is written by the documented rows,
`narrowgauge report` reads it in a fresh process, and headless Chromium opens the file, in a fresh profile each time.
Opening: milliseconds from the start of the navigation to the map's being drawn, all of the page's script done, as the
page's own clock has it; the median and the longest of the repeats. Seconds and memory: of the command.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
from tables import goal, is_met

sys.path.insert(0, str(common.ROOT / "tests"))
from synthetic_run import ROLES, write_run  # noqa: E402

STEPS, LAYERS = 10_000, 200
MOST_MB, MOST_S = 20.0, 3.0
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip


def opening_ms(path: Path, browser: str, width: int, layers: int) -> int:
    """From the navigation to the drawn map, in a fresh profile."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as player:
        started = player.chromium.launch(executable_path=browser, args=list(ARGUMENTS))
        page = started.new_page(viewport={"width": width, "height": 900})
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-drawn]", state="attached")
        assert page.locator(".cells [data-cell]").count() > layers, "no map was drawn"
        found = int(page.evaluate("document.documentElement.dataset.drawn"))
        started.close()
    return found


def measure(folder: Path, steps: int, layers: int, every: int, browser: str, repeats: int) -> dict[str, Any]:
    """The journal's size, the command's seconds and memory, the file's size, and its opening."""
    run = write_run(folder / f"every-{every}", steps, every, layers)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    start = time.perf_counter()
    command = [sys.executable, "-m", "narrowgauge", "report", str(run)]
    subprocess.run(command, check=True, capture_output=True)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    page = run / "report.html"
    return {
        "every": every,
        "journal_mb": (run / "journal.jsonl").stat().st_size / 1e6,
        "seconds": time.perf_counter() - start,
        "processor_seconds": usage.ru_utime - before,
        "largest_resident_mb": usage.ru_maxrss / 1e3,
        "page_mb": page.stat().st_size / 1e6,
        "opening_ms": {
            str(width): [opening_ms(page, browser, width, layers) for _ in range(repeats)] for width in (1400, 390)
        },
    }


def figures(runs: list[dict[str, Any]], steps: int, layers: int) -> dict[str, dict[str, float]]:
    """Goals and what was measured, as the README's table reads them."""
    what = f"report of {steps:,} steps x {layers} layers x {len(ROLES)} roles"
    slowest = max(statistics.median(each) for run in runs for each in run["opening_ms"].values())
    return {
        f"{what}: MB of the page": {"measured": max(run["page_mb"] for run in runs), "at_most": MOST_MB},
        f"{what}: seconds to the drawn map in Chromium": {"measured": slowest / 1e3, "at_most": MOST_S},
    }


def main() -> int:
    """Print sizes and times, write the result file with --json; exit 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--every", nargs="+", type=int, default=[50, 10], help="steps between samples")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="write a file under benchmarks/results/")
    arguments = parser.parse_args()
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        raise SystemExit("expected chromium, found none: on Debian, apt-get install chromium")
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for every in arguments.every:
            shape = arguments.steps, arguments.layers
            runs.append(measure(Path(folder), *shape, every, browser, arguments.repeats))
            print(f"every {every}: {json.dumps(runs[-1])}", file=sys.stderr, flush=True)
    rows = [
        [str(run["every"]), f"{run['journal_mb']:.0f}", f"{run['seconds']:.1f}", f"{run['largest_resident_mb']:.0f}",
         f"{run['page_mb']:.1f}", *(f"{statistics.median(each)} ({max(each)})" for each in run["opening_ms"].values())]
        for run in runs
    ]  # fmt: skip
    print(common.table(
        ["sampled each", "journal, MB", "command, s", "resident, MB", "page, MB", "opens, ms: 1400 px", "390 px"],
        rows,
    ))  # fmt: skip
    found = figures(runs, arguments.steps, arguments.layers)
    for name, figure in found.items():
        print(f"{name}: {figure['measured']:.2f}, goal {goal(figure)}  {'ok' if is_met(figure) else 'MISSED'}")
    if arguments.json:
        print(common.write_result("report", {"figures": found, "runs": runs}))
    return int(not all(is_met(figure) for figure in found.values()))


if __name__ == "__main__":
    sys.exit(main())
