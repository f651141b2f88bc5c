"""lm-evaluation-harness reads an exported directory as it is, on a task that lies here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from narrowgauge.cli.main import main
from narrowgauge.integrations.finetune_config import SFTConfig
from narrowgauge.integrations.finetune_run import LAST_WRITTEN, FinetuneRun
from tiny_chat import sums, write_lines, write_model

TASK = """
task: tiny_sums
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


@pytest.mark.slow
def test_an_exported_model_is_scored_as_transformers_scores_it(tmp_path: Path) -> None:
    config = SFTConfig(model=str(write_model(tmp_path / "m")), data="d", output=str(tmp_path / "run"))
    folder = FinetuneRun.begin(config)
    folder.unlock()
    checkpoint = folder.checkpoint(1)
    AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32).save_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    tokenizer.save_pretrained(checkpoint)
    (checkpoint / LAST_WRITTEN).write_text("{}")
    exported = tmp_path / "exported"
    assert main(["export", str(folder.path), str(exported)]) == 0

    documents = [{"question": q, "choices": [a, f"{a}1", "no"], "answer": n % 3} for n, (q, a) in enumerate(sums(12))]
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    file = write_lines(tmp_path / "sums.jsonl", documents)
    (tasks / "tiny_sums.yaml").write_text(TASK.format(file=file))
    command = [
        sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={exported},dtype=float32",
        "--tasks", "tiny_sums", "--include_path", str(tasks), "--device", "cpu", "--output_path", str(tmp_path / "out"),
    ]  # fmt: skip
    here = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | here)
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(next((tmp_path / "out").rglob("results_*.json")).read_text())

    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    right = 0
    for document in documents:
        scores = []
        for choice in document["choices"]:
            before = len(tokenizer(document["question"])["input_ids"])
            ids = torch.tensor([tokenizer(f"{document['question']} {choice}")["input_ids"]])
            with torch.no_grad():
                log_probs = model(ids).logits[0, :-1].log_softmax(-1)
            taken = log_probs[range(ids.shape[1] - 1), ids[0, 1:]]
            scores.append(float(taken[before - 1 :].sum()))
        right += int(scores.index(max(scores)) == document["answer"])
    assert results["results"]["tiny_sums"]["acc,none"] == pytest.approx(right / len(documents))
