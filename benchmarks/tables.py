"""Writes the README's table of figures from the newest result file of each topic.

    python benchmarks/tables.py [--check]

--check writes nothing and fails where the README says something else than the result files. A figure in a result file
is {"measured": number, "at_most": number, "at_least": number}, with one goal or with both; ratios have no unit, others
name it in the figure's name.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from narrowgauge.cli.figures import goal, is_met

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
BEGIN, END = "<!-- figures: begin -->\n", "<!-- figures: end -->"


def newest_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The newest result file of each device and topic; dates in the names sort them."""
    newest = {}
    for path in sorted(folder.glob("*.json")):
        _year, _month, _day, device_and_topic = path.stem.split("-", 3)
        newest[device_and_topic] = json.loads(path.read_text(encoding="utf-8")) | {"path": path}
    return newest


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """The table: one row a figure, losses among the wins."""
    lines = ["| figure | measured | goal | | from |", "|---|---|---|---|---|"]
    for result in results.values():
        for name, figure in result.get("figures", {}).items():
            source = f"[`{Path(result['command'].split()[1]).name}`](benchmarks/results/{result['path'].name})"
            outcome = "met" if is_met(figure) else "missed"
            lines.append(f"| {name} | {figure['measured']:.3f} | {goal(figure)} | {outcome} | {source} |")
    hardware = [result["hardware"] for result in results.values()]
    devices = sorted({f"{found['device']}, {found['threads']} threads" for found in hardware})
    if not results:
        return "No result files yet: `make bench` writes them.\n"
    return "\n".join([*lines, "", f"Measured on: {'; '.join(devices)}.", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    arguments = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    wanted = head + BEGIN + markdown(newest_results()) + END + rest.split(END)[1]
    if arguments.check:
        print("README and result files agree" if wanted == text else "README is stale: run python benchmarks/tables.py")
        return int(wanted != text)
    README.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
