"""`narrowgauge chart`: what each recipe multiplies, sends and stores."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from narrowgauge.cli.arguments import Parser


def chart(argv: Sequence[str]) -> int:
    """Print the precision chart of the named recipes, or of all of them."""
    parser = Parser(
        "chart",
        "The precision chart: what each recipe multiplies, sends and stores. Without a recipe: the rows of the\n"
        "Accelerate guide to low-precision training that exist here, then every recipe.",
        [
            "narrowgauge chart",
            "narrowgauge chart fp8_delayed bf16",
            "narrowgauge chart --markdown > chart.md",
            "narrowgauge chart bf16 fp8_lm_o2 narrow8 --picture chart.svg",
        ],
    )
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="names of recipes")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument(
        "--picture", metavar="FILE.svg|.png", help="draw it, one format a cell, coloured by bits, instead of a table"
    )
    parser.add_json_option()
    arguments = parser.parse(argv)
    asked = [f"--{name}" for name in ("markdown", "picture", "json") if vars(arguments)[name]]
    if len(asked) > 1:
        parser.error(f"expected one of --markdown, --picture and --json, found {' and '.join(asked)}")

    from narrowgauge.cli.console import print_table
    from narrowgauge.recipes.chart import HEADERS, chart_json, chart_markdown, chart_rows, titled

    names = arguments.recipes or None
    if arguments.picture:
        from narrowgauge.cli.pictures import write_picture
        from narrowgauge.observe.chart_picture import picture

        write_picture("--picture", arguments.picture, picture(titled(names)))
        return 0
    rows = chart_rows(names)
    if arguments.json:
        print(chart_json(rows))
    elif arguments.markdown:
        print(chart_markdown(rows))
    else:
        print_table("", HEADERS, [dataclasses.astuple(row) for row in rows])
    return 0
