"""`narrowgauge sft`, `dpo`, `grpo`, `reward` and `ppo`."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, get_origin, get_type_hints

import yaml

from narrowgauge.cli.arguments import Parser
from narrowgauge.cli.processes import group_of, rank, told_once, world_size
from narrowgauge.errors import ConfigError
from narrowgauge.integrations.finetune_config import GROUPS, TASKS, FinetuneConfig, values_of
from narrowgauge.integrations.finetune_run import FinetuneRun
from narrowgauge.integrations.requirements import require
from narrowgauge.train.parse import build

if TYPE_CHECKING:
    from narrowgauge.integrations.finetune import Outcome
    from narrowgauge.train.events import OnEvent

EXIT_INTERRUPTED = 130
# As pyproject's extra `hf` has them.
_REQUIRED = {"transformers": "5.0", "accelerate": "1.6", "datasets": "4.0", "trl": "1.16"}
_ABOUT = {
    "sft": (
        'Supervised fine-tuning. Lines of FILE: {"text"}, {"messages"}, or {"prompt", "completion"}.',
        [
            "--model my-model --data chats.jsonl --steps 200",
            "--model Qwen/Qwen3-0.6B --data chats.jsonl --eval-data held-out.jsonl --eval-every 50 --recipe fp8_lm_o2",
            "--model my-model --data texts.jsonl --packing --max-length 512 --output runs/texts",
        ],
    ),
    "dpo": (
        'Direct preference optimization. Lines of FILE: {"prompt", "chosen", "rejected"}, the prompt may be left out.\n'
        "The reference model is the model as it was, frozen by the recipe.",
        [
            "--model my-model --data pairs.jsonl --steps 200",
            "--model my-model --data pairs.jsonl --beta 0.05 --loss ipo --output runs/pairs",
        ],
    ),
    "grpo": (
        'Group relative policy optimization. Lines of FILE: {"prompt", ...}; other keys go to the reward functions,\n'
        "which are called with prompts, completions and those keys, lists of one item an answer, and return a number\n"
        "for each.",
        [
            "--model my-model --data sums.jsonl --reward rewards:is_right --steps 100",
            "--model my-model --data sums.jsonl --reward rewards:is_right --reward rewards:is_short --generations 4",
        ],
    ),
    "reward": (
        'A reward model. Lines of FILE: {"prompt", "chosen", "rejected"}, the prompt may be left out.',
        ["--model my-model --data pairs.jsonl --steps 200 --output runs/reward"],
    ),
    "ppo": (
        'Proximal policy optimization. Lines of FILE: {"prompt", ...}. The reward is a model that `reward` trained,\n'
        "or functions as `grpo` takes them.",
        [
            "--model my-model --data prompts.jsonl --reward-model runs/reward/model --steps 100",
            "--model my-model --data sums.jsonl --reward rewards:is_right --kl 0.1",
        ],
    ),
}


def sft(argv: Sequence[str]) -> int:
    """Fine-tune on examples; 130 where the run was interrupted and saved."""
    return _command("sft", argv)


def dpo(argv: Sequence[str]) -> int:
    """Fine-tune on preferences."""
    return _command("dpo", argv)


def grpo(argv: Sequence[str]) -> int:
    """Fine-tune on rewards of groups of answers."""
    return _command("grpo", argv)


def reward(argv: Sequence[str]) -> int:
    """Train a reward model."""
    return _command("reward", argv)


def ppo(argv: Sequence[str]) -> int:
    """Fine-tune on rewards, by PPO."""
    return _command("ppo", argv)


def resume_run(path: str, checkpoint: str | None, as_json: bool) -> int:
    """Continue a run, for `narrowgauge resume`, too."""
    with told_once():
        config = FinetuneRun.open(path).settings()

    def act(on_event: OnEvent) -> Outcome:
        from narrowgauge.integrations.finetune import resume

        return resume(path, on_event, checkpoint)

    return _report(config, as_json, act)


def prepare_libraries(*, most_processes: int | None = None) -> None:
    """Check that the libraries are there, and let them say no more than errors: progress is ours to show.

    Modules in the working directory can be imported from now on. Raises ConfigError, also for more processes than the
    command can use.
    """
    if most_processes is not None and world_size() > most_processes:
        with told_once():
            raise ConfigError(
                f"expected at most {most_processes} process, torchrun started {world_size()}: start this command "
                "without it"
            )
    for package, least in _REQUIRED.items():
        require(package, least, "narrowgauge[hf]")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in ("torchao", "torch.utils._pytree"):  # what optional libraries of transformers' say on import
        logging.getLogger(name).setLevel(logging.ERROR)
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _command(task: str, argv: Sequence[str]) -> int:
    with told_once():
        parser = _parser(task)
        arguments = vars(parser.parse(argv))
        as_json, is_resumed, path = (arguments.pop(name) for name in ("json", "resume", "config"))
        given = {key: value for key, value in arguments.items() if value is not None}
        if path is not None:
            given = _read_config(path, task) | given
        run_to_resume = _run_to_resume(task, given) if is_resumed else None
        config = None if is_resumed else _new(task, given, parser)
    if config is None:
        return resume_run(str(run_to_resume), None, as_json)

    def act(on_event: OnEvent) -> Outcome:
        from narrowgauge.integrations.finetune import run

        return run(config, on_event)

    return _report(config, as_json, act)


def _new(task: str, given: dict[str, Any], parser: Parser) -> FinetuneConfig:
    """The configuration of a new run, on as many processes as there are."""
    for key in ("model", "data"):
        if key not in given:
            parser.error(f"the option --{key} is required")
    config = build(TASKS[task], given, "")
    config = dataclasses.replace(config, processes=config.processes or world_size())
    config.check()
    return config


def _report(config: FinetuneConfig, as_json: bool, act: Callable[[OnEvent], Outcome]) -> int:
    """Run, as one of the processes that torchrun started; the first one shows what happens."""
    with told_once():
        _refuse_parted()
        prepare_libraries()
    from narrowgauge.cli.finetune_progress import FinetuneReporter
    from narrowgauge.train.events import Status

    with warnings.catch_warnings():
        if rank() != 0:
            warnings.simplefilter("ignore")
        with (
            group_of(world_size(), config.torch_device(), config.timeout_s),
            FinetuneReporter(log_every=config.log_every, as_json=as_json) as reporter,
        ):
            outcome = act(reporter)
    return EXIT_INTERRUPTED if outcome.status is Status.INTERRUPTED else 0


def _refuse_parted() -> None:
    """Raise ConfigError where `accelerate launch` asks for what these commands would not do."""
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"):
        value = os.environ.get(name, "false")
        if value.lower() not in ("false", "0", ""):
            raise ConfigError(
                f"{name}={value}: expected processes that each have the whole model, whose gradients travel as the "
                "recipe says: start them by torchrun, or by accelerate launch without it"
            )


def _read_config(path: str, task: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            values = values_of(file.read(), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: expected a YAML file in UTF-8, found: {error}: look at the path") from None
    if (found := values.pop("task", task)) != task:
        raise ConfigError(f"--config {path}: expected a configuration for {task}, found one for {found}")
    return values


def _run_to_resume(task: str, given: dict[str, Any]) -> str:
    """The run's folder, whose own configuration is the truth. Raises ConfigError where another one is asked for."""
    if "output" not in given:
        raise ConfigError("--resume: expected --output RUN, the run to continue, found none: give it")
    config = FinetuneRun.open(given["output"]).settings()
    if config.task != task:
        raise ConfigError(f"{given['output']}: expected a run of {task}, found one of {config.task}: use that command")
    for key, value in given.items():
        if key != "output" and value != getattr(config, key):
            raise ConfigError(
                f"{key}={value!r}: expected {getattr(config, key)!r}, with which the run began: leave it out, or start "
                "a new run"
            )
    return given["output"]


def _parser(task: str) -> Parser:
    about, examples = _ABOUT[task]
    parser = Parser(task, about, [f"narrowgauge {task} {words}" for words in examples])
    parser.usage = f"narrowgauge {task} --model DIR|NAME --data FILE [options]"
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    hints = get_type_hints(TASKS[task])
    for each in dataclasses.fields(TASKS[task]):
        _add(groups[each.metadata["group"]], each, hints[each.name])
    run = groups["run"]
    run.add_argument("--config", metavar="FILE", help="YAML of these options, as a run's config.yaml; options win")
    run.add_argument("--resume", action="store_true", help="continue the run in --output, as it was configured")
    run.add_argument(
        "--json", action="store_true", help="print the closing figures as JSON; progress to standard error"
    )
    return parser


def _add(group: Any, field: dataclasses.Field, hint: Any) -> None:
    """The option of one field: nothing by default, so that a file's value is known from a given one."""
    name, text = f"--{field.name.replace('_', '-')}", field.metadata["help"].replace("%", "%%")
    if field.default not in (dataclasses.MISSING, None, False):
        text += f" (default: {field.default})"
    if hint is bool:
        group.add_argument(name, action=argparse.BooleanOptionalAction, default=None, help=text)
    elif get_origin(hint) is list:
        group.add_argument(name, action="append", metavar="PATH", help=f"{text}; may be given several times")
    elif get_origin(hint) is dict:
        group.add_argument(name, type=_mapping, metavar="YAML", help=text)
    elif "choices" in field.metadata:
        group.add_argument(name, choices=field.metadata["choices"], help=text)
    else:
        kind = hint if hint in (int, float) else str
        group.add_argument(name, type=kind, metavar={int: "N", float: "X"}.get(kind, "VALUE"), help=text)


def _mapping(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected keys and values as {{key: value}}, found {text!r}")
    return value
