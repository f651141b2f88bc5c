"""The report in a real browser: no errors, legible, reachable by keyboard, as wide as the screen, quickly there."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.cli.live import LiveReport
from narrowgauge.observe.journal_rows import encode
from narrowgauge.observe.report_data import report_data
from narrowgauge.observe.report_page import page as html_of
from narrowgauge.observe.report_run import RunReader
from synthetic_run import ROLES, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
IS_REQUIRED = os.environ.get("NARROWGAUGE_REQUIRE_BROWSER") == "1"
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
             "--disable-background-networking", "--disable-component-update"]  # fmt: skip
EVIL = "<script>document.title='taken'</script>"
pytestmark = pytest.mark.slow

# contrast of each element's own text with what lies behind it, by WCAG 2; [] where all have 4.5
CONTRAST = """() => {
  const channel = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r / 255) + 0.7152 * channel(g / 255) + 0.0722 * channel(b / 255);
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((each) => each.nodeType === 3 && each.textContent.trim());
    if (!own || !node.checkVisibility() || ["SCRIPT", "STYLE", "OPTION", "NOSCRIPT"].includes(node.tagName)) continue;
    const style = getComputedStyle(node), ink = numbers(node instanceof SVGElement ? style.fill : style.color);
    let paper = null;
    for (let each = node; each && !paper; each = each.parentElement) {
      const fill = numbers(getComputedStyle(each).backgroundColor);
      if (fill.length === 3 || fill[3] === 1) paper = fill;
    }
    const [a, b] = [light(ink), light(paper)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) found.push([node.outerHTML.slice(0, 80), ratio]);
  }
  return found;
}"""
# what can be used but has no name for those who do not see it, or cannot be reached by keyboard
UNNAMED = """() => [...document.querySelectorAll("button, a, select, input, summary, [tabindex]")].filter((node) => {
  if (!node.checkVisibility()) return false;
  const label = node.id && document.querySelector(`label[for="${node.id}"]`);
  const name = (node.getAttribute("aria-label") || (label && label.textContent) || node.textContent || "").trim();
  return !name || (node.tabIndex < 0 && node.getAttribute("role") !== "gridcell" && node.id !== "detail-title");
}).map((node) => node.outerHTML.slice(0, 100))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if CHROMIUM is None:
        reason = "no chromium on this machine: on Debian, apt-get install chromium"
        if IS_REQUIRED:
            pytest.fail(f"NARROWGAUGE_REQUIRE_BROWSER=1, and {reason}")
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as player:
        started = player.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    """Opens an address at a width and in a scheme; at the end nothing may have been complained of or fetched."""
    contexts, said, fetched = [], [], []

    def begin(address: str, width: int = 1400, scheme: str = "light", height: int = 900) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: fetched.append(request.url))
        page.goto(address)
        page.wait_for_selector("html[data-drawn]", state="attached")
        return page

    yield begin
    for context in contexts:
        context.close()
    assert said == []
    assert [each for each in fetched if not each.startswith(("file:", "http://127.0.0.1:", "data:"))] == []


def troubled(step: int, row: dict[str, Any]) -> dict[str, Any]:
    if row["kind"] == "precision":
        if step >= 120:
            row["layers"]["blocks.1.mlp.up"]["input"].update(saturated=0.63, sqnr_db=3.1, amax=400.0)
        if step > 100:
            row["layers"]["blocks.0.mlp.down"]["grad"]["zero"] = 1.0
        row["layers"]["blocks.0.mlp.up"]["grad_output"]["flushed"] = 0.3
    if row["kind"] == "step" and 150 <= step < 170:
        row.update(skipped=True, loss_scale=1.0, bad_parameter="blocks.0.mlp.up.weight")
    return row


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Addresses of reports: of one troubled run, of it against another, of evil names, of a clean one."""
    folder = tmp_path_factory.mktemp("reports")
    one = RunReader(write_run(folder / "narrow8", layers=14, change=troubled))
    two = RunReader(write_run(folder / "bf16", layers=14, seed=1))
    evil = RunReader(
        write_run(folder / "evil", steps=20, layers=[EVIL, "</script><img src=x onerror=document.title='taken'>"])
    )
    found = {}
    for name, runs in {"one": [one], "two": [one, two], "evil": [evil], "clean": [two]}.items():
        path = folder / f"{name}.html"
        path.write_text(html_of(report_data(runs, len(runs) - 1)))
        found[name] = path.as_uri()
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_it_is_legible_and_as_wide_as_the_screen(opened, files, tmp_path, scheme, width):
    page = opened(files["two"], width, scheme)
    for fold in ("#checked", "#notes", "#finding-0-layers", "#loss-chart-table", "#map-table", "#recipe-table"):
        page.evaluate("selector => document.querySelectorAll(selector).forEach((each) => { each.open = true })", fold)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate(UNNAMED) == []
    picture = tmp_path / f"{width}-{scheme}.png"
    page.screenshot(path=picture, full_page=True)
    assert picture.stat().st_size > 50_000  # not an empty page


def test_the_button_changes_the_scheme_and_its_contrast_holds(opened, files):
    page = opened(files["one"], scheme="dark")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_role("button", name="Switch to light colours").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    assert page.evaluate(CONTRAST) == []
    assert page.get_by_role("button", name="Switch to dark colours").is_visible()


def test_attention_comes_first_and_leads_to_the_cell(opened, files):
    page = opened(files["one"])
    assert page.locator("main > section").first.get_attribute("id") == "attention"
    finding = page.locator(".finding.serious", has_text="blocks.1.mlp.up").first
    assert "63 %" in finding.inner_text() and "What to do:" in finding.inner_text()
    finding.get_by_role("button").click()
    assert page.locator("#detail-title").inner_text().split() == ["blocks.1.mlp.up", "input"]
    assert page.locator("#map-measure").input_value() == "saturated"
    assert page.locator("#cell-amax path.line").count() == 1 and page.locator("#cell-amax path.area").count() == 1


def test_a_cell_opens_by_pointer_and_by_keyboard(opened, files):
    page = opened(files["one"])
    page.locator('[aria-label^="blocks.0.attention.k, weight:"]').click()
    assert page.locator("#detail-title").inner_text().split() == ["blocks.0.attention.k", "weight"]
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith(
        "blocks.0.attention.v, grad_output:"
    )
    page.keyboard.press("Enter")
    assert page.locator("#detail-title").inner_text().split() == ["blocks.0.attention.v", "grad_output"]
    assert page.locator("#cell-sqnr path.line").count() == 2
    assert page.evaluate("document.querySelectorAll('.cells [tabindex=\"0\"]').length") == 1


def test_tab_reaches_everything_that_can_be_used(opened, files):
    page = opened(files["one"])
    wanted = page.evaluate("""() => [...document.querySelectorAll("button, a, select, input, summary, [tabindex='0']")]
        .filter((node) => node.checkVisibility() && !(node.tagName !== "SUMMARY" && node.tabIndex < 0)).length""")
    reached = set()
    for _ in range(wanted + 5):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("() => [...document.querySelectorAll('*')].indexOf(document.activeElement)"))
    assert len(reached) >= wanted, (len(reached), wanted)


def test_charts_tell_their_values_by_keyboard_and_as_a_table(opened, files):
    page = opened(files["two"])
    for each in page.locator("figure.chart").all():
        assert each.locator("figcaption strong").inner_text()
        assert each.locator("details.data summary").count() == 1
        assert each.locator("svg .axis-name").count() >= 1
    frame = page.locator("#loss-chart .frame")
    frame.focus()
    page.keyboard.press("Home")
    assert page.locator("#loss-chart .readout").inner_text().startswith("step 1: narrow8 ")
    page.locator("#loss-chart summary").click()
    page.locator("#loss-chart tbody tr").last.wait_for()  # made when it is opened
    assert page.locator("#loss-chart tbody tr").count() == 200
    assert page.locator("#difference-chart path.area").count() == 1


def test_the_map_is_filtered_sorted_and_turned_back_in_time(opened, files):
    page = opened(files["one"])
    page.locator("#map-order").select_option("worst")
    assert page.locator(".cells tbody th").first.inner_text() == "blocks.1.mlp.up"
    label = '[aria-label^="blocks.1.mlp.up, input:"]'
    assert "3.1 dB" in page.locator(label).get_attribute("aria-label")
    page.locator("#map-step").fill("5")
    assert "3.1 dB" not in page.locator(label).get_attribute("aria-label")
    page.locator("#map-filter").fill("ATTENTION.q")
    assert page.locator(".cells tbody tr").count() == 2
    page.locator("#map-filter").fill("nothing")
    assert "No layer has this in its name" in page.locator(".cells").inner_text()


def test_numbers_fit_their_cells_on_a_phone(opened, tmp_path):
    """Of eight roles, with the widest numbers that there are: a hundred decibels, a hundredth of a percent."""

    def wide(step: int, row: dict[str, Any]) -> dict[str, Any]:
        if row["kind"] == "precision":
            for roles in row["layers"].values():
                roles["param"] = {"lost": 0.000123, "sqnr_db": 103.6, "amax": 1.234e-6, "scale": 2.0**-117}
                roles["input"].update(saturated=1.0, flushed=0.0999, sqnr_db=math.inf)
        return row

    path = tmp_path / "report.html"
    run = write_run(tmp_path / "run", layers=4, roles=(*ROLES, "collective"), change=wide)
    path.write_text(html_of(report_data([RunReader(run)])))
    page = opened(path.as_uri(), 390)
    measures = page.eval_on_selector_all("#map-measure option", "all => all.map((each) => each.value)")
    assert {"sqnr_db", "saturated", "flushed", "lost", "amax", "scale"} <= set(measures)
    for measure in measures:
        page.select_option("#map-measure", measure)
        cut_off = "all => all.filter((td) => td.scrollWidth > td.clientWidth).map((td) => td.dataset.short)"
        assert page.eval_on_selector_all(".cells.numbers td", cut_off) == [], measure
    page.select_option("#map-measure", "sqnr_db")
    assert page.locator(".cells td[data-short='104']").count() == 4


def test_names_are_text_and_never_run(opened, files):
    page = opened(files["evil"])
    page.locator(".cells [data-cell]").nth(8).click()
    for each in page.query_selector_all("summary"):
        each.evaluate("node => { node.parentElement.open = true }")
    assert page.title() != "taken" and page.locator("img").count() == 0
    assert EVIL in page.locator(".cells tbody th").first.inner_text()


def test_two_samples_have_an_axis_of_distinct_ticks_and_only_what_the_guard_did_is_marked(opened, tmp_path):
    """A wait is no act; all products in another format concern each operand, and no moment."""

    def change(step, row):
        return {} if row["kind"] == "precision" and step < 4 else row

    folder = write_run(tmp_path / "short", steps=5, every=1, layers=1, change=change)
    with (folder / "journal.jsonl").open("ab") as file:
        for step, action, layer, after in ((4, "wait", "blocks.0.attention.q", "E4M3FN"), (5, "promote", None, "bf16")):
            file.write(encode({"kind": "guard", "step": step, "action": action, "layer": layer, "message": "",
                               "role": "input" if layer else None, "after": after}))  # fmt: skip
    path = tmp_path / "short.html"
    path.write_text(html_of(report_data([RunReader(folder)], 0)))
    page = opened(path.as_uri())
    ticks = """() => [...document.querySelectorAll("figure.chart svg")].map((each) =>
      ["middle", "end"].map((side) => [...each.querySelectorAll(`text.tick[text-anchor=${side}]`)]
        .map((text) => text.textContent)))"""
    for axes in page.evaluate(ticks):
        for labels in axes:
            assert len(set(labels)) == len(labels), labels
    for role, marks, said in (("input", 1, True), ("grad_output", 1, True), ("exp_avg", 0, False)):
        page.evaluate("""role => {
          const map = state.map;
          map.show(map.cellOf(0, map.data.roles.indexOf(role)));
        }""", role)  # fmt: skip
        assert page.evaluate("document.querySelectorAll('#cell-amax path.mark').length") == marks
        text = page.inner_text("#detail")
        assert ("acted once, at step 5: promote of all layers, to bf16" in text) == said and "wait" not in text


def test_a_clean_run_says_that_nothing_was_found(opened, files):
    page = opened(files["clean"])
    assert page.locator("#attention .lead").inner_text().startswith("Nothing but notes: all rules below were checked")
    assert "14 layers" in page.locator("#attention .lead").inner_text()


def test_runs_with_little_or_nothing_in_them_are_shown(opened, tmp_path):
    """Of schema 1; without any row; without one loss that is finite."""

    def not_finite(step: int, row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "loss": float("nan"), "grad_norm": float("inf")} if row["kind"] == "step" else {}

    def old(step: int, row: dict[str, Any]) -> dict[str, Any]:
        shares = {"statistics": {"input": {"saturated": 0.0, "flushed": 0.1}}} if step % 10 == 0 else {}
        return {**row, **shares} if row["kind"] == "step" else {}

    runs = {
        "nan": {"change": not_finite},
        "empty": {"change": lambda step, row: {}},
        "old": {"change": old, "schema": 1},
    }
    for name, options in runs.items():
        path = tmp_path / f"{name}.html"
        path.write_text(html_of(report_data([RunReader(write_run(tmp_path / name, steps=30, layers=1, **options))])))
        page = opened(path.as_uri(), width=390)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.locator(".cells [data-cell]").count() == (1 if name == "old" else 0)
        assert "What this journal does not have" in page.locator("#environment").inner_text()


def test_it_prints_without_what_only_a_screen_can_use(opened, files, tmp_path):
    page = opened(files["one"], scheme="dark")
    page.emulate_media(media="print")
    ink = "getComputedStyle(document.querySelector('.finding')).color"
    assert page.evaluate(ink) == "rgb(28, 36, 48)"  # dark on white, whatever the screen has
    assert not page.locator(".top").is_visible() and not page.locator("#map-measure").is_visible()
    page.pdf(path=tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").stat().st_size > 30_000


def test_10_000_steps_of_200_layers_are_drawn_in_3_seconds(opened, tmp_path):
    folder = write_run(tmp_path / "large", steps=10_000, every=10_000, layers=200)
    run = RunReader(folder)
    _sample(run, every=50)
    html = html_of(report_data([run]))
    assert len(html) < 20e6
    path = Path(tmp_path / "large.html")
    path.write_text(html)
    drawn_ms = []
    for _ in range(3):  # the best of three: other tests share the cores
        page = opened(path.as_uri())
        drawn_ms.append(int(page.evaluate("document.documentElement.dataset.drawn")))
        if drawn_ms[-1] < 3000:
            break
    assert min(drawn_ms) < 3000, drawn_ms
    assert page.locator(".cells [data-cell]").count() == 1400
    assert page.evaluate("document.documentElement.scrollWidth") <= 1400


def _sample(run: RunReader, every: int) -> None:
    """Samples of all cells, without the minutes that their text would take."""
    import numpy as np

    rng = np.random.default_rng(0)
    bins = run.precision.bins
    measures, cells = bins.measures(), bins.series
    for step in range(every, 10_001, every):
        noise = rng.random((len(measures), cells), np.float32)
        bins.add(step, {name: noise[at] + (30 if name == "sqnr_db" else 0) for at, name in enumerate(measures)})


def test_the_live_page_follows_the_run(opened, tmp_path, monkeypatch):
    monkeypatch.setattr("narrowgauge.cli.live.EVERY_S", 0.2)
    monkeypatch.setattr("narrowgauge.cli.live.MOST_SHARE", 1.0)
    folder = write_run(tmp_path / "live", steps=50)
    with LiveReport([RunReader(folder)]) as live:
        page = opened(live.url)
        page.locator('[aria-label^="blocks.0.mlp.up, weight:"]').click()
        more = (write_run(tmp_path / "more", steps=80) / "journal.jsonl").read_bytes().splitlines(keepends=True)
        with (folder / "journal.jsonl").open("ab") as file:
            file.writelines(line for line in more if b'"step": 80' in line or b'"step": 7' in line)
        page.get_by_text("live, step 80").wait_for()
        assert page.locator("#detail-title").inner_text().split() == ["blocks.0.mlp.up", "weight"]  # the choice stays
        assert "80" in page.locator(".tiles").inner_text()
        page.close()  # before the server: a browser complains of one that is gone
