"""`narrowgauge bench`: runs the measuring scripts of the repository, one or all of them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import narrowgauge
from narrowgauge.cli.arguments import Parser
from narrowgauge.cli.bench_suite import SUITE, Benchmark
from narrowgauge.errors import ConfigError, closest

RUNS = "runs"  # where runs of all benchmarks lie


def bench(argv: Sequence[str]) -> int:
    """Run one script, or all of them; the exit code says whether something failed or missed its goal."""
    arguments = _parser().parse(argv)
    if arguments.all == bool(arguments.what):
        raise ConfigError("expected the name of a benchmark, or --all: see `narrowgauge bench --help`")
    if arguments.all:
        return _run_all(arguments)
    only = [
        f"--{name.replace('_', '-')}" for name in ("output", "only", "limit_s") if getattr(arguments, name) is not None
    ]
    if only:
        raise ConfigError(f"{only[0]} is for --all: leave it out, or add --all")
    benchmark = _named(arguments.what)
    words = benchmark.quick if arguments.quick else benchmark.words
    if words is None:
        why = benchmark.why_not and f", since {benchmark.why_not}"
        raise ConfigError(f"--quick: '{benchmark.name}' has no quick form{why}: leave it out")
    command = [sys.executable, str(_checkout() / "benchmarks" / f"{benchmark.script}.py"), *words]
    return _print_result(command) if arguments.json else subprocess.run(command).returncode


def _parser() -> Parser:
    width = max(len(benchmark.name) for benchmark in SUITE)
    parser = Parser(
        "bench",
        "Measure this machine; ratios are taken within one run. The scripts are in the repository's benchmarks/.\n\n"
        + "\n".join(f"  {benchmark.name:<{width}} {benchmark.what}" for benchmark in SUITE)
        + "\n\n--all runs every one of them, one after the other, and writes a page, index.html, and bench.json:\n"
        "goals, what was found, and bars against torch, torchao and bitsandbytes where they are installed. Begun\n"
        "again after an interruption, it goes on. It takes most of a day; --quick takes minutes, and shows that all\n"
        "of them work.",
        ["narrowgauge bench casts", "narrowgauge bench linear --json", "narrowgauge bench --all --quick",
         "narrowgauge bench --all --only casts linear optimizer"],
    )  # fmt: skip
    parser.add_argument("what", nargs="?", metavar="NAME", help="what to measure, see above")
    parser.add_argument("--all", action="store_true", help="all of them")
    parser.add_argument("--quick", action="store_true", help="small sizes and few steps, whose figures say little")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="with --all: these")
    parser.add_argument("--output", metavar="DIR", help=f"with --all: the folder (default: {RUNS}/bench-COMMIT)")
    parser.add_argument(
        "--limit-s", type=float, metavar="SECONDS", help="with --all: stop each after this (default: its own)"
    )
    parser.add_json_option()
    return parser


def _run_all(arguments: Namespace) -> int:
    from narrowgauge.cli.bench_all import FAILED, MISSED, PAGE, STATE, TIMED_OUT, Suite, commit_of

    if arguments.limit_s is not None and arguments.limit_s <= 0:
        raise ConfigError(f"--limit-s {arguments.limit_s:g}: expected more than 0: change it")
    chosen = [_named(name) for name in arguments.only] if arguments.only else list(SUITE)
    checkout = _checkout()
    default = Path(RUNS) / f"bench-{commit_of(checkout)}{'-quick' if arguments.quick else ''}"
    output = default if arguments.output is None else Path(arguments.output)
    suite = Suite(checkout, output, arguments.quick, arguments.limit_s, say=_say)
    record = suite.run(chosen)
    _say(f"wrote {output / PAGE} and {output / STATE}")
    if arguments.json:
        print((output / STATE).read_text(encoding="utf-8"), end="")
    names = {benchmark.name for benchmark in chosen}
    ended = [run["status"] for run in record["runs"] if run["name"] in names]
    return int(any(status in (FAILED, MISSED, TIMED_OUT) for status in ended))


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _named(name: str) -> Benchmark:
    for benchmark in SUITE:
        if benchmark.name == name:
            return benchmark
    raise ConfigError(f"unknown benchmark '{name}'{closest(name, [each.name for each in SUITE])}")


def _print_result(command: list[str]) -> int:
    """Run a script that writes its result as a file, and print that file; its table goes to standard error."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "NARROWGAUGE_RESULTS": folder}
        code = subprocess.run([*command, "--json"], env=environment, stdout=2).returncode
        for path in Path(folder).glob("*.json"):
            print(path.read_text(encoding="utf-8"), end="")
    return code


def _checkout() -> Path:
    """The checkout that this package is installed from, or the working directory."""
    for home in (Path(narrowgauge.__file__).resolve().parents[2], Path.cwd()):
        if (home / "benchmarks" / "common.py").is_file():
            return home
    raise ConfigError(
        "expected benchmarks/ beside the package or in this folder, found neither: the measuring scripts are part of "
        "the repository, not of the installed package; run this command in a checkout"
    )
