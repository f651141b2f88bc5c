import copy
import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.models.rope import Rope, rope_tables, rotate


def test_tables_equal_the_formula_in_double_precision():
    cos, sin = rope_tables(2048, 64, 10000.0)
    for position in (0, 1, 257, 1857, 2047):
        for i in (0, 1, 16, 31):
            angle = position * 10000.0 ** (-2 * i / 64)
            # the float32 angle is off by at most position * a few units in the last place
            assert float(cos[position, i]) == pytest.approx(math.cos(angle), abs=1e-6 + position * 3e-7)
            assert float(sin[position, i]) == pytest.approx(math.sin(angle), abs=1e-6 + position * 3e-7)


def test_rotation_is_that_of_complex_numbers_made_of_the_two_halves():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, 8)
    cos, sin = rope_tables(16, 8, 100.0)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.complex(cos, sin)
    torch.testing.assert_close(rotate(x, cos, sin), torch.cat((turned.real, turned.imag), -1), rtol=1e-6, atol=1e-6)


def test_rotation_equals_that_of_llama_in_transformers_in_every_bit():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    q, k = torch.randn(2, 4, 512, 16), torch.randn(2, 2, 512, 16)
    positions = torch.arange(512)[None]
    expected = apply_rotary_pos_emb(q, k, *LlamaRotaryEmbedding(config)(q, positions))
    tables = rope_tables(512, 16, 500000.0)
    assert torch.equal(rotate(q, *tables), expected[0])
    assert torch.equal(rotate(k, *tables), expected[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_tables_keep_float32_when_the_model_is_cast(dtype):  # case 99
    rope = Rope(2048, 64, 10000.0)
    holder = torch.nn.Sequential(rope)
    before = rope.cos.clone(), rope.sin.clone()
    for move in (lambda m: m.to(dtype), copy.deepcopy, lambda m: m.float(), lambda m: m.half()):
        holder = move(holder)
        assert holder[0].cos.dtype is torch.float32
        assert torch.equal(holder[0].cos, before[0]) and torch.equal(holder[0].sin, before[1])


def test_tables_are_in_no_state_dict_and_survive_loading():  # case 99
    config = GPTConfig(vocab_size=8, layers=1, width=32, heads=2, context=512)
    model = GPT(config)
    assert not [name for name in model.state_dict() if "rope" in name]
    cast = GPT(config).to(torch.bfloat16)
    cast.load_state_dict(model.state_dict())
    assert torch.equal(cast.rope.cos, rope_tables(512, 16, 10000.0)[0])


@torch.no_grad()
def test_a_bf16_model_is_closer_to_float32_at_late_positions_than_with_bf16_tables():  # case 99
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=64, layers=2, width=64, heads=4, context=2048, init_std=0.3)
    model, ids = GPT(config), torch.randint(0, 64, (1, 2048))
    exact = model(ids)[0][0, 1024:]
    model.to(torch.bfloat16)
    ours = model(ids)[0][0, 1024:].float()
    # what plain .to(bfloat16) does to a buffer of frequencies
    frequency = (10000.0 ** -(torch.arange(0, 16, 2) / 16)).bfloat16()
    angle = torch.outer(torch.arange(2048).float(), frequency.float())
    model.rope.cos, model.rope.sin = angle.cos(), angle.sin()
    plain = model(ids)[0][0, 1024:].float()
    assert (ours - exact).norm() < 0.5 * (plain - exact).norm()
    assert (ours - exact)[-1].norm() < (plain - exact)[-1].norm()


def test_tables_are_computed_when_the_module_leaves_the_meta_device():  # case 113
    with torch.device("meta"):
        rope = Rope(64, 16, 10000.0)
    assert rope.cos.is_meta and rope.cos.dtype is torch.float32
    rope = rope.to_empty(device="cpu")
    assert torch.equal(rope.sin, rope_tables(64, 16, 10000.0)[1])
