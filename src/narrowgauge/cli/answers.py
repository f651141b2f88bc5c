"""`eval`, `generate` and `export` of fine-tuning runs and Hugging Face directories."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from narrowgauge.cli.arguments import Parser
from narrowgauge.cli.console import print_json, print_table
from narrowgauge.cli.finetune import prepare_libraries
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.integrations.finetune_config import FinetuneConfig, RewardConfig, SFTConfig
from narrowgauge.integrations.finetune_run import FinetuneRun
from narrowgauge.recipes.library import recipe as recipe_named
from narrowgauge.recipes.spec import Recipe


def is_directory_of_model(path: str) -> bool:
    """True for a fine-tuning run, and for a Hugging Face directory."""
    has_model = any((Path(path) / name).is_file() for name in ("config.json", "adapter_config.json"))
    return FinetuneRun.is_at(path) or (has_model and not (Path(path) / "config.yaml").is_file())


def add_evaluation_options(parser: Parser) -> None:
    """Options of `eval` for models from fine-tuning and Hugging Face directories."""
    group = parser.add_argument_group("fine-tuning runs and Hugging Face directories")
    group.add_argument(
        "--data",
        metavar="FILE",
        help="held-out JSON Lines: text, messages, prompt and completion; of a reward model chosen and rejected",
    )
    group.add_argument("--batch-size", type=int, metavar="N", help="examples at once (default: 8)")
    group.add_argument(
        "--max-length", type=int, metavar="N", help="tokens kept of an example (default: as in training)"
    )
    group.add_argument(
        "--loss-on", choices=["auto", "completion", "all"], help="tokens that count (default: as in training)"
    )
    _add_model_options(group)


def add_generation_options(parser: Parser) -> None:
    """Options of `generate` for models from fine-tuning and Hugging Face directories."""
    group = parser.add_argument_group("fine-tuning runs and Hugging Face directories")
    group.add_argument(
        "--chat", action="store_true", help="give the prompt as a user's message; print the answer alone"
    )
    group.add_argument("--output", metavar="FILE", help="a new file for the answers to --batch")
    group.add_argument("--name", help="what the answer file calls the model (default: its directory's name)")
    group.add_argument("--batch-size", type=int, metavar="N", help="questions at once (default: 8)")
    _add_model_options(group)


def _add_model_options(group: Any) -> None:
    group.add_argument("--recipe", help="compute by this recipe (default: a run's own; else as the files have it)")
    group.add_argument("--chat-template", metavar="FILE", help="a Jinja file in place of the tokenizer's own")
    group.add_argument("--gguf-file", metavar="NAME", help="a .gguf file in the directory")


def refuse_options(arguments: argparse.Namespace, names: tuple[str, ...], reason: str) -> None:
    """Raise ConfigError where an option was given that does not go with the model."""
    for name in names:
        if getattr(arguments, name) not in (None, False):
            raise ConfigError(f"--{name.replace('_', '-')}: {reason}")


def evaluate_directory(arguments: argparse.Namespace) -> int:
    """Print loss and perplexity on held-out lines; of a reward model, how well it tells chosen from rejected."""
    refuse_options(arguments, ("corpus", "batches"), "for runs of `narrowgauge train`: give --data FILE instead")
    config, source, recipe = _source(arguments)
    data = arguments.data or (config and config.eval_data)
    if data is None:
        raise ConfigError("--data: expected held-out JSON Lines, found none: give --data FILE")
    _at_least_one(1 if arguments.batch_size is None else arguments.batch_size, "--batch-size")
    judge = _preferences if _is_reward(config, source) else _held_out_loss
    figures = {"model": str(source), "recipe": recipe.name if recipe else "none", "data": data}
    figures |= judge(arguments, config, source, recipe, data)
    if arguments.json:
        print_json(figures)
    else:
        print_table("", ["", ""], [(name.replace("_", " "), value) for name, value in figures.items()])
    return 0


def _held_out_loss(
    arguments: argparse.Namespace, config: FinetuneConfig | None, source: Path, recipe: Recipe | None, data: str
) -> dict[str, Any]:
    trained = config if isinstance(config, SFTConfig) else None
    loss_on = arguments.loss_on or (trained.loss_on if trained else "auto")

    from narrowgauge.data.conversations import check_records
    from narrowgauge.integrations.finetune_models import check_chat_template, check_end_token
    from narrowgauge.integrations.held_out import held_out_loss

    records = check_records(data, SFTConfig.formats)
    loaded = _load(arguments, config, source, recipe)
    (check_chat_template if records.conversational else check_end_token)(loaded.tokenizer, arguments.run)
    found = held_out_loss(
        loaded, records, loss_on=loss_on, max_length=_length(arguments, config),
        batch_size=arguments.batch_size or 8, on_progress=_progress("examples"),
    )  # fmt: skip
    return {
        "loss_on": loss_on,
        "loss": found.loss,
        "perplexity": found.perplexity,
        "tokens": found.tokens,
        "examples": found.examples,
        "cut": found.cut,
        "left_out": found.empty,
    }


def _preferences(
    arguments: argparse.Namespace, config: FinetuneConfig | None, source: Path, recipe: Recipe | None, data: str
) -> dict[str, Any]:
    refuse_options(arguments, ("loss_on",), "for language models; of a reward model's pairs all tokens are read")

    from narrowgauge.data.conversations import check_records
    from narrowgauge.integrations.finetune_models import check_chat_template, check_end_token
    from narrowgauge.integrations.preferences import preferences

    records = check_records(data, RewardConfig.formats)
    loaded = _load(arguments, config, source, recipe, is_reward=True)
    (check_chat_template if records.conversational else check_end_token)(loaded.tokenizer, arguments.run)
    found = preferences(
        loaded, records, max_length=_length(arguments, config), batch_size=arguments.batch_size or 8,
        on_progress=_progress("pairs"),
    )  # fmt: skip
    return dataclasses.asdict(found)


def _length(arguments: argparse.Namespace, config: FinetuneConfig | None) -> int:
    return arguments.max_length if arguments.max_length is not None else (config.max_length if config else 0)


def _is_reward(config: FinetuneConfig | None, source: Path) -> bool:
    """True for a run of `reward`, and for a directory whose model has one output for a whole sequence."""
    if config is not None:
        return config.task == RewardConfig.task
    try:
        described = json.loads((source / "config.json").read_text(encoding="utf-8"))
        return any(name.endswith("ForSequenceClassification") for name in described.get("architectures") or ())
    except (OSError, ValueError, AttributeError):
        return False  # whatever is wrong with it, loading says


def generate_from_directory(arguments: argparse.Namespace) -> int:
    """Continue a prompt, or answer a file of questions."""
    if arguments.batch is not None and arguments.output is None:
        raise ConfigError("--batch: expected --output FILE, where the answers go, found none: give it")
    if arguments.batch is None:
        refuse_options(arguments, ("output", "name"), "goes with --batch FILE")
    config, source, recipe = _source(arguments)
    if _is_reward(config, source):
        raise ConfigError(f"{arguments.run}: expected a language model, found a reward model, which writes nothing")

    from narrowgauge.integrations.answers import Sampling, Writer
    from narrowgauge.integrations.finetune_models import check_chat_template

    sampling = Sampling(
        tokens=arguments.tokens or (128 if arguments.batch is None else Sampling.tokens),
        temperature=arguments.temperature,
        top_k=arguments.top_k if arguments.top_k is not None else (50 if arguments.batch is None else 0),
        seed=arguments.seed,
        batch_size=_at_least_one(arguments.batch_size or Sampling.batch_size, "--batch-size"),
    )
    if arguments.batch is not None:
        return _answer_batch(arguments, config, source, recipe, sampling)
    loaded = _load(arguments, config, source, recipe)
    prompt = os.fsencode(arguments.prompt).decode("utf-8", errors="replace")
    writer, temperature = Writer(loaded, sampling), 0.8 if arguments.temperature is None else arguments.temperature
    if arguments.chat:
        check_chat_template(loaded.tokenizer, arguments.run)
        print(writer.answer([[{"role": "user", "content": prompt}]], temperature)[0])
    else:
        print(prompt + writer.write([prompt], temperature)[0])
    return 0


def export_run(arguments: argparse.Namespace) -> int:
    """Write a fine-tuned model as a Hugging Face directory of its own."""
    run = FinetuneRun.open(arguments.run)
    config, source = run.settings(), run.weights(arguments.checkpoint)
    prepare_libraries(most_processes=1)
    from narrowgauge.integrations.finetune_export import export_directory

    is_reward = config.task == "reward"
    directory = export_directory(source, arguments.directory, arguments.format, is_reward=is_reward)
    print(f"wrote {directory}: {source.name} of {run.path}, weights in {arguments.format}")
    return 0


def _answer_batch(
    arguments: argparse.Namespace, config: FinetuneConfig | None, source: Path, recipe: Recipe | None, sampling: Any
) -> int:
    from narrowgauge.data.questions import Benchmark, read_questions
    from narrowgauge.integrations.answers import UNANSWERED, Writer, answers
    from narrowgauge.integrations.finetune_models import check_chat_template

    output = Path(arguments.output)
    if output.exists():
        raise ConfigError(f"--output {output}: expected a new file, found one there: choose another name")
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: expected a folder {output.parent}, found none: make it")
    questions = read_questions(arguments.batch)
    loaded = _load(arguments, config, source, recipe)
    check_chat_template(loaded.tokenizer, arguments.run)
    name = arguments.name or Path(arguments.run).resolve().name
    written, unanswered = answers(Writer(loaded, sampling), questions, name, _progress("answers"))
    if questions.benchmark is Benchmark.ALPACA_EVAL:
        text = json.dumps(written, indent=2, ensure_ascii=False) + "\n"
    else:
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in written)
    from narrowgauge.train.folder import write_file

    write_file(output, text)
    print(f"wrote {output}: {len(written)} answers in {questions.benchmark}'s format, as {name!r}")
    if unanswered:
        raise DataError(
            f"{len(unanswered)} of {len(written)} questions could not be answered, and have "
            f"{UNANSWERED[questions.benchmark]!r} in {output}: {'; '.join(unanswered)}"
        )
    return 0


def _source(arguments: argparse.Namespace) -> tuple[FinetuneConfig | None, Path, Recipe | None]:
    """(the run's configuration, the directory with weights, what to compute by)."""
    config = None
    source = Path(arguments.run)
    if FinetuneRun.is_at(arguments.run):
        run = FinetuneRun(source)
        config, source = run.settings(), run.weights(arguments.checkpoint)
    elif arguments.checkpoint is not None:
        raise ConfigError(f"--checkpoint: {arguments.run} is no run, and has no checkpoints: leave it out")
    if arguments.recipe is not None:
        recipe = recipe_named(arguments.recipe)
    else:
        recipe = config.build_recipe() if config is not None else None
    prepare_libraries(most_processes=1)
    return config, source, recipe


def _load(
    arguments: argparse.Namespace,
    config: FinetuneConfig | None,
    source: Path,
    recipe: Recipe | None,
    *,
    is_reward: bool = False,
) -> Any:
    from narrowgauge.integrations.finetune_models import open_directory
    from narrowgauge.train.config import TrainConfig

    device = arguments.device or (config.device if config is not None else "auto")
    return open_directory(
        source,
        recipe=recipe,
        device=TrainConfig(device=device).torch_device(),
        gguf_file=arguments.gguf_file,
        chat_template=arguments.chat_template,
        is_reward=is_reward,
    )


def _progress(what: str) -> Any:
    def show(done: int, total: int) -> None:
        print(f"{done}/{total} {what} ...", file=sys.stderr)

    return show


def _at_least_one(value: int, option: str) -> int:
    if value < 1:
        raise ConfigError(f"{option}={value}: expected 1 or more: change it")
    return value
