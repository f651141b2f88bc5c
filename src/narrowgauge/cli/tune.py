"""`narrowgauge tune`: a precision for each layer, within a budget, as a recipe file."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from narrowgauge.cli.arguments import Parser
from narrowgauge.cli.live_line import LiveLine
from narrowgauge.errors import ConfigError

if TYPE_CHECKING:
    from argparse import Namespace

    from rich.console import Console

    from narrowgauge.tune.estimate import Estimate
    from narrowgauge.tune.options import Options
    from narrowgauge.tune.options import Progress as Told
    from narrowgauge.tune.result import Tuned

MILLI = 1e3
# of a run, what tuning has no use for
_RUN_ONLY = ("name",)
# weights are the same whatever processes they were trained on; a micro-batch is what each of them read
_ONE_PROCESS = [f"--parallel.{name}=1" for name in ("data", "shard", "tensor", "pipeline")]


def tune(argv: Sequence[str]) -> int:
    """Measure, choose, verify; print the tables; write the recipe, and a picture where one is asked for."""
    parser = _parser()
    own, rest = _divided(argv, parser)
    arguments = parser.parse(own)
    options = _options(arguments)
    output = _output(arguments.output, arguments.picture, arguments.force)

    from narrowgauge.cli.config import parse_arguments
    from narrowgauge.cli.console import print_json
    from narrowgauge.train.run_folder import RunFolder

    if arguments.run is not None:
        rest = ["--config", str(RunFolder.open(arguments.run).config), *_ONE_PROCESS, *rest]
    _refuse(rest)
    config = parse_arguments(rest).config

    from narrowgauge.recipes.files import recipe_text
    from narrowgauge.train.folder import write_file
    from narrowgauge.tune.picture import picture
    from narrowgauge.tune.tuner import Start
    from narrowgauge.tune.tuner import tune as run_tuner

    start = None if arguments.run is None else Start.of_run(arguments.run)
    quiet = _stdout_to_stderr() if arguments.json else contextlib.nullcontext()
    with quiet, Reporter(as_json=arguments.json) as reporter:
        found = run_tuner(config, options, reporter, start)
    text = recipe_text(found.recipe, _comment(found, argv))
    if arguments.picture:
        write_file(Path(arguments.picture), picture(found, _title(found)))
    write_file(output, text)
    if arguments.json:
        print_json({"output": str(output), "picture": arguments.picture, **found.to_dict()})
        return 0
    _print_tables(found)
    print(f"wrote {output}{f' and {arguments.picture}' if arguments.picture else ''}")
    print(f"train with it: narrowgauge train --recipe {shlex.quote(str(output))}")
    return 0


def _parser() -> Parser:
    parser = Parser(
        "tune",
        "A precision for each linear layer, within a budget, as a recipe file. Each layer is measured by each choice\n"
        "on real batches, all others wide: what the loss and the gradients lose; an integer program chooses; short\n"
        "runs verify the choice against all layers wide and against the hand rule, first and last layers wide.\n"
        "All options of `narrowgauge train` hold, too: --config FILE, --model.KEY, --data.KEY, --recipe, ...\n"
        "A budget of bytes counts what the layers keep for backward; one of time, their products at tensor cores'\n"
        "peak rates: this machine may have none, so it is no measurement. Without a budget: the hand rule's bytes.",
        [
            "narrowgauge tune --output tuned.yaml",
            "narrowgauge tune runs/NAME --bytes-per-token 5000 --picture tuned.svg --output tuned.yaml",
            "narrowgauge tune --choices mxfp8 nvfp4 --time-share 0.4 --output tuned.yaml",
            "narrowgauge train --recipe tuned.yaml",
        ],
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="start from this run's weights, model and data")
    parser.add_argument("--output", default="tuned.yaml", metavar="FILE", help="the recipe; default: tuned.yaml")
    parser.add_argument(
        "--picture", metavar="FILE.svg", help="draw losses against bytes, and every layer's sensitivity"
    )
    parser.add_argument("--force", action="store_true", help="replace files that are there")
    parser.add_argument(
        "--choices", nargs="+", metavar="RECIPE",
        help="whose casts layers may take, beside the compute dtype; default: fp8_current mxfp8 nvfp4",
    )  # fmt: skip
    parser.add_argument("--bytes-per-token", type=float, metavar="N", help="most bytes, of all these layers together")
    parser.add_argument("--bytes-share", type=float, metavar="X", help="the same, as a share of all layers wide")
    parser.add_argument("--time-share", type=float, metavar="X", help="most time of products, as a share of all wide")
    parser.add_argument("--wide-layers", type=int, metavar="N", help="most layers in the compute dtype")
    parser.add_argument("--hand-rule", metavar="RULE", help="without a budget: the ends' layers (default) or blocks")
    parser.add_argument("--batches", type=int, metavar="N", help="of the measurement; default 8")
    parser.add_argument("--probe-batch-size", type=int, metavar="N", help="sequences in each of them; default 4")
    parser.add_argument("--steps", type=int, metavar="N", help="of each short run; default 80; 0, with RUN: only read")
    parser.add_argument("--seeds", type=int, metavar="N", help="short runs of each kind; default 1")
    parser.add_argument("--recipe-name", metavar="NAME", help="in the file; default: tuned")
    parser.add_json_option()
    return parser


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """For what writes to standard output from C, as HiGHS 1.12 now and then does: JSON has it for itself."""
    _flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        _flush()  # to a pipe or a file, both keep what they print until later
        os.dup2(kept, 1)
        os.close(kept)


def _flush() -> None:
    """Write out what Python and C have of standard output."""
    sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)


def _divided(argv: Sequence[str], parser: Parser) -> tuple[list[str], list[str]]:
    """(words of tune's own options and RUN, words of train's): an option and the words up to the next go together."""
    own, others = [], []
    target = own
    for word in argv:
        if word.startswith("-") and not word[1:2].isdigit():
            target = own if word.partition("=")[0] in parser._option_string_actions else others
        target.append(word)
    return own, others


def _options(arguments: Namespace) -> Options:
    from narrowgauge.tune.options import Options

    given = {
        "choices": None if arguments.choices is None else tuple(arguments.choices), "batches": arguments.batches,
        "bytes_per_token": arguments.bytes_per_token, "bytes_share": arguments.bytes_share,
        "time_share": arguments.time_share, "wide_layers": arguments.wide_layers, "steps": arguments.steps,
        "probe_batch_size": arguments.probe_batch_size, "seeds": arguments.seeds, "name": arguments.recipe_name,
        "hand_rule": arguments.hand_rule,
    }  # fmt: skip
    return Options(**{key: value for key, value in given.items() if value is not None})


def _output(output: str, picture: str | None, force: bool) -> Path:
    """Where the recipe goes; ConfigError before anything is measured where it could not be written."""
    from narrowgauge.recipes.files import SUFFIXES, is_file_name

    if not is_file_name(output):
        raise ConfigError(f"--output {output}: expected a name that ends in {', '.join(SUFFIXES)}: change it")
    if picture and Path(picture).suffix != ".svg":
        raise ConfigError(f"--picture {picture}: expected a name that ends in .svg: change it")
    for name in filter(None, (output, picture)):
        path = Path(name)
        if path.exists() and not force:
            raise ConfigError(f"{path}: expected no such file yet, found one: choose another name, or give --force")
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: expected a folder to write into, found none: make it, or choose another")
    return Path(output)


def _refuse(words: Sequence[str]) -> None:
    """Options of `train` that mean something else here, or nothing."""
    for word in words:
        key = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if word.startswith("--") and key in _RUN_ONLY:
            raise ConfigError(f"{word}: an option of train that tune has no use for: leave it out")


class Reporter(LiveLine[Progress]):
    """Shows progress: one live line on a terminal, a line for each stage elsewhere."""

    def __init__(self, as_json: bool, console: Console | None = None) -> None:
        from narrowgauge.cli.console import messages, output

        self.console = console or (messages() if as_json else output())
        self._text = ""

    def __call__(self, told: Told) -> None:
        """Render one event."""
        if self.console.is_terminal:
            self._show(told)
        elif told.text != self._text:
            self.console.print(f"{told.text} ...", soft_wrap=True, markup=False)
        self._text = told.text

    def _show(self, told: Told) -> None:
        if self._live is None:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=16), MofNCompleteColumn())
            self._live = Progress(*columns, TimeRemainingColumn(), console=self.console, transient=True)
            self._live.start()
        if told.text != self._text or self._task is None:
            if self._task is not None:
                self._live.remove_task(self._task)
                self._live.console.print(f"{self._text}: done", style="dim", markup=False)
            self._task = self._live.add_task(told.text, total=max(told.total, 1))
        self._live.update(self._task, completed=told.done)


def _print_tables(found: Tuned) -> None:
    from narrowgauge.cli.console import print_table
    from narrowgauge.tune.estimate import Estimate, whole

    print()
    narrow = found.choices[1:]
    rows = []
    for layer in found.layers:
        cells = [_told(found.cost(layer, choice)) for choice in narrow]
        worst = found.measured.effects[layer, narrow[-1]]
        details = [f"{MILLI * worst.loss_change:+.2f}", f"{worst.grad_error:.3f}", f"{worst.own_grad_error:.3f}"]
        rows.append([layer, *cells, *details, found.tuned.assignment[layer]])
    last = narrow[-1]
    print_table(
        "what each choice costs a layer over a whole training, 1/1000 nat a token, +- its standard error",
        ["layer", *narrow, f"{last}: loss", "gradients off", "own off", "chosen"],
        rows,
    )
    sums = [
        [name, _told(found.expected(dict.fromkeys(found.layers, name))), _told(whole(effect, found.worth))]
        for name, effect in found.measured.together.items()
    ]
    print_table("do parts add up? of a short run, 1/1000 nat a token", ["choice", "sum of layers", "all at once"], sums)
    print_table(
        "least cost for a number of bytes (Pareto front)",
        ["bytes a token", "time share", "cost, 1/1000 nat", "layers by choice"],
        [[f"{p.bytes:,.0f}", f"{p.time:.2f}", f"{MILLI * p.loss:.2f}", _counts(found, p.chosen)] for p in found.front],
    )
    reference = next(iter(found.contenders.values()))
    rows = []
    for each in found.contenders.values():
        above, error = each.above(reference)
        measured = "" if each is reference else _told(Estimate(above, error))
        expected = "" if each is reference else _told(found.expected(each.assignment))
        held_out = "" if math.isnan(each.held_out) else f"{each.held_out:.4f}"
        rows.append(
            [each.name, f"{each.bytes_per_token:,.0f}", f"{each.time_share:.2f}", f"{MILLI * each.cost:.2f}",
             expected, measured, held_out]
        )  # fmt: skip
    columns = ["", "bytes a token", "time share", "cost", "expected loss", "measured loss", "held-out loss"]
    print_table(f"short runs: losses above {reference.name}, 1/1000 nat a token", columns, rows)


def _told(nats: Estimate) -> str:
    if not math.isfinite(nats.value):
        return "not finite"
    told = f"{MILLI * nats.value:.2f}"
    return told if math.isnan(nats.error) else f"{told} +- {MILLI * nats.error:.2f}"


def _counts(found: Tuned, chosen: Sequence[int]) -> str:
    counts = {name: sum(found.choices[at] == name for at in chosen) for name in found.choices}
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def _title(found: Tuned) -> str:
    return f"{len(found.layers)} layers, each in {', '.join(found.choices[:-1])} or {found.choices[-1]}"


def _comment(found: Tuned, argv: Sequence[str]) -> str:
    tuned = found.tuned
    return (
        f"narrowgauge tune {shlex.join(argv)}\n"
        f"{_counts(found, [found.choices.index(tuned.assignment[layer]) for layer in found.layers])}; "
        f"{tuned.bytes_per_token:,.0f} bytes a token; a cost of {MILLI * tuned.cost:.2f} thousandths of a nat "
        f"over all layers in {found.wide}\n"
        "train with it: narrowgauge train --recipe FILE"
    )
