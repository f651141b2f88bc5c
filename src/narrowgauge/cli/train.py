"""`narrowgauge train` and `narrowgauge resume`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from narrowgauge.cli.arguments import Parser
from narrowgauge.errors import ConfigError

EXIT_INTERRUPTED = 130


def train(argv: Sequence[str]) -> int:
    """Train as `argv` says; 130 where the run was interrupted and saved."""
    from narrowgauge.cli.config import parse_arguments
    from narrowgauge.cli.processes import launch, process_group, rank, told_once

    with told_once():
        config, as_json, live_port = parse_arguments(argv)

    from narrowgauge.cli.live import LiveRun
    from narrowgauge.cli.progress import Reporter
    from narrowgauge.train.events import Status
    from narrowgauge.train.loop import run

    with (
        process_group(config),
        Reporter(log_every=config.log_every, as_json=as_json) as reporter,
        LiveRun(reporter, live_port if rank() == 0 else None) as listener,
    ):
        result = run(config, listener, launch())
    return EXIT_INTERRUPTED if result.status is Status.INTERRUPTED else 0


def resume(argv: Sequence[str]) -> int:
    """Continue a run; 130 where it was interrupted and saved again."""
    parser = Parser(
        "resume",
        "Continue a run where its last checkpoint stands. The result is bitwise that of a run that never stopped.\n"
        "--KEY VALUE changes what watches the run and what it writes, from here on: guard.*, divergence.*,\n"
        "save_every, eval_every, statistics_every and the like.",
        [
            "narrowgauge resume runs/NAME",
            "narrowgauge resume runs/NAME --checkpoint last-good",
            "narrowgauge resume runs/NAME --guard.mode off",
            "narrowgauge resume runs/NAME --checkpoint step-000100",
        ],
    )
    parser.usage = "narrowgauge resume RUN [options] [--KEY VALUE ...]"
    parser.add_argument("run", metavar="RUN", help="the run's folder")
    parser.add_argument(
        "--checkpoint", help="a checkpoint's name, or last-good for the newest that is whole (default: the newest)"
    )
    parser.add_json_option()
    parser.add_argument("--live", action="store_true", help="serve the run's report on this machine alone")
    parser.add_argument("--live_port", "--live-port", type=int, help="the port of --live; default: any that is free")

    from narrowgauge.cli.processes import process_group, rank, told_once
    from narrowgauge.integrations.finetune_run import FinetuneRun
    from narrowgauge.train.changes import changed
    from narrowgauge.train.run_folder import RunFolder

    with told_once():
        arguments, rest = parser.parse_known_args(argv)
        changes = _changes(parser, rest)
        if arguments.live_port is not None and not arguments.live:
            parser.error("--live_port: expected it with --live, found it alone: add --live, or leave it out")
        is_fine_tuning = FinetuneRun.is_at(arguments.run)
        if is_fine_tuning and (keys := [*(["live"] if arguments.live else []), *changes]):
            parser.error(f"--{keys[0]}: expected a run of `train`, found one of fine-tuning: leave it out")
        # as it goes on: what is shown how often, and how long processes wait, may be told otherwise, too
        config = None if is_fine_tuning else changed(RunFolder.open(arguments.run).read_config(), changes)[0]
    if config is None:
        from narrowgauge.cli.finetune import resume_run as resume_fine_tuning

        return resume_fine_tuning(arguments.run, arguments.checkpoint, arguments.json)

    from narrowgauge.cli.live import LiveRun
    from narrowgauge.cli.progress import Reporter
    from narrowgauge.train.events import Status
    from narrowgauge.train.loop import resume as resume_run

    live_port = (arguments.live_port or 0) if arguments.live else None
    with (
        process_group(config),
        Reporter(log_every=config.log_every, as_json=arguments.json) as reporter,
        LiveRun(reporter, live_port if rank() == 0 else None) as listener,
    ):
        result = resume_run(arguments.run, listener, arguments.checkpoint, changes)
    return EXIT_INTERRUPTED if result.status is Status.INTERRUPTED else 0


def _changes(parser: Parser, words: Sequence[str]) -> dict[str, Any]:
    """Keys of the configuration among what `parser` does not know, and their values, read as YAML."""
    if not words:
        return {}
    from narrowgauge.train.config import TrainConfig
    from narrowgauge.train.parse import read_yaml

    sections = {field.name for field in dataclasses.fields(TrainConfig)}
    rest, found = list(words), {}
    while rest:
        word = rest.pop(0)
        key, equals, text = word.removeprefix("--").partition("=")
        key = key.replace("-", "_")
        if not word.startswith("--") or key.partition(".")[0] not in sections:
            parser.refuse([word])
        if not equals:
            text = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        name = key.rpartition(".")[2]
        try:
            found[key] = read_yaml(f"{name}: {text}")[name]
        except (ValueError, TypeError, KeyError):
            raise ConfigError(f"{key}={text}: expected a value in YAML: quote it") from None
    return found
