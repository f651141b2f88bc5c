"""Writes docs/figures.md and the README's summary of it from the newest result file of each topic.

    python benchmarks/tables.py [--check]

--check writes nothing and fails where one of them says something else than the result files. A figure in a result file
is {"measured": number, "at_most": number, "at_least": number}, with one goal or with both; ratios have no unit, others
name it in the figure's name.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path
from typing import Any

from narrowgauge.cli.figures import goal, is_met
from narrowgauge.observe import strict_json

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ROOT / "README.md", ROOT / "docs" / "figures.md"  # the summary, all figures
NOTHING = "No result files yet: `make bench` writes them.\n"
BEGIN, END = "<!-- figures: begin -->\n", "<!-- figures: end -->"


def newest_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The newest result file of each device and topic; dates in the names sort them."""
    newest = {}
    for path in sorted(folder.glob("*.json")):
        _year, _month, _day, device_and_topic = path.stem.split("-", 3)
        newest[device_and_topic] = strict_json.loads(path.read_text(encoding="utf-8")) | {"path": path}
    return newest


def summary(results: dict[str, dict[str, Any]]) -> str:
    """A row for each script, then every figure that missed its goal."""
    if not results:
        return NOTHING
    lines = ["| what was measured | met | by |", "|---|---|---|"]
    missed = []
    for topic, rows in by_script(results).items():
        met = sum(is_met(figure) for _, figure in rows)
        lines.append(f"| {about(topic)} | {met} of {len(rows)} | [`{topic}`](benchmarks/{topic}) |")
        missed += [
            f"- {name}: {figure['measured']:.3f}, goal {goal(figure)}" for name, figure in rows if not is_met(figure)
        ]
    return "\n".join([*lines, "", "Missed:" if missed else "None missed.", *(["", *missed] if missed else []), ""])


def whole(results: dict[str, dict[str, Any]]) -> str:
    """One row a figure, losses among the wins."""
    if not results:
        return NOTHING
    lines = []
    for topic, rows in by_script(results).items():
        lines += [
            f"## {topic.removesuffix('.py')}",
            "",
            about(topic),
            "",
            "| figure | measured | goal | |",
            "|---|---|---|---|",
        ]
        for name, figure in rows:
            outcome = "met" if is_met(figure) else "missed"
            name = name.replace("|", "\\|")  # which would end the cell
            lines.append(f"| {name} | {figure['measured']:.3f} | {goal(figure)} | {outcome} |")
        files = [(each["path"].name, each["hardware"]) for each in results.values() if script_of(each) == topic]
        sources = [f"`{name}` ({hardware['device']}, {hardware['threads']} threads)" for name, hardware in files]
        lines += ["", f"From {', '.join(sources)}.", ""]
    return "\n".join(lines)


def by_script(results: dict[str, dict[str, Any]]) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """(name, figure) of all result files, by the script that wrote them."""
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for result in results.values():
        found.setdefault(script_of(result), []).extend(result.get("figures", {}).items())
    return {script: rows for script, rows in found.items() if rows}


def script_of(result: dict[str, Any]) -> str:
    return Path(result["command"].split()[1]).name


def about(script: str) -> str:
    """The first line of a script's docstring."""
    path = ROOT / "benchmarks" / script
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) if path.is_file() else None
    return (text or script).splitlines()[0].split(": `python")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    arguments = parser.parse_args()
    results, stale = newest_results(), False
    for page, table in zip(PAGES, (summary(results), whole(results)), strict=True):
        text = page.read_text(encoding="utf-8")
        head, rest = text.split(BEGIN)
        wanted = head + BEGIN + table + END + rest.split(END)[1]
        if wanted != text and arguments.check:
            print(f"{page.name} is stale: run python benchmarks/tables.py")
            stale = True
        elif wanted != text:
            page.write_text(wanted, encoding="utf-8")
    return int(stale)


if __name__ == "__main__":
    raise SystemExit(main())
