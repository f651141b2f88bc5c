"""The page of a run of all benchmarks: one HTML file that needs no network, light or dark, for screens and phones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from narrowgauge.cli.figures import goal, is_met

Run = Mapping[str, Any]
STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2328; --soft: #57606a; --line: #d0d7de; --card: #f6f8fa;
  --met: #116329; --missed: #a40e26; --other: #6e5494; --ours: #0969da; --theirs: #8c959f }
@media (prefers-color-scheme: dark) { :root { --paper: #0d1117; --ink: #e6edf3; --soft: #9da7b3; --line: #30363d;
  --card: #161b22; --met: #4ac26b; --missed: #ff7b72; --other: #d2a8ff; --ours: #58a6ff; --theirs: #6e7681 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1080px; padding: 24px 20px 64px; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif }
h1 { font-size: 1.75rem; margin: 0 0 4px } h2 { font-size: 1.25rem; margin: 40px 0 8px }
h3 { font-size: 1rem; margin: 20px 0 8px } p { margin: 4px 0 12px } .soft { color: var(--soft) }
.notice { border: 1px solid var(--line); border-left: 4px solid var(--other); padding: 8px 14px; border-radius: 6px }
.counts { display: flex; flex-wrap: wrap; gap: 10px; padding: 0; list-style: none }
.counts li { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 8px 16px }
.counts b { font-size: 1.4rem; margin-right: 6px }
.met { color: var(--met) } .missed, .failed { color: var(--missed) } .other { color: var(--other) }
section { border: 1px solid var(--line); border-radius: 8px; padding: 4px 18px 14px; margin: 16px 0 }
section > h3 { display: flex; flex-wrap: wrap; gap: 4px 12px; align-items: baseline }
summary { cursor: pointer; padding: 8px 0 } .scroll { overflow-x: auto } a { color: var(--ours) }
table { border-collapse: collapse; width: 100%; font-size: 0.94rem }
th, td { text-align: left; padding: 6px 10px; border-bottom: 1px solid var(--line); vertical-align: top }
th { color: var(--soft); font-weight: 600 } td.number { text-align: right; font-variant-numeric: tabular-nums;
  white-space: nowrap }
code, pre { font: 0.86rem/1.45 ui-monospace, Menlo, Consolas, monospace } code { overflow-wrap: anywhere }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: 10px; overflow-x: auto }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 8px 0; font-size: 0.94rem }
dt { color: var(--soft) } dd { margin: 0; overflow-wrap: anywhere }
.bars { display: grid; grid-template-columns: minmax(9em, max-content) 1fr; gap: 6px 12px; align-items: center;
  font-size: 0.94rem }
.track { display: flex; align-items: center; gap: 8px; min-width: 0 }
.bar { height: 16px; border-radius: 3px; background: var(--theirs); min-width: 2px; flex: none }
.bar.ours { background: var(--ours) }
.bar.stopped { background: repeating-linear-gradient(90deg, var(--theirs) 0 8px, transparent 8px 11px) }
.value { white-space: nowrap; font-variant-numeric: tabular-nums }
@media (max-width: 560px) { body { padding: 16px 12px 48px } .bars { grid-template-columns: 1fr; gap: 2px }
  .track { margin-bottom: 8px } dl { grid-template-columns: 1fr } dd { margin-bottom: 6px }
  section { padding: 2px 12px 10px }
  thead { display: none } tr { display: flex; flex-wrap: wrap; gap: 0 16px; padding: 8px 0;
  border-bottom: 1px solid var(--line) } td { padding: 1px 0; border: 0 } td:first-child { flex: 1 0 100% }
  td[data-head]::before { content: attr(data-head) " "; color: var(--soft) } }
"""
LONGEST = 55.0  # per cent of the width that the longest bar takes: its number stands behind it
_KINDS = {
    "met": "met",
    "missed": "missed",
    "done": "met",
    "failed": "failed",
    "timed out": "failed",
    "left out": "other",
}


def page(record: Mapping[str, Any]) -> str:
    """HTML of what `bench.json` holds."""
    runs = record["runs"]
    compared = [bars for run in runs for bars in run.get("bars", [])]
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>narrowgauge benchmarks, {_text(record['commit'])}</title>",
        f"<style>{STYLE}</style></head><body><main>",
        "<h1>narrowgauge: benchmarks</h1>",
        f'<p class="soft">commit {_text(record["commit"])}, begun {_text(record["begun"])}</p>',
        *_notice(record),
        *_counts(runs, record["quick"]),
    ]
    if not runs:
        lines.append('<p class="soft">Nothing has ended yet.</p>')
    if compared:
        lines += ["<h2>Against others</h2>", '<p class="soft">Of one run on this machine. Ours in blue.</p>']
        lines += [line for bars in compared for line in _bars(bars)]
    lines += _goals(runs, record["quick"])
    lines += ["<h2>Runs</h2>", *(line for run in runs for line in _run(run))] if runs else []
    lines += ["<h2>Environment</h2>", "<dl>"]
    lines += [f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in record["environment"].items()]
    return "\n".join([*lines, "</dl>", "</main></body></html>"]) + "\n"


def _text(value: Any) -> str:
    return escape(str(value))


def _notice(record: Mapping[str, Any]) -> Iterator[str]:
    if record["quick"]:
        yield (
            '<p class="notice">A quick run: small sizes and few steps show that the scripts work. Its figures say '
            "little, and no goal is held against them.</p>"
        )


def _counts(runs: list[Run], quick: bool) -> Iterator[str]:
    figures = [figure for run in runs for figure in run["figures"].values()]
    met = sum(map(is_met, figures))
    statuses = [run["status"] for run in runs]
    judged = [(met, "figures met", "met"), (len(figures) - met, "MISSED", "missed")]
    counts = [
        *([(statuses.count("done"), "scripts work", "met")] if quick else judged),
        (sum(status in ("failed", "timed out") for status in statuses), "scripts failed", "failed"),
        (statuses.count("left out"), "left out", "other"),
    ]
    yield '<ul class="counts">'
    yield from (f'<li><b class="{kind}">{count}</b>{words}</li>' for count, words, kind in counts)
    yield "</ul>"


def _goals(runs: list[Run], quick: bool) -> Iterator[str]:
    """What was asked and found: what was missed first, what was met folded away behind it; not judged if quick."""
    rows = [(name, figure) for run in runs for name, figure in run["figures"].items()]
    if quick:
        if rows:
            yield f"<details><summary>{len(rows)} figures, not judged</summary>"
            yield from _table(rows, quick)
            yield "</details>"
        return
    missed, met = ([row for row in rows if is_met(row[1]) is wanted] for wanted in (False, True))
    yield "<h2>Goals</h2>" if rows else ""
    if missed:
        yield from _table(missed)
    if met:
        is_open = "" if missed else " open"
        yield f"<details{is_open}><summary>{len(met)} met</summary>"
        yield from _table(met)
        yield "</details>"


def _table(rows: list[tuple[str, Mapping[str, Any]]], quick: bool = False) -> Iterator[str]:
    heads = "".join(f"<th>{head}</th>" for head in ("figure", "asked", "found", ""))
    yield f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>'
    for name, figure in rows:
        verdict = '<td class="met">met</td>' if is_met(figure) else '<td class="missed"><b>MISSED</b></td>'
        verdict = "<td></td>" if quick else verdict
        asked = f'<td class="number" data-head="asked">{_text(goal(figure))}</td>'
        found = f'<td class="number" data-head="found">{_number(figure["measured"])}</td>'
        yield f"<tr><td>{_text(name)}</td>{asked}{found}{verdict}</tr>"
    yield "</tbody></table></div>"


def _bars(bars: Mapping[str, Any]) -> Iterator[str]:
    """A bar for each contender; those that were stopped, and would be longer, are as long as the longest, and broken;
    those that are not here say why."""
    values = [row["value"] for row in bars["rows"] if _is_length(row.get("value")) and not row.get("at_least")]
    most = max(values, default=1) or 1
    better = "less" if bars["lower_is_better"] else "more"
    yield f"<section><h3>{_text(bars['title'])}</h3>"
    yield f'<p class="soft">{_text(bars["unit"])}; {better} is better</p><div class="bars">'
    for row in bars["rows"]:
        yield f"<div>{_text(row['name'])}</div>"
        if not _is_length(row.get("value")):
            yield f'<div class="soft">{_text(row.get("absent") or _number(row.get("value")))}</div>'
            continue
        is_stopped = row.get("at_least")
        width = LONGEST if is_stopped else LONGEST * row["value"] / most
        kind = "bar stopped" if is_stopped else "bar ours" if row["ours"] else "bar"
        value = f"{'more than ' if is_stopped else ''}{_number(row['value'])}"
        yield f'<div class="track"><div class="{kind}" style="width: {width:.2f}%"></div>'
        yield f'<span class="value">{value}</span></div>'
    yield "</div></section>"


def _run(run: Run) -> Iterator[str]:
    kind = _KINDS[run["status"]]
    status = "MISSED" if run["status"] == "missed" else run["status"]
    yield f'<section><h3>{_text(run["name"])} <span class="{kind}">{status}</span></h3>'
    yield f'<p class="soft">{_text(run["what"])}</p>'
    facts = {"command": f"<code>{_text(run['command'])}</code>"} if "command" in run else {}
    if "seconds" in run:
        facts["took"] = f"{run['seconds']:,.0f} s"
    if "why" in run:
        facts["why"] = _text(run["why"])
    for name in ("results", "log"):
        files = run[name] if isinstance(run.get(name), list) else [run[name]] if name in run else []
        if files:
            facts[name] = ", ".join(f'<a href="{_text(file)}">{_text(file)}</a>' for file in files)
    yield "<dl>" + "".join(f"<dt>{name}</dt><dd>{fact}</dd>" for name, fact in facts.items()) + "</dl>"
    if run.get("tail"):
        yield f"<pre>{_text(run['tail'])}</pre>"
    yield "</section>"


def _is_length(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _number(value: float | None) -> str:
    """Four digits; a number that JSON lacks is no number."""
    if value is None or value != value:
        return "no number"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
