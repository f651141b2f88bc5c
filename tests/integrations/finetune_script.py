"""Fine-tuning commands as torchrun starts them, one after the other in one process: python FILE JOBS FOLDER.

JOBS: a JSON file of {name: words of a command}. Each process leaves FOLDER/NAME-RANK.json with what it showed and did.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import signal
import sys
import time
import unittest.mock
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import TrainerCallback

from narrowgauge.cli.main import main
from narrowgauge.distributed import wire
from narrowgauge.integrations import finetune
from narrowgauge.integrations.finetune_watch import Watch
from narrowgauge.integrations.transformers import Trainer
from narrowgauge.tensors.quantized import QuantizedTensor

RANK = int(os.environ.get("RANK", "0"))
seen: dict[str, Any] = {}


def digest(model: Any) -> str:
    """Of all bits of a model's parameters."""
    found = hashlib.sha256()
    for p in model.parameters():
        data = p.data.codes if isinstance(p.data, QuantizedTensor) else p.data
        found.update(data.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def spied_step(step: Any) -> Any:
    """Note what each micro-batch reads, or for GRPO has sampled."""

    def spied(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = step(self, model, inputs, *args, **kwargs)
        if isinstance(inputs, dict) and "input_ids" in inputs:
            ids, mask = inputs["input_ids"], inputs.get("attention_mask")
            mask = torch.ones_like(ids) if mask is None else mask
            seen["read"] += [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
        return loss

    return spied


def spied_sampling(generate: Any) -> Any:
    """Note what GRPO samples, and whether the recipe's autocast is on."""

    def spied(self: Any, *args: Any, **kwargs: Any) -> Any:
        prompts, completions, *rest = generate(self, *args, **kwargs)
        seen["sampled"] += completions
        seen["autocast"].append(torch.is_autocast_enabled("cpu"))
        return prompts, completions, *rest

    return spied


def spied_training(train: Any) -> Any:
    """Note the weights and random numbers that training ends with."""

    def spied(config: Any, trainer: Any, watch: Any) -> Any:
        ended = train(config, trainer, watch)
        seen["weights"] = digest(trainer.model)
        seen["optimizer"] = type(trainer._own_optimizer()).__name__
        reference = getattr(trainer, "ref_model", None)
        seen["reference"] = None if reference is None else digest(reference)
        seen["random"] = torch.rand(1).item()
        return ended

    return spied


def stop_at(step: int) -> Any:
    """A signal to the second process, or the only one, while that step is at work; it comes once."""
    sent: list[int] = []

    def press(self: TrainerCallback, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step + 1 == step and not sent and os.environ.get("RANK", "1") == "1":
            sent.append(step)
            os.kill(os.getpid(), signal.SIGTERM)

    return press


def do(words: list[str]) -> dict[str, Any]:
    """Run a command; words may begin with `stop=STEP`, `in=FOLDER` or `env=NAME=VALUE`."""
    seen.clear()
    seen.update(read=[], sampled=[], autocast=[])
    has_stop = words[0].startswith("stop=")
    if has_stop:
        Watch.on_step_begin = stop_at(int(words.pop(0).removeprefix("stop=")))  # type: ignore[method-assign]
    folder = words.pop(0).removeprefix("in=") if words[0].startswith("in=") else "."
    name, _, value = words.pop(0).removeprefix("env=").partition("=") if words[0].startswith("env=") else ("", "", "")
    out, err, began_s = io.StringIO(), io.StringIO(), time.monotonic()
    shown_in = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with contextlib.chdir(folder), shown_in[0], shown_in[1], wire.counted() as count:
        with unittest.mock.patch.dict(os.environ, {name: value} if name else {}):
            code = main(words)
    if has_stop:
        del Watch.on_step_begin
    sent = {str(row.dtype): 0 for row in count.rows if row.role == "grad_comm"}
    for row in count.rows:
        if row.role == "grad_comm":
            sent[str(row.dtype)] += row.bytes
    for state in (PartialState, AcceleratorState, GradientState):
        state._reset_state()  # the next command is as another process's
    shown = {"code": code, "out": out.getvalue(), "err": err.getvalue(), "seconds": time.monotonic() - began_s}
    return {**shown, "sent": sent, **seen}


def install() -> None:
    """Put the spies in place."""
    import trl

    Trainer.training_step = spied_step(Trainer.training_step)  # type: ignore[method-assign]
    trl.GRPOTrainer._generate = spied_sampling(trl.GRPOTrainer._generate)  # type: ignore[method-assign]
    finetune._by_trainer = spied_training(finetune._by_trainer)


def run() -> None:
    warnings.simplefilter("error")
    install()
    jobs, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for name, words in jobs.items():
        words = [word.replace("{rank}", str(RANK)) for word in words]
        (folder / f"{name}-{RANK}.json").write_text(json.dumps(do(words)))


if __name__ == "__main__":
    run()
