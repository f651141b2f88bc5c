import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from narrowgauge.errors import ConversionError
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.models.llama_layout import to_llama

CONFIG = GPTConfig(vocab_size=61, layers=2, width=32, heads=4, kv_heads=2, ffn_width=48, context=64, init_std=0.2)


def load_llama(hf_config: dict, hf_state: dict) -> LlamaForCausalLM:
    llama = LlamaForCausalLM(LlamaConfig(**json.loads(json.dumps(hf_config))))
    result = llama.load_state_dict(hf_state, strict=False)
    assert not result.unexpected_keys
    assert result.missing_keys in ([], ["lm_head.weight"])
    llama.tie_weights()
    return llama.eval()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tied_embeddings": True, "rope_theta": 500000.0},
        {"attention_bias": True, "mlp_bias": True, "norm_eps": 1e-6},
        {"kv_heads": None},
        {"kv_heads": 1, "ffn_width": None},
    ],
)
def test_llama_of_transformers_gives_the_same_logits(fields):
    config = CONFIG.replace(**fields)
    model = GPT(config, generator=torch.Generator().manual_seed(0)).eval()
    with torch.no_grad():  # biases and norms that would show if they were lost
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3)
    llama = load_llama(*to_llama(config, model.state_dict()))
    ids = torch.randint(0, 61, (2, 64))
    with torch.no_grad():
        torch.testing.assert_close(llama(ids).logits, model(ids)[0], rtol=1e-4, atol=1e-4)
    assert sum(p.numel() for p in llama.parameters()) == model.parameter_count()


def test_greedy_generation_agrees_with_transformers():
    model = GPT(CONFIG, generator=torch.Generator().manual_seed(0)).eval()
    llama = load_llama(*to_llama(CONFIG, model.state_dict()))
    ids = torch.randint(0, 61, (1, 8))
    theirs = llama.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    assert torch.equal(model.generate(ids, 20, temperature=0), theirs)


def test_extra_state_of_a_converted_model_is_left_out_and_no_memory_is_copied():
    model = GPT(CONFIG)
    state = {**model.state_dict(), "blocks.0.attention.qkv.amax_history": torch.zeros(4)}
    _, hf_state = to_llama(CONFIG, state)
    assert not [name for name in hf_state if "amax" in name]
    ours = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert {t.untyped_storage().data_ptr() for t in hf_state.values()} == ours


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"activation": "gelu"}, "activation=gelu"),
        ({"norm": "layernorm"}, "norm=layernorm"),
        ({"positions": "learned"}, "positions=learned"),
        ({"experts": 4}, "experts=4"),
        ({"swiglu_limit": 7.0}, "swiglu_limit=7.0"),
    ],
)
def test_what_llama_cannot_express_is_refused_by_name(fields, named):
    config = CONFIG.replace(**fields)
    with pytest.raises(ConversionError, match=f"cannot express {named}"):
        to_llama(config, GPT(config, device="meta").state_dict())


def test_all_obstacles_are_named_at_once():
    config = CONFIG.replace(activation="gelu", positions="learned")
    with pytest.raises(ConversionError, match="activation=gelu.*positions=learned"):
        to_llama(config, {})


def test_a_state_dict_of_another_model_is_refused():
    state = GPT(CONFIG, device="meta").state_dict()
    with pytest.raises(ConversionError, match="64 rows, the config says 96"):
        to_llama(CONFIG.replace(kv_heads=4), state)
    del state["norm.weight"]
    with pytest.raises(ConversionError, match="lacks 'norm.weight'"):
        to_llama(CONFIG, state)
