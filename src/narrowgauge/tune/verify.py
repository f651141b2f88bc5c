"""Short runs: what a choice of precision does to training, against the same run with all layers wide."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from narrowgauge.data.loader import BatchStream
from narrowgauge.data.prepare import Dataset
from narrowgauge.errors import CheckpointError
from narrowgauge.models.gpt import GPT
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.optim.scaler import LossScaler
from narrowgauge.preparation import prepare
from narrowgauge.recipes.spec import Recipe
from narrowgauge.train.assemble import build_model, build_optimizer
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.evaluate import evaluate
from narrowgauge.train.schedule import learning_rate
from narrowgauge.train.step import optimizer_step

Weights = Mapping[str, Tensor]
LAST = 10  # losses that make the training loss at the end


@dataclass(frozen=True)
class ShortRun:
    """What a short run came to. losses: of its steps, nats a token. held_out: of validation text, nats a token."""

    losses: tuple[float, ...]
    held_out: float

    @property
    def last_loss(self) -> float:
        """Mean training loss of the last steps; NaN without any."""
        last = self.losses[-LAST:]
        return sum(last) / len(last) if last else math.nan


def short_run(
    config: TrainConfig,
    dataset: Dataset,
    recipe: Recipe,
    start: Weights | None = None,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> tuple[ShortRun, Weights]:
    """Train `config.steps` steps by a resolved recipe from the seed's weights, or from `start`: (what came, weights).

    Two calls with one seed read the same batches. The weights are in float32, with all digits that the optimizer keeps.
    Raises DivergenceError after too many skipped steps.
    """
    torch.manual_seed(config.seed)
    device = config.torch_device()
    model = model_with(config, dataset, start)
    given = build_optimizer(model, config.optimizer)
    model, optimizer = prepare(model, given, recipe, offload=config.optimizer.offload, max_skips=config.max_skips)
    scaler = LossScaler(recipe, device.type, max_skips=config.max_skips)
    length = config.sequence_length or model.config.context
    stream = BatchStream(dataset.train, config.batch_size, length, config.seed)
    losses = []
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.steps, config.optimizer.lr, config.schedule)
        batches = [stream.next() for _ in range(config.accumulation)]
        batches = [(ids.to(device), targets.to(device)) for ids, targets in batches]
        losses.append(optimizer_step(model, optimizer, scaler, batches, config.clip).loss)
        on_step(step + 1, losses[-1])
    found = evaluate(
        model, dataset, batch_size=config.batch_size, sequence_length=length, batches=config.eval_batches, device=device
    )
    return ShortRun(tuple(losses), found.loss), weights_of(model, optimizer)


def model_with(config: TrainConfig, dataset: Dataset, weights: Weights | None) -> GPT:
    """The configured model, plain, on its device, with these weights; None: the seed's.

    Raises CheckpointError where they are another model's.
    """
    model = build_model(config, dataset.tokenizer.vocab_size)
    if weights is not None:
        try:
            model.load_state_dict(dict(weights))
        except RuntimeError as error:
            raise CheckpointError(
                f"expected weights of the configured model, found others: {str(error).splitlines()[-1].strip()}: leave "
                "the model's options out, so that they are the run's"
            ) from error
    return model.to(config.torch_device())


def weights_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Parameters on the CPU, in float32; of those with a master, all its digits."""
    full = optimizer.full_values if isinstance(optimizer, LowPrecisionOptimizer) else lambda p: p.detach()
    named = model.named_parameters(remove_duplicate=False)  # a tied head has a name of its own in the state dict
    return {name: full(p).detach().float().cpu().clone() for name, p in named}


def for_short_runs(config: TrainConfig, steps: int, seed: int) -> TrainConfig:
    """The configuration of one short run: so many steps, warmed up within the first fifth at the latest."""
    warmup = min(config.schedule.warmup_steps, math.ceil(steps / 5))
    return dataclasses.replace(
        config, steps=steps, seed=seed, switches=[], compile=False,
        schedule=dataclasses.replace(config.schedule, warmup_steps=warmup),
    )  # fmt: skip
