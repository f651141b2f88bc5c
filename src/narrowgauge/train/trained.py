"""A run's model, tokenizer and validation text, for use after training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from narrowgauge.data.prepare import Dataset, prepare_data
from narrowgauge.data.tokenizer import Tokenizer
from narrowgauge.errors import CheckpointError, DataError
from narrowgauge.models.gpt import GPT
from narrowgauge.preparation import prepare
from narrowgauge.train.assemble import build_model
from narrowgauge.train.checkpoint import load
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.evaluate import Evaluation, evaluate
from narrowgauge.train.guard_apply import recipe_of, take_up_casts
from narrowgauge.train.guard_run import STATE as GUARD
from narrowgauge.train.run_folder import RunFolder


@dataclass(frozen=True)
class Trained:
    """A run as its checkpoint of `step` stands.

    model: prepared for the run's recipe, or plain, in eval mode, on `device`.
    """

    folder: RunFolder
    config: TrainConfig
    step: int
    model: GPT
    tokenizer: Tokenizer
    device: torch.device

    @classmethod
    def open(
        cls,
        run_dir: Path | str,
        checkpoint: str | None = None,
        device: str | None = None,
        *,
        prepared: bool = True,
    ) -> Trained:
        """Load a run's model; nothing in the folder is written, so a run in progress may be read.

        Args:
            checkpoint: None for the newest, "last-good" for the newest whole one, or a name such as "step-000100".
            device: cpu, cuda or auto; None: the run's own.
            prepared: False gives a plain model in float32, whose parameters have all digits of the checkpoint.

        Raises:
            ConfigError: there is no run, or its configuration does not hold together.
            CheckpointError: the run has no checkpoint, or a damaged one; the message names the last good one.
        """
        folder = RunFolder.open(run_dir)
        config = folder.read_config()
        if device is not None:
            config = dataclasses.replace(config, device=device)
        step = folder.choose(checkpoint)
        if step is None:
            raise CheckpointError(
                f"{folder.path}: expected a checkpoint, found none yet: wait for it, or resume the run"
            )
        tokenizer = Tokenizer.load(folder.tokenizer)
        target = config.torch_device()
        model = build_model(config, tokenizer.vocab_size).to(target)
        recipe = config.build_recipe().resolve(target).at(step)
        if prepared:
            prepare(model, None, recipe)
        extra = load(folder.checkpoint(step), model)
        if prepared and GUARD in extra:
            take_up_casts(model, recipe_of(extra[GUARD], recipe), {}, at_step=False)
        return cls(folder, config, step, model.eval(), tokenizer, target)

    def dataset(self, corpus: str | None = None, on_progress: Callable[[str], None] = lambda message: None) -> Dataset:
        """The run's data, or another corpus in the run's tokens.

        Raises DataError where the run's own text is no longer the one that its tokenizer was trained on.
        """
        data = self.config.data.build()
        if corpus is not None:
            data = dataclasses.replace(data, corpus=corpus, tokenizer=str(self.folder.tokenizer))
        dataset = prepare_data(data, self.config.cache_dir, on_progress)
        if dataset.tokenizer.fingerprint() != self.tokenizer.fingerprint():
            raise DataError(
                f"the text of corpus '{data.corpus}' changed since the run: expected what it was trained on, found "
                "text that gives another tokenizer; name a corpus to read it in the run's own tokens"
            )
        return dataset

    def evaluate(self, dataset: Dataset, batches: int | None) -> Evaluation:
        """Validation as training does it: `batches` batches of the run's size; None: the whole split."""
        return evaluate(
            self.model,
            dataset,
            batch_size=self.config.batch_size,
            sequence_length=self.config.sequence_length or self.model.config.context,
            batches=batches,
            device=self.device,
        )
