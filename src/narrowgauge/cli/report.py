"""`narrowgauge report`: one HTML file that shows what precision did in a run, or in several beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge.cli.arguments import Parser
from narrowgauge.errors import ConfigError

if TYPE_CHECKING:
    from argparse import Namespace

    from narrowgauge.observe.report_run import RunReader

FILE_NAME = "report.html"
FORMATS = ("svg", "png")


def report(argv: Sequence[str]) -> int:
    """Write the report, print what needs attention; with --live serve it until interrupted."""
    arguments = _parser().parse(argv)

    from narrowgauge.observe.report_run import RunReader

    runs, reference = _runs(arguments)
    if arguments.live:
        from narrowgauge.cli.live import serve

        return serve([RunReader(run) for run in runs], reference, arguments.port or 0)
    if arguments.port is not None:
        raise ConfigError("--port: expected it with --live, found it alone: add --live, or leave it out")
    readers = [RunReader(run) for run in runs]
    return _write(arguments, readers, reference)


def _parser() -> Parser:
    parser = Parser(
        "report",
        "Show what precision did in a run: one HTML file that needs no network, with what needs attention first.\n"
        "Of several runs the last is the one that the others are held against, or the one given by --reference.",
        [
            "narrowgauge report runs/NAME",
            "narrowgauge report runs/narrow8 runs/bf16 --output compared.html",
            "narrowgauge report runs/NAME --figures pictures --format png",
            "narrowgauge report runs/NAME --live",
        ],
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, or its journal.jsonl")
    parser.add_argument("--output", metavar="FILE", help=f"default: {FILE_NAME} in the first run's folder")
    parser.add_argument(
        "--reference", metavar="RUN", help="the run that the others are held against; default: the last"
    )
    parser.add_argument("--figures", metavar="DIR", help="also write each picture as a file of its own")
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=["svg"], help="of the pictures; default: svg")
    parser.add_argument(
        "--live", action="store_true", help="serve the report on this machine alone, and follow the run"
    )
    parser.add_argument("--port", type=int, help="of --live; default: any that is free")
    parser.add_json_option()
    return parser


def _runs(arguments: Namespace) -> tuple[list[str], int]:
    """(the runs in order, the place of the reference among them)."""
    runs: list[str] = list(arguments.runs)
    if arguments.reference is None:
        return runs, len(runs) - 1
    places = [Path(run).resolve() for run in runs]
    wanted = Path(arguments.reference).resolve()
    if wanted not in places:
        runs.append(arguments.reference)
        places.append(wanted)
    return runs, places.index(wanted)


def _write(arguments: Namespace, readers: list[RunReader], reference: int) -> int:
    from narrowgauge.observe.report_data import report_data
    from narrowgauge.observe.report_page import page
    from narrowgauge.train.folder import write_file

    data = report_data(readers, reference)
    path = Path(arguments.output) if arguments.output else readers[0].folder / FILE_NAME
    if path.is_dir():
        raise ConfigError(f"--output {path}: expected a file, found a folder: add a file name, such as {FILE_NAME}")
    if path.resolve() in (reader.journal.path.resolve() for reader in readers):
        raise ConfigError(f"--output {path}: expected a file for the report, found the journal itself: take another")
    write_file(path, page(data))
    pictures = _draw(arguments, data) if arguments.figures else []
    if arguments.json:
        from narrowgauge.cli.console import print_json

        print_json(_as_json(data, readers, path, pictures))
        return 0
    _print_attention(data)
    print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)")
    for picture in pictures:
        print(f"wrote {picture}")
    return 0


def _draw(arguments: Namespace, data: dict[str, Any]) -> list[Path]:
    """Write the pictures; their paths."""
    from narrowgauge.cli.pictures import png
    from narrowgauge.observe.report_figures import figures
    from narrowgauge.train.folder import write_file

    folder = Path(arguments.figures)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, picture in figures(data).items():
        for kind in dict.fromkeys(arguments.format):
            path = folder / f"{name}.{kind}"
            if kind == "svg":
                write_file(path, picture)
            else:
                path.write_bytes(png(picture))
            written.append(path)
    return written


def _print_attention(data: dict[str, Any]) -> None:
    several = len(data["runs"]) > 1
    shown = [each for each in data["attention"] if each["severity"] != "note"]
    print("what needs attention" if shown else "nothing needs attention")
    for each in shown:
        run = f"{data['runs'][each['run']]['name']}: " if several else ""
        print(f"- {each['severity']}: {run}{each['title']}\n    {each['text']}\n    to do: {each['remedy']}")
    notes = len(data["attention"]) - len(shown)
    if notes:
        print(f"{notes} note{'s' if notes > 1 else ''} more in the report")
    for run in data["runs"]:
        print(f"{run['name']}: {run['sampling']}")


def _as_json(data: dict[str, Any], readers: list[RunReader], path: Path, pictures: list[Path]) -> dict[str, Any]:
    """What the page shows, without its packed series: of each layer's measures the first, worst and last value."""
    names = ("name", "facts", "sampling", "missing", "evaluations", "difference", "bytes", "events", "environment")
    return {
        "report": str(path),
        "figures": [str(picture) for picture in pictures],
        "attention": data["attention"],
        "checked": data["checked"],
        "runs": [
            {**{name: run[name] for name in names}, "layers": reader.precision.summary()}
            for run, reader in zip(data["runs"], readers, strict=True)
        ],
    }
