"""Prepared models of transformers as directories that transformers loads without this library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, IDS, batch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import narrowgauge as ng
from narrowgauge.errors import CheckpointError, ConfigError, ConversionError
from narrowgauge.integrations import pretrained
from narrowgauge.integrations.pretrained import save_pretrained

pytestmark = pytest.mark.usefixtures("one_thread", "seeded")


def trained(model: Any, recipe: str, inputs: dict[str, Tensor]) -> tuple[Any, Any]:
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), recipe)
    for _ in range(2):
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), optimizer


def keys(directory: Path) -> list[str]:
    with safe_open(directory / "model.safetensors", "pt") as file:
        return sorted(file.keys())


def value(model: nn.Module, optimizer: Any, name: str) -> Tensor:
    p = model.get_parameter(name)
    held = {id(q) for group in optimizer.param_groups for q in group["params"]}
    return optimizer.full_values(p) if hasattr(optimizer, "full_values") and id(p) in held else p.detach().float()


@pytest.mark.parametrize("recipe", ["fp8_delayed", "narrow8", "fp8_lm_o2"])
@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_loads_every_parameter_and_nothing_else(
    name: str, recipe: str, tmp_path: Path
) -> None:  # case 103
    FAMILIES[name].make().save_pretrained(tmp_path / "plain")
    model, optimizer = trained(FAMILIES[name].make(), recipe, batch(name))
    before = model.config.dtype
    assert save_pretrained(model, tmp_path / "saved", optimizer) == tmp_path / "saved"
    assert model.config.dtype == before
    assert keys(tmp_path / "saved") == keys(tmp_path / "plain")  # a tied head once, no state of scales
    plain = type(FAMILIES[name].make())
    loaded, info = plain.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.dtype is torch.bfloat16
    for key, p in loaded.named_parameters():
        assert torch.equal(p, value(model, optimizer, key).to(torch.bfloat16).to(p.dtype)), key
    if FAMILIES[name].generates:
        tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
        assert tied == FAMILIES[name].is_tied


@pytest.mark.parametrize("recipe", ["fp8_current", "narrow8"])
def test_float32_gives_the_logits_of_the_model_without_casts(recipe: str, tmp_path: Path) -> None:  # case 103
    model, optimizer = trained(FAMILIES["gpt2"].make(), recipe, batch("gpt2"))
    wanted = FAMILIES["gpt2"].make().eval()
    with torch.no_grad():
        for key, p in wanted.named_parameters():
            p.copy_(value(model, optimizer, key))
    loaded = type(wanted).from_pretrained(save_pretrained(model, tmp_path / "saved", optimizer, "fp32"))
    assert loaded.dtype is torch.float32
    assert torch.equal(loaded(input_ids=IDS).logits, wanted(input_ids=IDS).logits)
    bf16 = type(wanted).from_pretrained(save_pretrained(model, tmp_path / "bf16", optimizer), dtype=torch.float32)
    error = bf16(input_ids=IDS).logits - wanted(input_ids=IDS).logits
    assert 0 < error.norm() <= 1e-2 * wanted(input_ids=IDS).logits.norm()


def llama(**options: Any) -> LlamaForCausalLM:
    shape = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, **shape | more | options))


def round_trip(weight: Tensor) -> Tensor:
    """Through E4M3 codes with a scale for each block of 128x128, and bfloat16."""
    tiles = weight.reshape(weight.shape[0] // 128, 128, weight.shape[1] // 128, 128)
    amax = tiles.abs().amax((1, 3), keepdim=True)
    scale = torch.full_like(amax, 448.0) / amax  # tensor by tensor: a scalar's quotient is one ulp off on CPUs
    codes = (tiles * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * (torch.ones_like(scale) / scale)).reshape(weight.shape).to(torch.bfloat16)


@pytest.mark.parametrize("options", [{"tie_word_embeddings": True}, {"intermediate_size": 400}], ids=str)
def test_fp8_is_what_transformers_reloads(options: dict[str, Any], tmp_path: Path) -> None:  # case 103
    model, optimizer = trained(llama(**options), "narrow8", {"input_ids": IDS, "labels": IDS})
    directory = save_pretrained(model, tmp_path / "saved", optimizer, "fp8")
    mlps = [f"model.layers.{i}.mlp.{x}_proj" for i in range(2) for x in ("gate", "up", "down")]
    kept = mlps if "intermediate_size" in options else []  # 400 is no multiple of 128
    config = json.loads((directory / "config.json").read_text())
    told = config["quantization_config"]
    assert config["dtype"] == "bfloat16" and sorted(told.pop("modules_to_not_convert")) == sorted([*kept, "lm_head"])
    assert told == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    }  # fmt: skip
    found = load_file(directory / "model.safetensors")
    assert ("lm_head.weight" in found) != ("tie_word_embeddings" in options)
    in_fp8 = {name.removesuffix(".weight") for name, t in found.items() if t.dtype is torch.float8_e4m3fn}
    attention = {f"model.layers.{i}.self_attn.{x}_proj" for i in range(2) for x in "qkvo"}
    assert in_fp8 == attention | ({*mlps} - {*kept})
    assert all(found[f"{name}.weight_scale_inv"].dtype is torch.float32 for name in in_fp8)
    loaded, info = LlamaForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info.values()), info
    for key, p in loaded.named_parameters():
        wanted = value(model, optimizer, key)
        layer = key.removesuffix(".weight")
        expected = round_trip(wanted) if layer in in_fp8 else wanted.to(torch.bfloat16)
        assert torch.equal(p, expected.to(p.dtype)), key
    exact = LlamaForCausalLM.from_pretrained(save_pretrained(model, tmp_path / "fp32", optimizer, "fp32"))
    wanted = exact(input_ids=IDS).logits
    error = loaded(input_ids=IDS).logits.float() - wanted
    assert 0.01 <= error.norm() / wanted.norm() <= 14**0.5 * 0.026  # of weights alone, in 14 layers at most


def test_fp8_of_a_mixture_names_its_experts_and_of_gpt2_is_refused(tmp_path: Path) -> None:
    mixture = FAMILIES["mixtral"]
    _, kept = pretrained.fp8_layers(ng.prepare(mixture.make(), None, "fp8_current")[0])
    assert kept == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts", "lm_head"]
    with pytest.raises(ConversionError, match="GPT2LMHeadModel has no torch.nn.Linear beside its head"):
        save_pretrained(FAMILIES["gpt2"].make(), tmp_path / "saved", None, "fp8")
    groups, kept = pretrained.fp8_layers(FAMILIES["t5"].make())
    assert all(name.endswith(".wo") for name in kept[:-1])  # which transformers keeps in float32
    assert ["encoder.block.0.layer.0.SelfAttention.q", "encoder.block.0.layer.0.SelfAttention.k",
            "encoder.block.0.layer.0.SelfAttention.v", "encoder.block.0.layer.0.SelfAttention.o"] in groups  # fmt: skip
    assert not (tmp_path / "saved").exists()


def test_layers_that_the_recipe_keeps_stay_wide(tmp_path: Path) -> None:
    model, _ = ng.prepare(llama(), None, ng.recipe("fp8_current", exclude=("*down_proj",)))
    _, kept = pretrained.fp8_layers(model)
    assert kept == ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj", "lm_head"]


def test_weights_in_several_files_get_their_scales_and_index(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path, max_shard_size="400KB")
    values = pretrained.plain_values(model, None)
    tensors, config = pretrained.layers_to_fp8(values, *pretrained.fp8_layers(model))
    pretrained._put_in(tmp_path, {k: t for k, t in tensors.items() if values.get(k) is None or t.dtype.itemsize == 1})
    pretrained._add_to_config(tmp_path, {"quantization_config": config})
    told = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(told["weight_map"].values())) > 1 and told["weight_map"].keys() == tensors.keys()
    loaded, info = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(loaded.get_parameter(name).bfloat16(), round_trip(values[name]))


def test_what_cannot_be_saved_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES["llama"].make()
    with pytest.raises(ConfigError, match="format 'bf61': expected bf16, fp32, fp8; did you mean 'bf16'"):
        save_pretrained(model, tmp_path / "saved", None, "bf61")
    with pytest.raises(ConfigError, match="expected a PreTrainedModel of transformers, found Linear"):
        save_pretrained(nn.Linear(2, 2), tmp_path / "saved")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(ConfigError, match="mine: expected a new or empty directory"):
        save_pretrained(model, tmp_path / "mine")

    def no_room(*_args: Any, **_kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(model), "save_pretrained", no_room)
    with pytest.raises(CheckpointError, match="saved was not written: No space left on device"):
        save_pretrained(model, tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
