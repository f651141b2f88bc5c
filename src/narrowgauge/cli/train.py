"""`narrowgauge train` and `narrowgauge resume`."""

from __future__ import annotations

from collections.abc import Sequence

from narrowgauge.cli.arguments import Parser

EXIT_INTERRUPTED = 130

_HELP = """usage: narrowgauge train [--config FILE] [--KEY VALUE ...]

Train a language model. Without options: a small GPT in FP8 on text that every Python carries, in a few minutes on two
CPU cores. Files and keys are read in the order given, later ones win; values are YAML; keys are never abbreviated.

examples:
  narrowgauge train
  narrowgauge train --recipe bf16 --steps 200 --optimizer.lr 1e-3
  narrowgauge train --recipe fp8_current --recipe_fields "{{tf32: true}}" --data.corpus "texts/*.txt"
  narrowgauge train --config runs/NAME/config.yaml --name again --seed 1

options:
  -h, --help
      this text
  --config FILE
      a YAML file of the keys below, nested at the dots
  --json
      print the closing tables as JSON; progress goes to standard error
  --debug
      after an error, the traceback too

keys, with their defaults:
{keys}
"""


def train(argv: Sequence[str]) -> int:
    """Train as `argv` says; 130 where the run was interrupted and saved."""
    from narrowgauge.cli.config import help_text, parse_config

    if any(word in ("-h", "--help") for word in argv):
        print(_HELP.format(keys=help_text()), end="")
        return 0
    config = parse_config([word for word in argv if word != "--json"])

    from narrowgauge.cli.progress import Reporter
    from narrowgauge.train.events import Status
    from narrowgauge.train.loop import run

    with Reporter(log_every=config.log_every, as_json="--json" in argv) as reporter:
        result = run(config, reporter)
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

    from narrowgauge.cli.progress import Reporter
    from narrowgauge.train.events import Status
    from narrowgauge.train.loop import resume as resume_run
    from narrowgauge.train.run_folder import RunFolder

    config = RunFolder.open(arguments.run).read_config()
    with Reporter(log_every=config.log_every, as_json=arguments.json) as reporter:
        result = resume_run(arguments.run, reporter, checkpoint=arguments.checkpoint)
    return EXIT_INTERRUPTED if result.status is Status.INTERRUPTED else 0
