"""The report as one HTML file: data, style and script inside, nothing from the network."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from html import escape
from importlib import resources
from typing import Any

SCRIPTS = ("base.js", "charts.js", "map.js", "page.js")
STYLE = "report.css"
NAVIGATION = {
    "attention": "Attention", "loss": "Loss", "map": "Precision map", "layer": "Histograms, scales",
    "scaling": "Loss scale", "bytes": "Bytes", "events": "Guard", "environment": "Environment",
}  # fmt: skip


def page(data: Mapping[str, Any], *, live_every_s: float | None = None) -> str:
    """HTML of `report_data`'s data. live_every_s: the page fetches data.json beside it again after so many seconds.

    The page's own policy forbids it any other script and any connection; names in the data never become markup.
    """
    style, script = _asset(STYLE), "\n".join(_asset(name) for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    connect = "'none'" if live_every_s is None else "'self'"
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    names = ", ".join(run["name"] for run in data["runs"])
    live = "" if live_every_s is None else f' data-live="{live_every_s:g}"'
    links = "".join(f'<li><a href="#{name}">{text}</a></li>' for name, text in NAVIGATION.items())
    return f"""<!DOCTYPE html>
<html lang="en"{live}>
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{escape(names)}: narrowgauge report</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<header class="top"><div>
<h1>narrowgauge report</h1>
<nav aria-label="Sections"><ul>{links}</ul></nav>
<div class="tools"><span id="live" role="status"></span><button type="button" id="print">Print</button>
<button type="button" id="theme">Dark</button></div>
</div></header>
<main id="report"><noscript><section>{_without_script(data)}</section></noscript></main>
<footer>Every number is from the run's journal; what was not sampled is not known. Made by narrowgauge.</footer>
<script type="application/json" id="data">{json_for_script(data)}</script>
<script>{script}</script>
</body>
</html>
"""


def json_for_script(data: Any) -> str:
    """JSON that ends no script element, whatever names it holds."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _without_script(data: Mapping[str, Any]) -> str:
    """What needs attention, where scripts do not run."""
    items = "".join(
        f"<li><b>{escape(each['title'])}</b> ({each['severity']}): {escape(each['text'])} {escape(each['remedy'])}</li>"
        for each in data["attention"]
    )
    return f"<h2>What needs attention</h2><ul>{items}</ul><p>The pictures need JavaScript.</p>"


def _asset(name: str) -> str:
    return resources.files("narrowgauge.observe").joinpath("report_assets", name).read_text(encoding="utf-8")
