"""The configuration of a fine-tuning run: a frozen dataclass for each task, to and from YAML. Needs no transformers.

Each field says what it is and to which group of `--help` it belongs. `config.yaml` in a run folder holds every value,
and which task they are for; it is the truth on resume.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import yaml

from narrowgauge.data.conversations import Format
from narrowgauge.errors import ConfigError, closest
from narrowgauge.recipes.spec import Recipe
from narrowgauge.train.config import named_recipe, spelled
from narrowgauge.train.parse import build, read_yaml

MODEL, DATA, TRAINING, SAMPLING, RUN = "model", "data", "training", "sampling and reward", "run"
GROUPS = (MODEL, DATA, TRAINING, SAMPLING, RUN)


def _option(group: str, text: str, default: Any = MISSING, **more: Any) -> Any:
    """A field. more: `choices`, and the least value allowed as `least` (itself included)
    or `above` (not), the largest as `most` or `below`."""
    metadata = {"group": group, "help": text, **more}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """What all tasks share."""

    task: ClassVar[str]
    formats: ClassVar[tuple[Format, ...]]

    model: str = _option(MODEL, "directory of a Hugging Face model, or its name on the hub")
    gguf_file: str | None = _option(MODEL, "a .gguf file in that directory, whose weights are taken in full", None)
    recipe: str = _option(MODEL, "precision recipe, see `narrowgauge chart`", "narrow8")
    recipe_fields: dict[str, Any] = _option(MODEL, "fields of the recipe to change, as YAML: '{tf32: true}'", {})
    chat_template: str | None = _option(MODEL, "a Jinja file in place of the tokenizer's own chat template", None)
    device: str = _option(MODEL, "cpu, cuda, or auto", "auto", choices=("auto", "cpu", "cuda"))
    threads: int = _option(MODEL, "CPU threads; 0: torch's choice", 0, least=0)

    data: str = _option(DATA, "JSON Lines to train on")
    eval_data: str | None = _option(DATA, "JSON Lines to evaluate on, in the same format", None)
    max_length: int = _option(DATA, "tokens kept of an example; 0: 1024, or the model's context", 0, least=0)

    steps: int = _option(TRAINING, "optimizer steps; 0: as many as the epochs take", 0, least=0)
    epochs: float = _option(TRAINING, "passes over the data, where no steps are given", 1.0, above=0)
    batch_size: int = _option(TRAINING, "examples a micro-batch", 8, least=1)
    accumulation: int = _option(TRAINING, "micro-batches an optimizer step", 1, least=1)
    learning_rate: float = _option(TRAINING, "at its highest", 2e-5, above=0)
    schedule: str = _option(
        TRAINING, "of the learning rate after warmup", "linear", choices=("linear", "cosine", "constant")
    )
    warmup_steps: int = _option(TRAINING, "steps over which the learning rate rises", 0, least=0)
    weight_decay: float = _option(TRAINING, "of AdamW", 0.0, least=0)
    clip: float = _option(TRAINING, "largest norm of the gradient; 0: no limit", 1.0, least=0)
    gradient_checkpointing: bool = _option(TRAINING, "recompute activations in backward instead of saving them", False)
    seed: int = _option(TRAINING, "of data order, dropout and sampling", 0, least=0)

    output: str | None = _option(RUN, "the run's folder; left out: below runs/, named by task, model and time", None)
    eval_every: int = _option(RUN, "steps between evaluations; 0: at the end only", 0, least=0)
    save_every: int = _option(RUN, "steps between checkpoints; 0: at the end only", 100, least=0)
    keep_last: int = _option(RUN, "checkpoints kept", 2, least=1)
    log_every: int = _option(RUN, "steps between progress lines; the journal has every step", 10, least=1)
    statistics_every: int = _option(RUN, "steps between samples of what precision does; 0: never", 50, least=0)
    processes: int = _option(RUN, "processes that torchrun is to start; 0: as many as it did", 0, least=0)
    timeout_s: float = _option(
        RUN, "of several processes: seconds without a step, or a batch held out, that end a run", 1800.0, above=0
    )

    def check(self) -> None:
        """Raise ConfigError or RecipeError for the first value that is out of range or does not fit the others."""
        for each in dataclasses.fields(self):
            value, rule = getattr(self, each.name), each.metadata
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{each.name}={value}: expected a finite number: change {each.name}")
            if "choices" in rule and value not in rule["choices"]:
                expected = ", ".join(rule["choices"])
                raise ConfigError(f"{each.name}={value!r}: expected {expected}{closest(str(value), rule['choices'])}")
            if "least" in rule and value < rule["least"]:
                raise ConfigError(f"{each.name}={value}: expected {rule['least']} or more: change {each.name}")
            if "above" in rule and value <= rule["above"]:
                raise ConfigError(f"{each.name}={value}: expected more than {rule['above']}: change {each.name}")
            if "most" in rule and value > rule["most"]:
                raise ConfigError(f"{each.name}={value}: expected at most {rule['most']}: change {each.name}")
            if "below" in rule and value >= rule["below"]:
                raise ConfigError(f"{each.name}={value}: expected less than {rule['below']}: change {each.name}")
        if self.seed >= 2**32:  # numpy's, which transformers sets too
            raise ConfigError(f"seed={self.seed}: expected less than 2^32: change seed")
        if self.max_length == 1:
            raise ConfigError("max_length=1: expected 2 or more, since no first token is learned: change max_length")
        if self.eval_every and self.eval_data is None:
            raise ConfigError(f"eval_every={self.eval_every} without eval_data: give both, or neither")
        self.torch_device()
        self.build_recipe()

    @property
    def path(self) -> Path:
        """The run's folder; only for a configuration with one."""
        assert self.output is not None
        return Path(self.output)

    def build_recipe(self) -> Recipe:
        """The recipe with its changed fields. Raises RecipeError."""
        return named_recipe(self.recipe, self.recipe_fields)

    def spelled_out(self) -> Self:
        """The configuration with a recipe from a file written out, so that the file is not needed again."""
        return dataclasses.replace(self, **spelled(self.recipe, self.recipe_fields))

    def torch_device(self) -> torch.device:
        """The device to train on. Raises ConfigError where this machine lacks it."""
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "device='cuda': expected a CUDA device, found none: use device=cpu, or see `narrowgauge doctor`"
            )
        is_cuda = self.device == "cuda" or (self.device == "auto" and torch.cuda.is_available())
        return torch.device("cuda" if is_cuda else "cpu")

    def to_yaml(self) -> str:
        """The configuration as YAML, every key written out, the task first."""
        return yaml.safe_dump({"task": self.task, **dataclasses.asdict(self)}, sort_keys=False, allow_unicode=True)


@dataclass(frozen=True, kw_only=True)
class SFTConfig(FinetuneConfig):
    """Supervised fine-tuning: text, messages, or prompt and completion."""

    task: ClassVar[str] = "sft"
    formats: ClassVar[tuple[Format, ...]] = (Format.MESSAGES, Format.PROMPT_COMPLETION, Format.TEXT)

    loss_on: str = _option(
        DATA,
        "tokens that are learned: completion (for messages: what the assistant says), all, or auto: completions where "
        "there are prompts, else all",
        "auto",
        choices=("auto", "completion", "all"),
    )
    packing: bool = _option(DATA, "fill sequences of max_length with several examples", False)


@dataclass(frozen=True, kw_only=True)
class DPOConfig(FinetuneConfig):
    """Direct preference optimization: chosen and rejected."""

    task: ClassVar[str] = "dpo"
    formats: ClassVar[tuple[Format, ...]] = (Format.PREFERENCE,)

    learning_rate: float = _option(TRAINING, "at its highest", 1e-6, above=0)
    beta: float = _option(TRAINING, "how near to the reference model the trained one is held", 0.1, above=0)
    loss: str = _option(TRAINING, "of preferences", "sigmoid", choices=("sigmoid", "hinge", "ipo", "robust"))
    label_smoothing: float = _option(TRAINING, "share of labels held to be wrong", 0.0, least=0, below=0.5)


@dataclass(frozen=True, kw_only=True)
class RewardConfig(FinetuneConfig):
    """A reward model: chosen and rejected."""

    task: ClassVar[str] = "reward"
    formats: ClassVar[tuple[Format, ...]] = (Format.PREFERENCE,)

    learning_rate: float = _option(TRAINING, "at its highest", 1e-4, above=0)
    center_rewards: float = _option(TRAINING, "weight of the term that holds rewards about zero; 0: none", 0.0, least=0)


@dataclass(frozen=True, kw_only=True)
class _Sampled(FinetuneConfig):
    """What tasks share whose models write the answers that they learn from."""

    formats: ClassVar[tuple[Format, ...]] = (Format.PROMPT,)

    learning_rate: float = _option(TRAINING, "at its highest", 1e-6, above=0)
    reward: list[str] = _option(
        SAMPLING, "reward functions as package.module:function, found from the working directory, too", []
    )
    max_completion: int = _option(SAMPLING, "tokens of an answer at most", 256, least=1)
    temperature: float = _option(SAMPLING, "of sampling", 1.0, above=0)


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(_Sampled):
    """Group relative policy optimization: prompts, and functions that reward answers."""

    task: ClassVar[str] = "grpo"

    generations: int = _option(SAMPLING, "answers to each prompt, which are compared", 8, least=2)
    beta: float = _option(
        TRAINING, "weight of the KL divergence from the reference model; 0: no reference", 0.0, least=0
    )

    def check(self) -> None:
        """As the others; and the groups fit the batch."""
        super().check()
        if not self.reward:
            raise ConfigError(
                "reward: expected at least one function, found none: give --reward package.module:function"
            )
        if self.batch_size * self.accumulation * max(self.processes, 1) % self.generations:
            among = f" x {self.processes} processes" if self.processes > 1 else ""
            raise ConfigError(
                f"batch_size={self.batch_size} x accumulation={self.accumulation}{among}: expected a multiple of "
                f"generations={self.generations}, since a step compares whole groups: change one of them"
            )


@dataclass(frozen=True, kw_only=True)
class PPOConfig(_Sampled):
    """Proximal policy optimization: prompts, and a reward model or functions."""

    task: ClassVar[str] = "ppo"

    steps: int = _option(TRAINING, "batches of batch_size x accumulation prompts to learn from", 100, least=1)
    reward_model: str | None = _option(SAMPLING, "directory or name of a reward model, as `reward` trains it", None)
    kl: float = _option(TRAINING, "weight of the KL divergence from the reference model", 0.05, least=0)
    gamma: float = _option(TRAINING, "discount of rewards, at most 1", 1.0, least=0, most=1)
    gae_lambda: float = _option(TRAINING, "of generalized advantage estimation, at most 1", 0.95, least=0, most=1)
    clip_range: float = _option(TRAINING, "how far a step may move ratios from 1", 0.2, above=0)
    passes: int = _option(TRAINING, "passes over a batch of answers", 4, least=1)
    mini_batch_size: int = _option(TRAINING, "answers an optimizer step; 0: the whole batch", 0, least=0)

    def check(self) -> None:
        """As the others; and there is one kind of reward, and a batch is parted evenly."""
        super().check()
        if self.processes > 1:
            raise ConfigError(
                f"ppo in {self.processes} processes: expected one, since its loop answers, scores and learns in one "
                "process: start it without torchrun, or train by `narrowgauge grpo`"
            )
        if self.eval_data is not None:
            raise ConfigError("eval_data: expected none, since ppo is measured by its rewards: leave it out")
        if self.mini_batch_size % self.batch_size:
            raise ConfigError(
                f"mini_batch_size={self.mini_batch_size}: expected a multiple of batch_size={self.batch_size}, answers "
                "a micro-batch: change one of them"
            )
        if bool(self.reward) == bool(self.reward_model):
            found = "both" if self.reward else "neither"
            raise ConfigError(f"expected either reward or reward_model, found {found}: give one of them")


TASKS: dict[str, type[FinetuneConfig]] = {
    kind.task: kind for kind in (SFTConfig, DPOConfig, GRPOConfig, RewardConfig, PPOConfig)
}


def task_of(text: str) -> str | None:
    """The task that a `config.yaml` is for; None where it is that of another kind of run, or broken."""
    try:
        values = read_yaml(text)
    except ValueError:
        return None
    return values.get("task") if isinstance(values, dict) and isinstance(values.get("task"), str) else None


def from_yaml(text: str, where: str) -> FinetuneConfig:
    """Read what `to_yaml` wrote. Raises ConfigError for an unknown task or key, and wrong types."""
    values = values_of(text, where)
    task = values.pop("task", None)
    if task not in TASKS:
        raise ConfigError(f"{where}: task={task!r}: expected {', '.join(TASKS)}{closest(str(task), TASKS)}")
    return build(TASKS[task], values, "")


def values_of(text: str, where: str) -> dict[str, Any]:
    """The keys and values of a YAML document. Raises ConfigError."""
    try:
        values = read_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{where}: expected YAML, found {error}: mend that line") from None
    if values is not None and not isinstance(values, dict):
        raise ConfigError(f"{where}: expected `key: value` lines, found {type(values).__name__}")
    return values or {}
