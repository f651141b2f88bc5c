"""The configuration of a training run: dataclasses, to and from YAML.

`TrainConfig.check` is the one place that says which values fit together. `config.yaml` in a run folder holds every
value and is the truth on resume.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from narrowgauge.errors import ConfigError, closest
from narrowgauge.optim.guard import MAX_SKIPS
from narrowgauge.optim.replace import needs_own
from narrowgauge.recipes.files import is_file_name
from narrowgauge.recipes.library import recipe
from narrowgauge.recipes.serialize import from_dict, to_dict
from narrowgauge.recipes.spec import Recipe
from narrowgauge.train.parse import build, read_yaml
from narrowgauge.train.require import is_finite, require
from narrowgauge.train.sections import (
    DataConfig,
    DivergenceConfig,
    GuardConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ScheduleConfig,
    SwitchConfig,
)

__all__ = [
    "DataConfig", "DivergenceConfig", "GuardConfig", "ModelConfig", "OptimizerConfig", "ParallelConfig",
    "ScheduleConfig", "SwitchConfig", "TrainConfig",
]  # fmt: skip


@dataclass
class TrainConfig:
    """A training run.

    Args:
        model: shape of the network.
        data: text and tokenizer.
        optimizer: AdamW.
        schedule: learning rate over steps.
        divergence: when to give up.
        guard: watches over precision, and widens it where that is in trouble.
        parallel: over how many processes, and how.
        recipe: name of the precision recipe, see `narrowgauge chart`, or a file with one (.yaml or .json), as
            `narrowgauge tune` writes it; custom: the one that recipe_fields spell in full.
        recipe_fields: fields of the recipe to change, e.g. {tf32: true}.
        switches: recipes to go on with, which store the same, e.g. after fp8_delayed [{after_step: 180, recipe: bf16}];
            each may have recipe_fields.
        batch_size: sequences a micro-batch, on each process that reads its own.
        sequence_length: tokens a sequence; 0 takes the model's context.
        accumulation: micro-batches an optimizer step.
        clip: largest norm of the gradient; 0 leaves it alone.
        steps: optimizer steps.
        eval_every: steps between validations; 0: at the end only.
        eval_batches: micro-batches a validation reads.
        save_every: steps between checkpoints; 0: at the end only.
        save_async: write checkpoints on the way beside training, from copies; the last one is always waited for.
        keep_last: checkpoints kept.
        log_every: steps between progress lines; the journal has every step.
        statistics_every: steps between samples of what precision does, by layer and role; 0: never.
        histograms_every: steps between those that count exponents, too; 0: never.
        max_skips: skipped steps in a row that stop the run.
        seed: of weights, data order and sampling.
        activation_checkpointing: recompute each block in backward instead of saving its activations.
        compile: torch.compile the model.
        device: cpu, cuda, or auto.
        threads: CPU threads; 0 takes torch's choice. A run is bitwise repeatable with the same number of threads.
        cache_dir: folder of tokenizers and token files, keyed by the content of the text.
        name: the run's folder below `runs_dir`; left out: made from model, recipe and time.
        runs_dir: folder of all runs.
        tensorboard: also write TensorBoard event files.
        trackio: also log to trackio, which goes by its own settings.
        wandb: also log to Weights & Biases, which goes by its own settings, e.g. WANDB_MODE=offline.
        project: what trackio and Weights & Biases file the run under.
        sample_prompt: the text to continue at the end of the run.
        sample_tokens: tokens to write at the end; 0: none.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    divergence: DivergenceConfig = field(default_factory=DivergenceConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recipe: str = "narrow8"
    recipe_fields: dict[str, Any] = field(default_factory=dict)
    switches: list[SwitchConfig] = field(default_factory=list)
    batch_size: int = 16
    sequence_length: int = 0
    accumulation: int = 1
    clip: float = 1.0
    steps: int = 200
    eval_every: int = 100
    eval_batches: int = 20
    save_every: int = 100
    save_async: bool = False
    keep_last: int = 3
    log_every: int = 10
    statistics_every: int = 50
    histograms_every: int = 200
    max_skips: int = MAX_SKIPS
    seed: int = 0
    activation_checkpointing: bool = False
    compile: bool = False
    device: str = "auto"
    threads: int = 0
    cache_dir: str = ".cache/narrowgauge"
    name: str | None = None
    runs_dir: str = "runs"
    tensorboard: bool = False
    trackio: bool = False
    wandb: bool = False
    project: str = "narrowgauge"
    sample_prompt: str = "def "
    sample_tokens: int = 64

    def check(self) -> None:
        """Raise ConfigError or RecipeError for the first value that is out of range or does not fit the others."""
        for key in _AT_LEAST_ONE:
            require(_value(self, key) >= 1, key, _value(self, key), "at least 1")
        for key in _NOT_NEGATIVE:
            require(is_finite(_value(self, key)) and _value(self, key) >= 0, key, _value(self, key), "0 or more")
        for key in (
            "optimizer.lr",
            "optimizer.eps",
            "divergence.spreads",
            "divergence.floor",
            "parallel.timeout_s",
        ):
            require(is_finite(_value(self, key)) and _value(self, key) > 0, key, _value(self, key), "more than 0")
        require(self.seed < 2**63, "seed", self.seed, "less than 2^63")
        for key in ("optimizer.beta1", "optimizer.beta2"):
            require(0 <= _value(self, key) < 1, key, _value(self, key), "at least 0 and less than 1")
        require(
            0 <= self.schedule.final_fraction <= 1, "schedule.final_fraction", self.schedule.final_fraction, "0 to 1"
        )
        require(
            self.name is None or _is_folder_name(self.name), "name", self.name, "one folder's name, without slashes"
        )
        self.torch_device()
        for at, switch in enumerate(self.switches):
            key = f"switches.{at}.after_step"
            expected = f"a step between the first and the last, 1 to {self.steps - 1}"
            require(1 <= switch.after_step < self.steps, key, switch.after_step, expected)
        self.guard.check()
        self._check_optimizer(self.build_recipe())
        self._check_parallel()
        self.data.build()
        context = self.model.build(self.data.vocab_size).context
        if self.sequence_length > context:
            raise ConfigError(
                f"sequence_length={self.sequence_length}: expected at most the model's context, {context}: "
                "shorten the sequence, or raise model.context"
            )

    def _check_optimizer(self, recipe: Recipe) -> None:
        """Raise ConfigError where the optimizer's options do not fit the recipe or the others."""
        offload = self.optimizer.offload
        require(offload in (None, HOST), "optimizer.offload", offload, f"{HOST} or null")
        if not self.optimizer.release_gradients:
            return
        key = "optimizer.release_gradients"
        if self.accumulation != 1:
            raise ConfigError(
                f"{key}=True with accumulation={self.accumulation}: expected accumulation=1, since a gradient that is "
                "used at once cannot be added to: change one of them"
            )
        if recipe.resolve(self.torch_device()).needs_loss_scaling:
            raise ConfigError(
                f"{key}=True with recipe '{recipe.name}': expected a recipe without loss scaling, which has to see all "
                "gradients before the step: use narrow8"
            )
        if not needs_own(recipe) and offload is None:
            raise ConfigError(
                f"{key}=True with recipe '{recipe.name}', whose step torch takes for all parameters at once: expected "
                "a recipe of 8-bit states: use narrow8"
            )

    def _check_parallel(self) -> None:
        """Raise ConfigError where what runs on several processes does not go together."""
        parallel = self.parallel
        if parallel.pipeline > 1 or parallel.schedule != ParallelConfig.schedule:
            from narrowgauge.distributed.pipeline_schedule import schedule_named  # on first use: it loads torch's

            schedule_named(parallel.schedule).check_micro_batches(self.accumulation, parallel.pipeline)
        if parallel.ranks == 1:
            return
        for key, refused in (
            ("compile", self.compile),
            ("optimizer.release_gradients", self.optimizer.release_gradients),
        ):
            if refused:
                raise ConfigError(f"{key}=true with parallel {parallel}: expected false on several processes")
        if parallel.partition and (parallel.data == 1 or parallel.ranks != parallel.data):
            raise ConfigError(
                f"parallel.partition=true with parallel {parallel}: expected parallel.data alone, whose replicas part "
                "the states: use parallel.shard, which parts parameters too"
            )

    @property
    def path(self) -> Path:
        """The run's folder; only for a configuration with a name."""
        assert self.name is not None
        return Path(self.runs_dir) / self.name

    def build_recipe(self) -> Recipe:
        """The recipe with its changed fields and its schedule. Raises RecipeError."""
        built = named_recipe(self.recipe, self.recipe_fields)
        for switch in self.switches:
            built = built.switch_at(switch.after_step, named_recipe(switch.recipe, switch.recipe_fields))
        return built

    def spelled_out(self) -> TrainConfig:
        """The configuration with recipes from files written out, so that the files are not needed again."""
        switches = [dataclasses.replace(each, **spelled(each.recipe, each.recipe_fields)) for each in self.switches]
        return dataclasses.replace(self, switches=switches, **spelled(self.recipe, self.recipe_fields))

    def torch_device(self) -> torch.device:
        """The device to train on. Raises ConfigError where this machine lacks it."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"device={self.device!r}: expected auto, cpu or cuda{closest(self.device, _DEVICES)}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "device='cuda': expected a CUDA device, found none: use device=cpu, or see `narrowgauge doctor`"
            )
        return torch.device(self.device)

    def to_yaml(self) -> str:
        """The configuration as YAML, every key written out."""
        return yaml.safe_dump(dataclasses.asdict(self), sort_keys=False)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """Keys left out take their defaults. Raises ConfigError for unknown keys and wrong types."""
        return build(cls, values, "")

    @classmethod
    def from_yaml(cls, text: str) -> TrainConfig:
        """Read what `to_yaml` wrote, or any part of it. Raises ConfigError."""
        try:
            values = read_yaml(text)
        except ValueError as error:
            raise ConfigError(f"configuration: expected YAML, found {error}: mend that line") from None
        if values is not None and not isinstance(values, dict):
            raise ConfigError(f"configuration: expected `key: value` lines, found {type(values).__name__}")
        return cls.from_dict(values or {})


def named_recipe(name: str, fields: dict[str, Any]) -> Recipe:
    """The recipe of a configuration's `recipe` and `recipe_fields`. Raises RecipeError."""
    return from_dict(fields) if name == CUSTOM else recipe(name, **fields)


def spelled(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """`recipe` and `recipe_fields` that say all of a recipe from a file; nothing for others."""
    return {"recipe": CUSTOM, "recipe_fields": to_dict(recipe(name, **fields))} if is_file_name(name) else {}


CUSTOM = "custom"
HOST = "cpu"
_DEVICES = ("auto", "cpu", "cuda")
_AT_LEAST_ONE = (
    "batch_size", "accumulation", "steps", "eval_batches", "keep_last", "log_every", "max_skips",
    "divergence.window", "divergence.patience", "parallel.data", "parallel.shard", "parallel.tensor",
    "parallel.pipeline",
)  # fmt: skip
_NOT_NEGATIVE = (
    "sequence_length", "clip", "eval_every", "save_every", "statistics_every", "histograms_every", "seed", "threads",
    "sample_tokens", "optimizer.weight_decay", "schedule.warmup_steps",
)  # fmt: skip


def _value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def _is_folder_name(name: str) -> bool:
    return bool(name) and name not in (".", "..") and not any(character in name for character in "/\\\0")
