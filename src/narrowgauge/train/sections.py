"""The parts of a training configuration: model, data, optimizer, schedule, switches, divergence, guard."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.data import prepare
from narrowgauge.data.corpus import DEFAULT_CORPUS
from narrowgauge.models.config import GPTConfig
from narrowgauge.models.presets import DEFAULT_PRESET, preset
from narrowgauge.recipes.roles import MOMENT_ROLES, OPERAND_ROLES
from narrowgauge.train.require import is_finite, is_number, require


@dataclass
class ModelConfig:
    """A preset's name, and what to change of it; None keeps the preset's value. See `narrowgauge.models.GPTConfig`.

    Args:
        preset: name of a model shape.
        layers: blocks.
        width: features of the residual stream.
        heads: query heads.
        context: longest sequence, in tokens.
        kv_heads: heads of keys and values.
        ffn_width: hidden features of a feed-forward network.
        activation: swiglu or gelu.
        norm: rmsnorm or layernorm.
        norm_eps: added to the variance in norms.
        positions: rope or learned.
        rope_theta: base of the rotary frequencies.
        tied_embeddings: whether embedding and head share their weight.
        attention_bias: whether the attention's layers have biases.
        mlp_bias: whether the feed-forward layers have biases.
        norm_bias: whether LayerNorms have biases.
        swiglu_limit: clamp of SwiGLU's gate (above) and up (both sides); null for none.
        experts: feed-forward networks a block; 0: dense.
        experts_per_token: experts that each token visits.
        load_balancing: coefficient of the load-balancing loss.
        init_std: standard deviation of initial weights.
        scaled_residual_init: smaller initial weights where the residual stream is written.
    """

    preset: str = DEFAULT_PRESET
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    context: int | None = None
    kv_heads: int | None = None
    ffn_width: int | None = None
    activation: str | None = None
    norm: str | None = None
    norm_eps: float | None = None
    positions: str | None = None
    rope_theta: float | None = None
    tied_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    norm_bias: bool | None = None
    swiglu_limit: float | None = None
    experts: int | None = None
    experts_per_token: int | None = None
    load_balancing: float | None = None
    init_std: float | None = None
    scaled_residual_init: bool | None = None

    def build(self, vocab_size: int) -> GPTConfig:
        """The model's configuration. Raises ConfigError for an unknown preset and for values that do not fit."""
        changes = {k: v for k, v in dataclasses.asdict(self).items() if k != "preset" and v is not None}
        return preset(self.preset).replace(vocab_size=vocab_size, **changes)


@dataclass
class DataConfig:
    """Where the text comes from and how it becomes tokens. See `narrowgauge.data.prepare`.

    Args:
        corpus: python (the running Python's own text), a glob over text, JSONL or Parquet files, or hf:NAME.
        text_field: the field of a JSONL or Parquet row, or of a data set, that holds the text.
        split: which split of a Hugging Face data set.
        max_bytes: read at most this much text; null for all of it.
        tokenizer: bpe (trained on the text), bytes, or the path of a byte-level tokenizer.json.
        vocab_size: entries of the trained tokenizer.
        validation_fraction: share of the documents kept for validation.
        split_seed: which documents those are.
        tokenizer_bytes: the tokenizer is trained on about this much text.
    """

    corpus: str = DEFAULT_CORPUS
    text_field: str = "text"
    split: str = "train"
    max_bytes: int | None = None
    tokenizer: str = "bpe"
    vocab_size: int = 4096
    validation_fraction: float = 0.05
    split_seed: int = 0
    tokenizer_bytes: int = 64 << 20

    def build(self) -> prepare.DataConfig:
        """The data layer's configuration. Raises ConfigError for values out of range."""
        return prepare.DataConfig(**dataclasses.asdict(self))


@dataclass
class OptimizerConfig:
    """AdamW. Weight decay acts on matrices only, never on norms, biases or other vectors.

    Args:
        lr: peak learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled, on matrices.
        fused: torch's fused kernel, where the recipe leaves the step to torch.
        release_gradients: step each parameter inside backward, and drop its gradient; needs accumulation 1 and a recipe
            of 8-bit states. `clip` then goes by the norm of the step before.
        offload: cpu keeps moments and masters on the host, and takes the step there; null: beside the parameters.
    """

    lr: float = 2e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    fused: bool = True
    release_gradients: bool = False
    offload: str | None = None


@dataclass
class ParallelConfig:
    """How a run is spread over the processes that torchrun starts: the product of the four sizes is their number.

    Args:
        data: replicas of the model, which read different sequences; gradients are reduced in the recipe's grad_comm.
        shard: processes that part parameters, gradients and states (FSDP2), and read different sequences.
        tensor: processes that part each layer.
        pipeline: stages of layers; the step's micro-batches (accumulation) flow through them.
        sequence: with tensor: part the tokens between the layers too (sequence parallel).
        reshard: with shard: free gathered parameters after each forward (as ZeRO-3); false keeps them until backward
            (as ZeRO-2).
        partition: with data: each replica keeps the optimizer state of its own tensors only (ZeRO-1).
        schedule: of the pipeline: gpipe, 1f1b, interleaved, zero_bubble or zbv.
        timeout_s: seconds after which a rank that does not answer ends the run.
    """

    data: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    sequence: bool = True
    reshard: bool = True
    partition: bool = False
    schedule: str = "1f1b"
    timeout_s: float = 600.0

    @property
    def ranks(self) -> int:
        """Processes that the run takes."""
        return self.data * self.shard * self.tensor * self.pipeline

    def __str__(self) -> str:
        sizes = {"data": self.data, "shard": self.shard, "tensor": self.tensor, "pipeline": self.pipeline}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one process"


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
class SwitchConfig:
    """Another recipe for the rest of the run, or until the next switch.

    Args:
        after_step: optimizer steps before it.
        recipe: its name.
        recipe_fields: fields of it to change.
    """

    after_step: int
    recipe: str
    recipe_fields: dict[str, Any] = field(default_factory=dict)


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
class LimitsConfig:
    """What the guard lets pass of one role; where the defaults come from: docs/guard.md.

    Args:
        saturated: largest share of values beyond the largest one that the cast can give.
        flushed: largest share of non-zero values that become zero.
        sqnr_drop_db: how far the ratio of signal to the cast's noise may be below what the format gives normally
            distributed values, in decibels.
    """

    saturated: float = 0.01
    flushed: float = 0.1
    sqnr_drop_db: float = 12.0


MODES = ("off", "warn", "act")  # of the guard
GUARDED = (*OPERAND_ROLES, *MOMENT_ROLES)
MOST = 2**31 - 1  # of what is counted
_POSITIVE = ("every", "confirm", "calm", "nonfinite", "spike_window", "spike_patience")


@dataclass
class GuardConfig:
    """When precision is taken to be in trouble, and what is done then. See docs/guard.md.

    Args:
        mode: off; warn (says in the journal what it would do); or act (goes to wider formats, back to checkpoints).
        every: steps between samples; after what needs a second look, the next step is sampled, too.
        confirm: samples in a row beyond a limit that it acts on.
        calm: samples in a row well inside all limits, after which the narrower format is tried again; every return
            doubles it.
        input: limits of layers' inputs.
        weight: limits of layers' weights.
        grad_output: limits of gradients of layers' outputs.
        exp_avg: limits of the optimizer's first moment.
        exp_avg_sq: limits of the optimizer's second moment.
        nonfinite: steps in a row without a finite loss or gradient that it acts on.
        spike_window: losses that make the band that a loss is held against.
        spike_spreads: width of the band.
        spike_floor: smallest width of the band, nats a token.
        spike_patience: losses above the band in a row that it acts on.
        rollbacks: times that a run goes back to a checkpoint.
        leave_out: batches of a process that it then goes on without, at least; every time twice as many.
    """

    mode: str = "off"
    every: int = 25
    confirm: int = 2
    calm: int = 20
    input: LimitsConfig = field(default_factory=LimitsConfig)
    weight: LimitsConfig = field(default_factory=LimitsConfig)
    grad_output: LimitsConfig = field(default_factory=lambda: LimitsConfig(flushed=0.5))
    exp_avg: LimitsConfig = field(default_factory=lambda: LimitsConfig(flushed=1.0))
    exp_avg_sq: LimitsConfig = field(default_factory=lambda: LimitsConfig(flushed=0.001))
    nonfinite: int = 3
    spike_window: int = 32
    spike_spreads: float = 10.0
    spike_floor: float = 0.5
    spike_patience: int = 3
    rollbacks: int = 3
    leave_out: int = 100

    def check(self) -> None:
        """Raise ConfigError for an unknown mode, numbers out of range, and limits that are no shares or decibels."""
        require(self.mode in MODES, "guard.mode", self.mode, ", ".join(MODES))
        for name in (*_POSITIVE, "rollbacks", "leave_out"):
            value, least = getattr(self, name), int(name in _POSITIVE)
            fits = isinstance(value, int) and is_number(value) and least <= value <= MOST
            require(fits, f"guard.{name}", value, f"a whole number from {least} to {MOST}")
        for name in ("spike_spreads", "spike_floor"):
            value = getattr(self, name)
            require(is_number(value) and is_finite(value) and value > 0, f"guard.{name}", value, "more than 0")
        for role in GUARDED:
            limits: LimitsConfig = getattr(self, role)
            require(isinstance(limits, LimitsConfig), f"guard.{role}", limits, "LimitsConfig(...)")
            for name in ("saturated", "flushed"):
                share = getattr(limits, name)
                require(is_number(share) and 0 <= share <= 1, f"guard.{role}.{name}", share, "a share, 0 to 1")
            drop_db = limits.sqnr_drop_db
            fits = is_number(drop_db) and drop_db > 0
            require(fits, f"guard.{role}.sqnr_drop_db", drop_db, "decibels, more than 0")
