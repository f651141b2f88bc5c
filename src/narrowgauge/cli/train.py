"""`narrowgauge train` and `narrowgauge resume`."""

from __future__ import annotations

from collections.abc import Sequence

from narrowgauge.cli.arguments import Parser

EXIT_INTERRUPTED = 130


def train(argv: Sequence[str]) -> int:
    """Train as `argv` says; 130 where the run was interrupted and saved."""
    from narrowgauge.cli.config import parse_arguments

    config, as_json = parse_arguments(argv)

    from narrowgauge.cli.processes import launch, process_group
    from narrowgauge.cli.progress import Reporter
    from narrowgauge.train.events import Status
    from narrowgauge.train.loop import run

    with process_group(config), Reporter(log_every=config.log_every, as_json=as_json) as reporter:
        result = run(config, reporter, launch())
    return EXIT_INTERRUPTED if result.status is Status.INTERRUPTED else 0


def resume(argv: Sequence[str]) -> int:
    """Continue a run; 130 where it was interrupted and saved again."""
    parser = Parser(
        "resume",
        "Continue a run where its last checkpoint stands. The result is bitwise that of a run that never stopped.",
        [
            "narrowgauge resume runs/NAME",
            "narrowgauge resume runs/NAME --checkpoint last-good",
            "narrowgauge resume runs/NAME --checkpoint step-000100",
        ],
    )
    parser.add_argument("run", metavar="RUN", help="the run's folder")
    parser.add_argument(
        "--checkpoint", help="a checkpoint's name, or last-good for the newest that is whole (default: the newest)"
    )
    parser.add_json_option()
    arguments = parser.parse(argv)

    from narrowgauge.integrations.finetune_run import FinetuneRun

    if FinetuneRun.is_at(arguments.run):
        from narrowgauge.cli.finetune import resume_run

        return resume_run(arguments.run, arguments.checkpoint, arguments.json)

    from narrowgauge.cli.processes import process_group
    from narrowgauge.cli.progress import Reporter
    from narrowgauge.train.events import Status
    from narrowgauge.train.loop import resume as resume_run
    from narrowgauge.train.run_folder import RunFolder

    config = RunFolder.open(arguments.run).read_config()
    with process_group(config), Reporter(log_every=config.log_every, as_json=arguments.json) as reporter:
        result = resume_run(arguments.run, reporter, checkpoint=arguments.checkpoint)
    return EXIT_INTERRUPTED if result.status is Status.INTERRUPTED else 0
