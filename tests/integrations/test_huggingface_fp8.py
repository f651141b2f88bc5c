"""A directory exported in FP8 is what transformers reads, and stands for the model's weights."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import narrowgauge as ng
from narrowgauge.data.tokenizer import Tokenizer
from narrowgauge.errors import ConfigError, ConversionError
from narrowgauge.integrations.huggingface import export_llama
from narrowgauge.models.fp8_layout import to_fp8
from narrowgauge.models.gpt import GPT
from narrowgauge.models.llama_layout import to_llama
from narrowgauge.models.presets import preset

TEXT = "def main():\n    return 'naïve λ'\n" * 20
LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
           "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip


def a_model(**fields) -> GPT:
    shape = {"vocab_size": 300, "layers": 2, "width": 256, "heads": 4, "kv_heads": 2, "ffn_width": 384, "context": 64}
    return GPT(preset("tiny", **shape | fields), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT], 300)


def test_layers_are_codes_with_one_inverse_scale_a_block(tokenizer, tmp_path):
    model = a_model(vocab_size=tokenizer.vocab_size)
    directory = export_llama(model, tokenizer, tmp_path / "hf", "fp8")
    found = load_file(directory / "model.safetensors")
    _, weights = to_llama(model.config, model.state_dict())
    for layer in range(2):
        for linear in LINEARS:
            name = f"model.layers.{layer}.{linear}.weight"
            codes, scale, weight = found.pop(name), found.pop(f"{name}_scale_inv"), weights.pop(name)
            assert codes.dtype is torch.float8_e4m3fn and scale.dtype is torch.float32
            assert scale.shape == (weight.shape[0] // 128, weight.shape[1] // 128)
            tiles = weight.reshape(scale.shape[0], 128, scale.shape[1], 128).abs().amax((1, 3))
            quant_scale = torch.full_like(tiles, 448.0) / tiles
            assert torch.equal(scale, torch.ones_like(tiles) / quant_scale)
            spread = quant_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            expected = (weight * spread).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8)), name
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weight.bfloat16()) for name, weight in weights.items())
    config = json.loads((directory / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }


@pytest.mark.parametrize(
    "fields", [{}, {"tied_embeddings": True}, {"attention_bias": True}, {"ffn_width": 400}], ids=str
)
def test_transformers_dequantizes_it_to_the_same_weights(fields, tokenizer, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM
    from transformers.quantizers import quantizer_finegrained_fp8

    # transformers asks for accelerate, and on a CPU, where it dequantizes what it reads, uses nothing of it
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    shape = {"vocab_size": tokenizer.vocab_size, "width": 512, "heads": 8, "kv_heads": 2, "ffn_width": 768} | fields
    model = a_model(**shape).eval()
    directory = export_llama(model, tokenizer, tmp_path / "hf", "fp8")
    loaded = AutoModelForCausalLM.from_pretrained(directory).eval()
    state, weights = loaded.state_dict(), to_llama(model.config, model.state_dict())[1]
    tensors, _ = to_fp8({name: weight.detach() for name, weight in weights.items()})
    assert not any("scale" in name for name in state)
    for name, weight in weights.items():
        expected = weight.bfloat16()
        if f"{name}_scale_inv" in tensors:
            spread = tensors[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            expected = (tensors[name].float() * spread).bfloat16()
            assert (expected.float() - weight).norm() <= 0.04 * weight.norm()  # E4M3: 2^-4 / sqrt(3) of each at most
        assert torch.equal(state[name], expected), name
    ids = torch.tensor([tokenizer.encode(TEXT)[:48]])
    with torch.no_grad():
        ours, theirs = model(ids)[0], loaded(ids).logits.float()
    assert (ours - theirs).norm() <= 0.1 * ours.norm()


def test_its_layers_match_those_that_transformers_makes_for_a_gpu(tokenizer, tmp_path):
    from transformers import AutoConfig, LlamaForCausalLM
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
    from transformers.utils.quantization_config import FineGrainedFP8Config

    directory = export_llama(a_model(vocab_size=tokenizer.vocab_size), tokenizer, tmp_path / "hf", "fp8")
    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        theirs = LlamaForCausalLM(config)
    quantization = FineGrainedFP8Config(**config.quantization_config)
    replace_with_fp8_linear(theirs, quantization.modules_to_not_convert, quantization, pre_quantized=True)
    expected = {name: (p.shape, p.dtype) for name, p in theirs.named_parameters()}
    found = {name: (t.shape, t.dtype) for name, t in load_file(directory / "model.safetensors").items()}
    assert found.keys() == expected.keys()
    for name, (shape, dtype) in expected.items():
        assert found[name][0] == shape, name
        if dtype is torch.float8_e4m3fn or name.endswith("scale_inv"):
            assert found[name][1] is dtype, name


def test_what_has_no_whole_blocks_stays_in_bfloat16_with_all_that_vllm_joins_it_to(tokenizer, tmp_path):
    model = a_model(vocab_size=tokenizer.vocab_size, kv_heads=1, ffn_width=400)  # 64 rows of k and v
    directory = export_llama(model, tokenizer, tmp_path / "hf", "fp8")
    found = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    in_fp8 = {name.removesuffix(".weight") for name, t in found.items() if t.dtype is torch.float8_e4m3fn}
    assert in_fp8 == {f"model.layers.{layer}.self_attn.o_proj" for layer in range(2)}
    kept = [f"model.layers.{layer}.{name}" for layer in range(2) for name in LINEARS if name != "self_attn.o_proj"]
    assert sorted(config["modules_to_not_convert"]) == sorted(["lm_head", *kept])
    with pytest.raises(ConversionError, match="128x128.*export in bf16"):
        export_llama(a_model(vocab_size=300, width=64), tokenizer, tmp_path / "none", "fp8")
    assert not (tmp_path / "none").exists()


def test_an_unknown_format_is_refused(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="format 'fp9': expected bf16, fp32, fp8"):
        export_llama(a_model(vocab_size=300), tokenizer, tmp_path / "hf", "fp9")


@pytest.mark.parametrize("weight_format", ["bf16", "fp32", "fp8"])
def test_the_files_load_in_a_process_without_this_library(weight_format, tokenizer, tmp_path):  # case 71
    directory = export_llama(a_model(vocab_size=tokenizer.vocab_size), tokenizer, tmp_path / "hf", weight_format)
    program = (
        "import sys, torch; from safetensors.torch import load_file; "
        f"found = load_file({str(directory / 'model.safetensors')!r}); "
        "assert all(type(t) is torch.Tensor for t in found.values()); "
        "assert not any(name.startswith('narrowgauge') for name in sys.modules); print(len(found))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 2 * 9 + 3 + (14 if weight_format == "fp8" else 0)


def test_it_comes_back_into_a_model_of_ours(tokenizer, tmp_path):  # case 73
    model = a_model(vocab_size=tokenizer.vocab_size)
    directory = export_llama(model, tokenizer, tmp_path / "hf", "fp8")
    _, weights = to_llama(model.config, model.state_dict())
    holder = torch.nn.Module()
    for name, weight in weights.items():
        parent = holder
        for part in name.split(".")[:-1]:
            if not hasattr(parent, part):
                parent.add_module(part, torch.nn.Module())
            parent = getattr(parent, part)
        parent.weight = torch.nn.Parameter(torch.zeros_like(weight))
    ng.load(directory, holder)
    for name, weight in holder.state_dict().items():
        assert (weight - weights[name]).norm() <= 0.04 * weights[name].norm(), name
