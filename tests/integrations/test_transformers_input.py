"""Models of transformers that are not what `prepare` expects: of unknown classes, quantized already, in 16 bits."""

from __future__ import annotations

import importlib
import json
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, IDS
from test_transformers_save import llama
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM, PretrainedConfig, PreTrainedModel, TrainingArguments

import narrowgauge as ng
from narrowgauge.errors import ConfigError
from narrowgauge.integrations.transformers import Trainer, save_pretrained
from narrowgauge.layers.report import CONVERTED, KEPT, SKIPPED

pytestmark = pytest.mark.usefixtures("one_thread", "seeded")


class Odd(nn.Module):
    """A product that no library has: nothing but a parameter says that it is linear."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


class Linear4bit(nn.Linear):
    """As bitsandbytes': a subclass of nn.Linear that multiplies what it keeps in another format."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias)


class Unknown(PreTrainedModel):
    """A model of a class that no table has."""

    config_class = PretrainedConfig

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.table = nn.Embedding(64, 32)
        self.first, self.odd, self.packed = nn.Linear(32, 32), Odd(), Linear4bit(32, 32)
        self.lm_head = nn.Linear(32, 64)
        self.post_init()
        self.packed.weight = nn.Parameter(torch.randint(0, 2, (32, 32), dtype=torch.uint8), requires_grad=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.lm_head(self.packed(self.odd(self.first(self.table(input_ids)))))


def test_of_an_unknown_class_what_is_linear_is_converted_and_the_rest_is_named() -> None:
    model = Unknown(PretrainedConfig())
    packed = model.packed.weight.clone()
    model, optimizer = ng.prepare(
        model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]), "narrow8"
    )
    rows = {row.name: (row.module, row.status, row.reason) for row in ng.report(model)}
    assert rows["first"][:2] == ("Linear", CONVERTED)
    assert rows["odd"] == ("Odd", KEPT, "no torch.nn.Linear: runs as it is")
    assert rows["packed"] == ("Linear4bit", SKIPPED, "Linear4bit is a subclass of nn.Linear with a forward of its own")
    assert rows["lm_head"][1] == rows["table"][1] == KEPT
    model(IDS).float().logsumexp(-1).sum().backward()
    optimizer.step()
    assert torch.equal(model.packed.weight, packed) and model.packed.weight.dtype is torch.uint8


def test_a_checkpoint_in_fp8_is_trained_from_its_values_and_saved_again(tmp_path: Path) -> None:
    source = save_pretrained(llama(), tmp_path / "fp8", None, "fp8")
    model = LlamaForCausalLM.from_pretrained(source)
    values = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "narrow8")
    assert ng.report(model).counts()["converted"] == 14
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    for name in ("bf16", "fp8"):
        loaded, info = LlamaForCausalLM.from_pretrained(
            save_pretrained(model, tmp_path / f"again-{name}", optimizer, name), output_loading_info=True
        )
        assert not any(info.values()), info
        config = json.loads((tmp_path / f"again-{name}" / "config.json").read_text())
        assert ("quantization_config" in config) == (name == "fp8")
        key = "model.layers.0.mlp.up_proj.weight"
        moved = (loaded.get_parameter(key).float() - values[key]).abs().mean()
        # one step of Adam is 1e-3, shorter where 8-bit moments lose small gradients; bf16 adds 2^-9 of values about
        # 0.08, E4M3 2^-4 at most
        assert 2.5e-4 <= moved <= (1.5e-3 if name == "bf16" else 5e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_loaded_in_16_bits_get_float32_masters(dtype: torch.dtype) -> None:
    model: Any = FAMILIES["llama"].make().to(dtype)
    with pytest.warns(UserWarning, match=str(dtype).removeprefix("torch.")):
        model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "fp16")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    scaler = ng.LossScaler("fp16")
    scaler.scale(model(input_ids=IDS, labels=IDS).loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not optimizer.step_was_skipped and all(p.isfinite().all() for p in model.parameters())


def test_hub_kernels_without_the_package_are_transformers_own_error() -> None:
    with pytest.raises(ValueError, match="Kernels are not available"):
        FAMILIES["llama"].make().set_use_kernels(True)


def test_without_accelerate_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "accelerate":
            raise PackageNotFoundError(name)
        return "99"

    monkeypatch.setattr("narrowgauge.integrations.requirements.version", version)
    monkeypatch.delitem(sys.modules, "narrowgauge.integrations.transformers")
    with pytest.raises(ConfigError, match=r"accelerate is not installed: pip install 'narrowgauge\[hf\]'"):
        importlib.import_module("narrowgauge.integrations.transformers")


def test_a_model_without_anything_to_train_is_refused(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), max_steps=1, report_to=[], use_cpu=True)
    trainer = Trainer(llama().requires_grad_(False), args, train_dataset=[{"input_ids": IDS[0]}], recipe="narrow8")
    with pytest.raises(ConfigError, match="expected parameters to train, found none of LlamaForCausalLM's"):
        trainer.train()
