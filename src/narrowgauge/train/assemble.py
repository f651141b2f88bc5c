"""From a configuration to the things that train: data, model, optimizer, scaler."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from narrowgauge.data.loader import BatchStream
from narrowgauge.data.prepare import Dataset, prepare_data
from narrowgauge.errors import CheckpointError
from narrowgauge.models.gpt import GPT
from narrowgauge.optim.guard import StepGuard
from narrowgauge.optim.release import release_gradients
from narrowgauge.optim.scaler import LossScaler
from narrowgauge.preparation import prepare
from narrowgauge.recipes.spec import Recipe
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.ranks import ONE, Ranks
from narrowgauge.train.sections import OptimizerConfig
from narrowgauge.train.spread import spread
from narrowgauge.train.step import Stages


@dataclass
class Parts:
    """All that a run trains with. `state` and `load_state` hold what is neither in the model nor in the optimizer.

    recipe: with its schedule, resolved. parameters: of the whole model. ranks: the run's processes. pipeline: what runs
    forward and backward where the model is one of several stages; None: the model itself.
    """

    device: torch.device
    dataset: Dataset
    stream: BatchStream
    model: GPT
    optimizer: torch.optim.Optimizer
    scaler: LossScaler
    recipe: Recipe
    parameters: int
    ranks: Ranks = ONE
    pipeline: Stages | None = None

    def state(self) -> dict[str, Any]:
        """Loss scaler, position in the data and random states, as plain state for a checkpoint."""
        random: dict[str, Any] = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        return {"scaler": self.scaler.state_dict(), "data": self.stream.state_dict(), "random": random}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave. Raises CheckpointError where the data or the kind of recipe are not the same."""
        try:
            self.scaler.load_state_dict(state["scaler"])
        except RuntimeError as error:  # empty, from a recipe that scales no loss
            raise CheckpointError(
                "expected a loss scale in the checkpoint, which this run's recipe needs, found none: resume with the "
                "recipe that it was trained with"
            ) from error
        self.stream.load_state_dict(state["data"])
        torch.set_rng_state(state["random"]["cpu"])
        if self.device.type == "cuda" and "cuda" in state["random"]:
            torch.cuda.set_rng_state(state["random"]["cuda"], self.device)


def assemble(config: TrainConfig, on_progress: Callable[[str], None], ranks: Ranks = ONE) -> Parts:
    """Read the text, build the model with the seed's weights, spread it over the ranks, prepare it for the recipe.

    Sets torch's random seed and number of threads. Raises DataError, ConfigError, ConversionError or RecipeError.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    device = config.torch_device()
    dataset = ranks.first_then_others(lambda: prepare_data(config.data.build(), config.cache_dir, on_progress))
    whole = build_model(config, dataset.tokenizer.vocab_size).to(device)
    parameters, sequence_length = whole.parameter_count(), config.sequence_length or whole.config.context
    stream = BatchStream(
        dataset.train,
        config.batch_size,
        sequence_length,
        config.seed,
        rank=ranks.batch_rank,
        world_size=ranks.batch_ranks,
    )
    model, pipeline = spread(whole, config.parallel, ranks)
    recipe = config.build_recipe().resolve(device)
    optimizer = build_optimizer(model, config.optimizer)
    _, prepared = prepare(model, optimizer, recipe, offload=config.optimizer.offload)
    assert prepared is not None  # an optimizer was given
    if config.optimizer.release_gradients:
        # unclipped, the norm is still taken, for the journal
        release_gradients(prepared, config.clip or math.inf)
    # one more than the run's limit: `Watch` stops the run, after the last skip is in the journal
    max_skips = config.max_skips + 1
    guard = StepGuard.on(prepared)
    assert guard is not None  # `prepare` attached it
    guard.max_skips = max_skips
    if config.compile:
        on_progress("compiling the model at its first step")
        model.compile()
    scaler = LossScaler(recipe, device.type, max_skips=max_skips)
    return Parts(device, dataset, stream, model, prepared, scaler, recipe, parameters, ranks, pipeline)


def build_model(config: TrainConfig, vocab_size: int) -> GPT:
    """The model with the seed's initial weights, on the CPU: the same on every device that it moves to."""
    return GPT(
        config.model.build(vocab_size),
        device="cpu",
        generator=torch.Generator().manual_seed(config.seed),
        activation_checkpointing=config.activation_checkpointing,
    )


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW with two groups: matrices, which decay, and vectors, which do not (also where experts stack them)."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    vectors = [p for name, p in trainable.items() if p.dim() < 2 or name.endswith("bias")]
    matrices = [p for name, p in trainable.items() if not (p.dim() < 2 or name.endswith("bias"))]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=config.fused,
    )
