"""A run of transformers' Trainer with a recipe, as torchrun starts it on every process: python FILE FOLDER."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from narrowgauge.integrations.transformers import Trainer

ROWS = [torch.randint(1, 64, (12,), generator=torch.Generator().manual_seed(i)) for i in range(24)]
DATA: Any = [{"input_ids": ids, "labels": ids} for ids in ROWS]


class Poison(TrainerCallback):
    """The gradients of the first process are NaN in the second step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1 and args.process_index == 0:
            self.hook = model.model.norm.weight.register_hook(lambda grad: grad * float("nan"))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and args.process_index == 0:
            self.hook.remove()


def train(recipe: str, folder: Path, batch_size: int, resume: bool = False) -> dict[str, Any]:
    """Four steps of two micro-batches, the second step poisoned; what the run logged, and its parameters."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, pad_token_id=0, **shape))
    arguments = TrainingArguments(
        str(folder), max_steps=4, per_device_train_batch_size=batch_size, gradient_accumulation_steps=2,
        learning_rate=3e-3, logging_steps=1, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=DATA, eval_dataset=DATA[:4], recipe=recipe, callbacks=[Poison()])
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    rows = trainer.state.log_history
    return {
        "processes": arguments.world_size,
        "wrapper": type(trainer.model_wrapped).__name__,
        "converted": trainer.conversion_report.counts()["converted"],
        "losses": [row["loss"] for row in rows if "loss" in row],
        "rates": [row["learning_rate"] for row in rows if "learning_rate" in row],
        "skipped": trainer.recipe_callback.skipped_steps,
        "eval": trainer.evaluate()["eval_loss"],
        "state": {name: p.detach().float().flatten()[:64].tolist() for name, p in model.named_parameters()},
    }


def main() -> None:
    folder = Path(sys.argv[1])
    for recipe in sys.argv[2:]:
        for resume in (False, True):
            found = train(recipe, folder / recipe, 1, resume)
            rank = torch.distributed.get_rank()
            (folder / f"{recipe}-{rank}-{'resumed' if resume else 'whole'}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
