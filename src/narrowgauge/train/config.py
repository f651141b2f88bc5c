"""The configuration of a training run: dataclasses, to and from YAML.

`TrainConfig.check` is the one place that says which values fit together. The command line builds the same dataclasses
with jsonargparse; `config.yaml` in a run folder is written by `save` and is the truth on resume.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml

from narrowgauge.errors import ConfigError, closest


@dataclass
class ModelConfig:
    """A preset's name, and fields of it to change (None: the preset's value).

    Args:
        preset: name of a model shape, see `narrowgauge plan --help`.
        overrides: fields of the model's configuration to change, e.g. {layers: 2}.
    """

    preset: str = "small"
    overrides: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataConfig:
    """Where the text comes from and how it is cut into tokens.

    Args:
        corpus: `python` (the running Python's own text), a glob over text, JSONL or Parquet files, or `hf:NAME`.
        text_field: the field of a JSONL or Parquet row, or of a data set, that holds the text.
        vocabulary_size: entries of the byte-level BPE tokenizer.
        validation_fraction: share of the documents kept for validation.
        max_bytes: read at most this much text (0: all of it).
        cache_dir: folder of tokenizers and token files, keyed by content.
    """

    corpus: str = "python"
    text_field: str = "text"
    vocabulary_size: int = 2048
    validation_fraction: float = 0.05
    max_bytes: int = 0
    cache_dir: str = ".cache/narrowgauge"


@dataclass
class OptimizerConfig:
    """AdamW. Weight decay acts on matrices only, never on norms, biases or other vectors.

    Args:
        lr: peak learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled, on matrices.
        fused: torch's fused kernel.
    """

    lr: float = 2e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    fused: bool = True


@dataclass
class ScheduleConfig:
    """Linear warm-up, then a cosine.

    Args:
        warmup_steps: steps from 0 to the peak rate.
        final_fraction: the rate at the last step, as a share of the peak.
    """

    warmup_steps: int = 20
    final_fraction: float = 0.1


@dataclass
class DivergenceConfig:
    """When a loss is taken to have exploded: outside the band for `patience` steps in a row.

    The band ends at median + max(spreads * spread, floor) of the best `window` losses so far, where the spread is the
    median distance from the median, scaled to a standard deviation.

    Args:
        enabled: watch the loss.
        window: losses that make a band.
        spreads: width of the band.
        floor: smallest width of the band, nats a token.
        patience: steps outside the band in a row that stop the run.
    """

    enabled: bool = True
    window: int = 32
    spreads: float = 10.0
    floor: float = 1.5
    patience: int = 16


@dataclass
class TrainConfig:
    """A training run.

    Args:
        model: shape of the network.
        data: text and tokenizer.
        optimizer: AdamW.
        schedule: learning rate over steps.
        divergence: when to give up.
        recipe: name of the precision recipe, see `narrowgauge chart`.
        recipe_fields: fields of the recipe to change, e.g. {tf32: true}.
        batch_size: sequences a micro-batch.
        sequence_length: tokens a sequence; 0 takes the model's context.
        accumulation: micro-batches an optimizer step.
        clip: largest norm of the gradient; 0 leaves it alone.
        steps: optimizer steps.
        eval_every: steps between validations; 0: at the end only.
        eval_batches: micro-batches a validation reads.
        save_every: steps between checkpoints; 0: at the end only.
        keep_last: checkpoints kept.
        log_every: steps between progress lines; the journal has every step.
        statistics_every: steps between counts of saturated and flushed values; 0: never.
        max_skips: skipped steps in a row that stop the run.
        seed: of weights, data order and sampling.
        compile: torch.compile the model.
        device: cpu, cuda, or auto.
        threads: CPU threads; 0 takes torch's choice. A run is bitwise repeatable with the same number of threads.
        name: the run's folder below `runs_dir`; left out: made from model, recipe and time.
        runs_dir: folder of all runs.
        tensorboard: also write TensorBoard event files.
        sample_prompt: the text to continue at the end of the run.
        sample_tokens: tokens to write at the end; 0: none.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    divergence: DivergenceConfig = field(default_factory=DivergenceConfig)
    recipe: str = "fp8_delayed"
    recipe_fields: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 16
    sequence_length: int = 0
    accumulation: int = 1
    clip: float = 1.0
    steps: int = 300
    eval_every: int = 100
    eval_batches: int = 20
    save_every: int = 100
    keep_last: int = 3
    log_every: int = 10
    statistics_every: int = 50
    max_skips: int = 20
    seed: int = 0
    compile: bool = False
    device: str = "auto"
    threads: int = 0
    name: str | None = None
    runs_dir: str = "runs"
    tensorboard: bool = False
    sample_prompt: str = "def "
    sample_tokens: int = 64
