"""`narrowgauge doctor`: what this machine does natively, what it emulates, and why; a report to paste into an issue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from narrowgauge.cli.arguments import Parser
from narrowgauge.cli.capabilities import everything
from narrowgauge.errors import ConfigError

STDOUT = "-"


def doctor(argv: Sequence[str]) -> int:
    """Print what there is and what it can do, or write a report of a problem."""
    parser = Parser(
        "doctor",
        "What this machine does natively, what it emulates, and why; which kernels and collectives it takes; which\n"
        "packages are there, and new enough.\n"
        "Emulated: the same codes and scales, multiplied in a wider format that holds them exactly.\n\n"
        "--bug-report writes that, and with --run a run's recipe, configuration and last journal rows, as text to\n"
        "paste into an issue. It holds no user or host name, no path, no address, no text of data or prompts.",
        [
            "narrowgauge doctor",
            "narrowgauge doctor --json",
            "narrowgauge doctor --bug-report",
            "narrowgauge doctor --bug-report report.md --run runs/NAME",
        ],
    )
    parser.add_argument(
        "--bug-report", nargs="?", const=STDOUT, metavar="FILE", help="write a report, to standard output by default"
    )
    parser.add_argument("--run", metavar="RUN", help="a run's folder, for the report")
    parser.add_json_option()
    arguments = parser.parse(argv)
    if arguments.run is not None and arguments.bug_report is None:
        parser.error("--run: expected it beside --bug-report, found it alone")
    if arguments.bug_report is not None:
        _write_report(arguments.bug_report, arguments.run, arguments.json)
        return 0

    from narrowgauge.cli.console import print_json

    found = everything()
    if arguments.json:
        print_json(found)
    else:
        _print_tables(found)
    return 0


def _print_tables(found: dict[str, Any]) -> None:
    from narrowgauge.cli.console import print_table

    print_table("machine", ["", ""], list(found["machine"].items()))
    rows = [
        [name, each["found"], each["needs"], each["extra"], each["status"]] for name, each in found["packages"].items()
    ]
    print_table("packages", ["package", "found", "needs", "for", ""], rows)
    for title, key, columns in TABLES:
        print_table(title, columns, [[_joined(row[c]) for c in columns] for row in found[key]])


TABLES = (  # title, key of `everything`, columns
    ("products of linear layers", "products", ["device", "operands", "gemms", "recipes", "runs", "why"]),
    ("kernels", "kernels", ["device", "kernels", "used", "twin", "why"]),
    ("collectives", "collectives", ["backend", "available", "used", "why"]),
    ("programs", "programs", ["program", "found", "for"]),
)


def _joined(value: Any) -> Any:
    return ", ".join(value) if isinstance(value, list) else value


def _write_report(path: str, run: str | None, as_json: bool) -> None:
    from narrowgauge.cli.bug_report import bug_report, markdown
    from narrowgauge.cli.console import json_text

    found = bug_report(run)
    text = json_text(found) if as_json else markdown(found)
    if path == STDOUT:
        print(text)
        return
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text + "\n")
    except FileExistsError:
        raise ConfigError(f"--bug-report {path}: expected a new file, found one there: choose another name") from None
    except OSError as error:
        raise ConfigError(
            f"--bug-report {path}: expected a file that can be written, found: {error.strerror}: choose another name"
        ) from error
    print(f"wrote {path}: look at it before you send it")
